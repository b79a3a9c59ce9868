"""`load`: a checkpoint, inspected, then streamed to the device in the precision asked for; nothing half-loaded remains."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.loader.request import LoadRequest, make_request
from vramfit.records.load_report import LoadReport
from vramfit.units import format_bytes

if TYPE_CHECKING:
    import torch

    from vramfit.loader.gauge import Gauge
    from vramfit.loader.origin import Origin
    from vramfit.loader.tensors import CheckpointTensors

Progress = Callable[[int, int], None]
SAMPLED_FROM_BYTES = 2**20
"""Tensors after which the host's memory is looked at."""


def load(
    model: Any,
    task: str = "sequence-classification",
    precision: str = "fp32",
    quantize: str | None = None,
    plan: Any = None,
    device: str = "cuda",
    *,
    random_weights: bool = False,
    num_labels: int | None = None,
    attention: str | None = None,
    memory: str | int | None = None,
    trust_remote_code: bool = False,
    offload: str | None = None,
    progress: Progress | None = None,
) -> "tuple[torch.nn.Module, LoadReport]":
    """Load a checkpoint inside a budget, or say precisely why not.

    The checkpoint is inspected first, from its headers. Then its tensors go one at a time from the mapped file to the
    device, in their final type when they arrive: the device never holds more than the model and one tensor. A head
    that the checkpoint lacks is initialised, the same way every time, and named in the report.

    Args:
        model: a folder, a hub id, or a catalogue name; with `random_weights` also a configuration.
        task: the head; see `Workload`.
        precision: of the weights: bf16 and fp16 halve them; tf32 and amp-* keep fp32.
        quantize: int8, int8-dynamic or int4 for linear layers, through torchao; embeddings and norms stay.
        plan: a `Plan`: what its workload says of task, precision, quantize, attention, labels, memory and offload counts.
        device: cuda, cuda:1, cpu.
        random_weights: no checkpoint: every weight drawn, the same way every time.
        num_labels: size of a classification head; None takes the configuration's.
        attention: sdpa or eager; None takes the model's default.
        memory: what the weights may take on the device; None takes what is free there.
        trust_remote_code: run Python code that the model's repository brings.
        offload: weights: layers beyond `memory` wait in host memory and come for their turn; for inference.
        progress: called with bytes read and bytes to read.

    Returns:
        The model, in evaluation mode, and what loading it took.

    Raises:
        CheckpointError: damaged, unsafe, or not this model's; carries everything fatal that was found.
        NoPlanFits: the weights do not fit the budget; carries the shortfall.
        WorkloadError: keywords that no model could follow.
        UnknownModel: nothing goes by that name.
        MissingExtra: quantize without torchao.

    >>> model, report = load("bert-tiny", random_weights=True, device="cpu")
    >>> report.model_class, model.training
    ('BertForSequenceClassification', False)
    """
    request = make_request(
        model,
        plan=plan,
        device=device,
        random_weights=random_weights,
        trust_remote_code=trust_remote_code,
        task=task,
        precision=precision,
        quantize=quantize,
        num_labels=num_labels,
        attention=attention,
        memory=memory,
        offload=offload,
    )
    return load_request(request, progress=progress)


def load_request(
    request: LoadRequest, *, progress: Progress | None = None, scan: bool = False
) -> "tuple[torch.nn.Module, LoadReport]":
    """`load` for a request that has been checked; `scan` also looks for NaN and infinite weights."""
    started = time.perf_counter()
    import torch

    from vramfit.loader.gauge import Gauge
    from vramfit.loader.origin import find_origin
    from vramfit.techniques import quantization

    device = _device(request.device)
    quantization.check(request.workload.quantize, request.workload.precision, device)
    origin = find_origin(request, scan=scan)
    gauge = Gauge(device)
    try:
        model, facts = _make(request, origin, device, gauge, progress)
    except torch.OutOfMemoryError as error:
        failure = NoPlanFits(
            f"{device} ran out of memory while {origin.resolved.name} was loaded: {str(error).splitlines()[0]}",
            hint="another process may hold it; offload weights, precision bf16 or quantize int8 need less",
        )
    else:
        return model, _report(request, origin, model, gauge, facts, time.perf_counter() - started)
    # beyond the handler, the failed tensors are no longer held by a traceback
    torch.cuda.empty_cache()
    raise failure


def _make(
    request: LoadRequest, origin: "Origin", device: "torch.device", gauge: "Gauge", progress: Progress | None
) -> "tuple[torch.nn.Module, dict[str, Any]]":
    """The model with its weights; emptied again if anything goes wrong on the way."""
    from vramfit.loader.budget import resident_layers
    from vramfit.loader.filling import Filling, empty
    from vramfit.loader.fresh import initialise
    from vramfit.loader.tensors import CheckpointTensors
    from vramfit.loader.transfer import ToHost, make_transfer
    from vramfit.models.anatomy import encoder_layers
    from vramfit.models.build import build_meta
    from vramfit.techniques import offloading, precision, quantization

    w, resolved, inspection = request.workload, origin.resolved, origin.inspection
    num_resident = resident_layers(request, resolved, device)
    model = build_meta(resolved, attention=w.attention)
    layers = encoder_layers(model)
    linears = [] if w.quantize is None else quantization.quantizable(model, w.quantize)
    with ExitStack() as stack:
        stack.callback(empty, model)
        tensors = None if inspection is None else stack.enter_context(CheckpointTensors(inspection))
        fresh = set(model.state_dict()) if inspection is None else set(inspection.fresh)
        initialise(model, fresh)
        transfer = make_transfer(device)
        Filling(
            tensors=tensors if tensors is not None else {},
            dtype=precision.weight_dtype(w.precision),
            transfer=transfer,
            host=ToHost(_device("cpu")),
            quantize=w.quantize,
            quantized={id(linear) for linear in linears},
            offloaded={id(module) for layer in layers[num_resident:] for module in layer.modules()},
            on_tensor=_counter(tensors, gauge, progress),
        ).fill(model)
        slots = offloading.apply(model, num_resident, device)
        transfer.finish()
        _dress(model, request, origin)
        stack.pop_all().callback(lambda: None)
        if tensors is not None:
            tensors.__exit__(None, None, None)
    facts = {"num_quantized": len(linears), "num_layers": len(layers), "num_resident_layers": num_resident}
    return model, facts | ({"slots": slots.slots} if slots is not None else {})
