"""`Copies`: many small copies between a device and its host, sent as few large ones."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Copies:
    """Tensors in one dimension that are copied, and where to; those that lie side by side at both ends are one."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    num_kinds: int = 1
    """So many kinds of tensors take turns: a neighbour is among the last so many."""

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One more."""
        for at in range(-1, -1 - min(self.num_kinds, len(self.targets)), -1):
            if _follows(target, self.targets[at]) and _follows(source, self.sources[at]):
                self.targets[at], self.sources[at] = _both(self.targets[at], target), _both(self.sources[at], source)
                return
        self.targets.append(target)
        self.sources.append(source)

    def send(self) -> None:
        """All of them in one call: there are thousands, and the host must be ahead of the link.

        A prediction takes them one by one, as they go: in one call, meta tensors are copied twice.
        """
        if self.targets and not any(tensor.is_meta for tensor in (self.targets[0], self.sources[0])):
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)
            return
        for target, source in zip(self.targets, self.sources, strict=True):
            target.copy_(source, non_blocking=True)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _follows(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor begins where another ends, in the same memory."""
    if tensor.is_meta or tensor.dtype != other.dtype or tensor.data_ptr() != other.data_ptr() + other.nbytes:
        return False
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _both(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.as_strided((first.numel() + second.numel(),), (1,))
