"""`apply_techniques`: what a workload changes in a model, in the one order that a prediction and a run share."""

import torch

from vramfit.techniques import (
    casting,
    checkpointing,
    freezing,
    fusing,
    layer_inputs,
    lora,
    packing,
    precision,
    quantization,
)
from vramfit.workload import Workload


def apply_techniques(model: torch.nn.Module, workload: Workload) -> None:
    """Change a model in place, on the meta device or on a real one.

    The order matters: adapters take the type of the weights, freezing says which layers LoRA and quantization may
    have, quantization leaves alone what learns, and casting what is quantized.

    Raises:
        WorkloadError: a technique that the model does not have.
        MissingExtra: a package that a technique needs.
    """
    w = workload
    if w.attention == "packed":
        packing.apply(model, w.task)
    precision.apply(model, w.precision)
    freezing.apply(model, w.freeze)
    lora.apply(model, w.lora)
    quantization.apply(model, w.quantize, trains=w.trains)
    model.train(w.mode != "infer" and w.dropout)
    if w.mode != "infer":
        checkpointing.apply(model, w.checkpointing)
    if casting.is_for(w):
        casting.apply(model)
    else:
        casting.undo(model)
    if fusing.is_for(w):
        fusing.require(model)
    else:
        fusing.undo(model)
    if w.offload == "activations":
        layer_inputs.apply(model)
