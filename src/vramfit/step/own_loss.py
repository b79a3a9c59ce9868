"""The loss of a module of the user's: that of its labels where it is the same, else its own, as a mean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.step.plain import Autocast, Batch, each_tensor
from vramfit.step.recovery import is_out_of_memory
from vramfit.tasks.base import IGNORED, PER_TOKEN
from vramfit.tasks.parts.losses import (
    CONTRACT,
    LABELS,
    HeadLoss,
    described,
    head_loss,
    loss_of,
    mean_of,
    model_inputs,
    num_labelled,
    parameters_of,
    taken_by,
)


def local(tensor: Any) -> torch.Tensor:
    """A process's own part of a tensor; one that is not sharded is its own part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def put_part(into: Any, whole: torch.Tensor) -> None:
    """Write a whole tensor into one that may be sharded: each process takes its part."""
    if hasattr(into, "placements"):
        from torch.distributed.tensor import distribute_tensor

        device = local(into).device
        cut = distribute_tensor(whole.to(device), into.device_mesh, into.placements, src_data_rank=None)
        local(into).copy_(local(cut))
    else:
        into.copy_(whole)


def full(tensor: Any) -> torch.Tensor:
    """A tensor as a whole; for one that is sharded, all processes must ask."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


MAX_DIFFERENCE = 1e-3
"""Between two ways to one loss; rounding in 32 bits stays far below."""
OWN_HINT = (
    "give loss_fn (a sum over samples) and count_fn (what to divide it by), or a micro_batch that holds the whole batch"
)
_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_Counts = Callable[[Batch], int]


def is_own(model: torch.nn.Module) -> bool:
    """Whether forward is of the user's making: how transformers' heads compute their losses is known."""
    inner: Any = model
    while isinstance(inner, _WRAPPERS) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, _WRAPPERS) else inner._orig_mod
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return not str(type(inner).forward.__module__).startswith("transformers.")


def own_loss(model: torch.nn.Module, batch: Batch, *, autocast: Autocast = nullcontext) -> HeadLoss:
    """How the loss of a module of the user's is summed, found by trying it on two samples; nothing is learned.

    A module that gives logits without labels, and whose own loss, if it has one, is what the labels call for, is
    treated like a head of transformers. Any other is asked for its own loss, which must be a mean over samples or over
    labels, or a sum.

    Args:
        batch: some samples on the module's device; without data, only what kind of output there is can be seen.

    Raises:
        WorkloadError: what forward takes or gives is not as `CONTRACT` says.
    """
    check_inputs(model, batch)
    with still(model), autocast():
        if LABELS & set(batch) and not LABELS & set(taken_by(model, batch)):
            return _readable(model, batch)
        output = model(**batch)
        own = loss_of(output)
        if own is None and not LABELS & set(batch):
            text = (
                f"{type(model).__name__} gives {described(output)}: no loss of one number, and the batch has no labels"
            )
            raise WorkloadError([text], hint=CONTRACT)
        if own is None:
            return _readable(model, batch)
        known = _summed(model, batch)
        if known is not None and (own.is_meta or _is_same(float(known[1]), own)):
            return known[0]
        counts = _num_labels if own.is_meta else _divisor(model, batch, own)
    return _as_sum(model, counts)


def telling_rows(batch: Batch) -> list[int]:
    """Two samples that tell a mean over samples from one over labels: those with most and with fewest labels."""
    num, labels = _num_samples(batch), batch.get("labels")
    if labels is None or labels.dim() < PER_TOKEN or labels.is_floating_point():
        return list(range(min(num, 2)))
    counts = (labels != IGNORED).flatten(1).sum(1).tolist()
    labelled = sorted((i for i in range(num) if counts[i]), key=counts.__getitem__) or list(range(num))
    return list(dict.fromkeys([labelled[-1], labelled[0]]))


def check_inputs(model: torch.nn.Module, batch: Batch, whose: str = "the batch", hint: str = CONTRACT) -> None:
    """Refuse a batch that forward does not take.

    Args:
        whose: batch it is, in words.
        hint: what to do.

    Raises:
        WorkloadError: with what it takes.
    """
    parameters = parameters_of(model)
    if parameters is None:
        return
    beyond = [name for name in batch if name not in parameters and name not in LABELS]
    needed = [name for name, p in parameters.items() if p.default is p.empty and name not in batch]
    if beyond or needed:
        text = (
            f"{type(model).__name__}.forward takes {', '.join(parameters) or 'nothing'}; {whose} has {', '.join(batch)}"
        )
        raise WorkloadError([text], hint=hint)


def needs_its_labels(model: torch.nn.Module, batch: Batch) -> bool:
    """Whether forward fails without the labels that it takes."""
    if not LABELS & set(taken_by(model, batch)):
        return False
    with still(model):
        try:
            model(**model_inputs(batch))
        except Exception as error:  # whatever a forward does that was made for labels
            if is_out_of_memory(error):
                raise
            return True
    return False


def _readable(model: torch.nn.Module, batch: Batch) -> HeadLoss:
    """The loss that the labels call for, where the module gives none and its logits go with them."""
    loss = head_loss(model, batch)
    output = model(**model_inputs(batch))
    try:
        mean_of(loss, output, batch)
    except WorkloadError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(f"{name} of shape {list(batch[name].shape)}" for name in sorted(LABELS & set(batch)))
        text = f"{type(model).__name__} gives {described(output)} and no loss, which does not go with {shapes}"
        raise WorkloadError([f"{text}: {str(error).splitlines()[0]}"], hint=CONTRACT) from None
    return loss


def _summed(model: torch.nn.Module, batch: Batch) -> tuple[HeadLoss, torch.Tensor] | None:
    """The loss that the labels call for, of logits that were given without them; None where there is none."""
    try:
        loss = head_loss(model, batch)
        return loss, mean_of(loss, model(**model_inputs(batch)), batch)
    except Exception as error:  # whatever a forward does that was made for labels
        if is_out_of_memory(error):
            raise
        return None


def _is_same(value: float, own: torch.Tensor) -> bool:
    rounding = max(MAX_DIFFERENCE, 4 * torch.finfo(own.dtype).eps)
    return abs(value - float(own)) <= rounding * max(abs(value), abs(float(own)), 1e-6)


def _divisor(model: torch.nn.Module, batch: Batch, own: torch.Tensor) -> _Counts | None:
    """What the loss of all samples divides the sum of each one's by: labels, samples or nothing; None if it is neither.

    A loss that is a sum already is divided by 1.
    """
    alone = [each_tensor(batch, lambda value, i=i: value[i : i + 1]) for i in range(_num_samples(batch))]  # type: ignore[misc]
    losses = [float(loss_of(model(**one))) for one in alone]  # type: ignore[arg-type]
    for counts in (_num_labels, _num_samples):
        weights = [counts(one) for one in alone]
        total = sum(n * value for n, value in zip(weights, losses, strict=True) if n)
        if sum(weights) and _is_same(total / sum(weights), own):
            return counts
    return _one if _is_same(sum(losses), own) else None


def _as_sum(model: torch.nn.Module, counts: _Counts | None) -> HeadLoss:
    """The module's own loss, times what it was divided by; where that is not known, it can only be taken whole."""
    weight = counts or _num_samples

    def sums(output: Any, batch: Batch) -> list[torch.Tensor]:
        own = loss_of(output)
        if own is None:
            raise WorkloadError([f"{type(model).__name__} gave a loss before, and gives none now"], hint=CONTRACT)
        return [own * weight(batch)]

    return HeadLoss(sums, lambda batch: [weight(batch)], takes_labels=True, splits=counts is not None)


def _num_samples(batch: Batch) -> int:
    return int(next(iter(batch.values())).shape[0])


def _one(batch: Batch) -> int:
    return 1


def _num_labels(batch: Batch) -> int:
    return num_labelled(batch["labels"]) if "labels" in batch else 0


@contextmanager
def still(model: torch.nn.Module) -> Iterator[None]:
    """For a moment nothing learns and nothing is dropped."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
