"""What tensors are: weights, gradients and optimizer state by their owners, the rest by what Python can see."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from vramfit.records.watch import LiveTensors


def categories(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, str]:
    """Storage → its category, for all that a model or an optimizer keeps."""
    found: dict[int, str] = {}
    for optimizer in optimizers:
        for state in list(optimizer.state.values()):
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    found[_key(value)] = "optimizer"
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            found[_key(tensor)] = "weights"
            if tensor.grad is not None:
                found[_key(tensor.grad)] = "gradients"
    return found


def python_tensors(
    owns: Callable[[torch.Tensor], bool], known: dict[int, str], allocated_bytes: int | None
) -> tuple[LiveTensors, ...]:
    """Live tensors that Python knows, by category and shape; what is allocated beyond them is autograd's."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    seen: set[int] = set()
    for value in gc.get_objects():
        if not issubclass(type(value), torch.Tensor) or type(value).__name__ == "FakeTensor":
            continue
        try:
            key = _key(value)
            if key in seen or not value.untyped_storage().nbytes() or not owns(value):
                continue
        except (RuntimeError, NotImplementedError, ReferenceError):  # no storage of its own
            continue
        seen.add(key)
        category = known.get(key, "other")
        shape = "" if category != "other" else f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        sizes[category, shape].append(value.untyped_storage().nbytes())
    groups = [
        LiveTensors(category=category, operator=shape, num_tensors=len(each), num_bytes=sum(each))
        for (category, shape), each in sizes.items()
    ]
    rest = (allocated_bytes or 0) - sum(g.num_bytes for g in groups)
    if rest > 0:
        groups.append(
            LiveTensors(category="activations", operator="kept by autograd for backward", num_tensors=1, num_bytes=rest)
        )
    return tuple(sorted(groups, key=lambda g: -g.num_bytes))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
