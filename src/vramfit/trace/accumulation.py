"""When autograd sums two gradients in place: it holds the only reference, which a watching mode hides.

torch/csrc/autograd/input_buffer.cpp (2.11), can_accumulate_inplace: one reference to the tensor and to its
storage. Under a dispatch mode torch always adds out of place, and the mode itself adds references, so the
counts of the two cases are measured once with a graph whose answer is known.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The reference counts that a mode sees when autograd is the only holder."""

    max_tensor_uses: int
    max_storage_uses: int

    @staticmethod
    @cache
    def calibrated() -> "Accumulation":
        """Counts of this torch release, from a sum that a run without a mode does in place."""
        seen: list[tuple[int, int]] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
                    seen.append(_uses(args[0]))
                return func(*args, **(kwargs or {}))

        with torch.enable_grad():
            x = torch.empty(4, device="meta", requires_grad=True)
            y = x * 1.0
            with Watch():
                # gradients of sin and cos are fresh tensors that nobody else holds
                (torch.sin(y) * torch.cos(y)).sum().backward()
        assert seen, "autograd did not sum gradients"
        return Accumulation(*seen[0])

    def is_in_place(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether autograd would write the sum into `left`."""
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        tensor_uses, storage_uses = _uses(left)
        return (
            tensor_uses <= self.max_tensor_uses
            and storage_uses <= self.max_storage_uses
            and left.untyped_storage().nbytes() == left.numel() * left.element_size()
            and torch.ops.aten.is_non_overlapping_and_dense.default(left)
        )


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    storage_uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage_uses  # type: ignore[attr-defined]
