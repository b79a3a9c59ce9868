"""What a `Stepper` cannot do right with a model, an optimizer and settings: said before anything is begun."""

from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.runtime.invariance import across_samples, warn_of_names
from vramfit.techniques import layer_inputs, offloading
from vramfit.workload import CHOICES


def check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batch: int | None,
    precision: str,
    loss_fn: Any,
    count_fn: Any,
    offload: str | None,
) -> None:
    """Every contradiction at once.

    Raises:
        WorkloadError: there is one.
    """
    problems = [*across_samples(model), *_wrong_offload(model, offload)]
    if not isinstance(micro_batch, int) or isinstance(micro_batch, bool) or micro_batch < 1:
        problems.append(f"micro_batch {micro_batch!r} is not a whole number from 1, and no plan gives one")
    if (loss_fn is None) != (count_fn is None):
        problems.append("loss_fn and count_fn go together: a sum, and what to divide it by")
    trainable = [p for p in CHOICES["precision"] if p != "fp16"]
    if precision not in trainable:
        problems.append(f"precision {precision!r} is not one of {', '.join(trainable)}")
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("LBFGS evaluates the loss inside its step, so a window cannot be done again")
    if problems:
        raise WorkloadError(problems)
    warn_of_names(model, loss_fn)


def check_batch(batch: Any) -> None:
    """Refuse a batch that holds no tensors, before it is split.

    Raises:
        WorkloadError: what it holds.
    """
    if not batch:
        raise WorkloadError(["the batch is empty"], hint="give a dict of tensors, one row a sample")
    arrays = [name for name, value in batch.items() if type(value).__module__ == "numpy"]
    if arrays:
        problem = f"{', '.join(arrays)} of the batch: numpy arrays, not tensors"
        raise WorkloadError([problem], hint="make tensors of them with torch.from_numpy")


def _wrong_offload(model: torch.nn.Module, offload: str | None) -> list[str]:
    """What does not go with where the weights are."""
    layers = offloading.layer_slots_of(model)
    if offload not in (None, "optimizer", "weights", "activations"):
        return [f"offload {offload!r} is not one of optimizer, weights, activations"]
    if offload == "activations" and layer_inputs.layer_inputs_of(model) is None:
        return ["offload activations: no layer's input waits in host memory (layer_inputs.apply)"]
    if layers is None:
        return ["offload weights: no layer of the model waits in host memory"] if offload == "weights" else []
    if not layers.trains:
        return ["the model's layers were offloaded for inference: offloaded weights do not learn"]
    if offload != "weights":
        return ["the model's layers wait in host memory: take offload='weights'"]
    if not getattr(model, "is_gradient_checkpointing", False):
        return ["offload weights computes every layer again in backward: checkpointing must be full"]
    return []
