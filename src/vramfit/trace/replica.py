"""`ReplicaOnPaper`: a rank of DDP, which has the whole model and keeps its gradients in buckets.

What DistributedDataParallel asks for before its buckets lie where they stay decides which cached blocks a step finds
(torch 2.11 and 2.13: torch/csrc/distributed/c10d/reducer.cpp and comm.cpp, torch/nn/parallel/distributed.py).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.step.commit import Touch
from vramfit.step.splitting import Alone
from vramfit.trace.tracer import Tracer

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
BROADCAST_BYTES = 250 * 2**20
"""DistributedDataParallel's `_DEFAULT_FIRST_BUCKET_BYTES`, `bucket_cap_mb` and `broadcast_bucket_size`."""
MAX_IN_FLIGHT = 2
"""Broadcasts of weights that are under way at once (`broadcast_coalesced`)."""


class ReplicaOnPaper(Alone):
    """A rank of DDP: gradients are views of buckets that stay."""

    def __init__(self, tracer: Tracer, model: torch.nn.Module, num_ranks: int) -> None:
        self.size = num_ranks
        self.learned = [p for p in model.parameters() if p.requires_grad]
        tracer.template.gradient_bytes = sum(p.nbytes for p in self.learned)
        self._tracer = tracer
        self._anchor = self._hold((), torch.float32, "ddp_scalar")
        self._verify(num_ranks)
        self._broadcast()
        first = [self._flat(bucket, "ddp_bucket") for bucket in self._buckets([2**63 - 1])]  # no limit until rebuilt
        self._one = self._hold((), torch.float32, "ddp_scalar")
        rebuilt = self._rebuild()
        del first
        self._views = dict(view for bucket in rebuilt for view in self._views_of(bucket))

    def begin(self) -> None:
        """Gradients are zero, and not none: every pass adds to them."""
        torch._foreach_zero_(list(self._views.values()))
        for index, view in self._views.items():
            self.learned[index].grad = view

    def total(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(loss)

    def _verify(self, num_ranks: int) -> None:
        """`verify_params_across_processes`: how many parameters each rank has, then their shapes and strides."""
        counts = [self._hold((1,), torch.int64, "ddp_scalar") for _ in range(1 + num_ranks)]
        shapes = self._hold((sum(2 * p.dim() for p in self.learned),), torch.int64, "ddp_shapes")
        del shapes, counts

    def _broadcast(self) -> None:
        """`_sync_module_states`: rank 0's weights go to all, flat."""
        in_flight: list[torch.Tensor] = []
        for bucket in self._buckets([BROADCAST_BYTES]):
            if len(in_flight) == MAX_IN_FLIGHT:
                in_flight.pop(0)
            in_flight.append(self._flat(bucket, "ddp_broadcast"))
        while in_flight:
            in_flight.pop(0)

    def _rebuild(self) -> list[list[int]]:
        """After the first backward pass buckets are laid out by the order in which gradients came."""
        order = _arrivals(len(self.learned))
        buckets = self._buckets([FIRST_BUCKET_BYTES, BUCKET_BYTES], order)
        indices = self._hold((1 + len(order),), torch.int32, "ddp_indices")
        sizes = self._hold((len(buckets),), torch.int32, "ddp_indices")
        del sizes, indices
        return buckets

    def _buckets(self, limits: list[int], order: Sequence[int] = ()) -> list[list[int]]:
        assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        with _disable_current_modes():
            learned = [self.learned[i] for i in order] if order else self.learned
            indices: list[list[int]] = assign(learned, limits, [False] * len(learned), list(order))[0]
        return indices

    def _views_of(self, indices: list[int]) -> list[tuple[int, torch.Tensor]]:
        """A bucket that stays, and the gradients that lie in it."""
        flat = self._flat(indices, "ddp_bucket")
        sizes = [self.learned[i].numel() for i in indices]
        with _disable_current_modes():
            return [
                (i, flat[start : start + size].view_as(self.learned[i]))
                for i, start, size in zip(indices, accumulate(sizes, initial=0), sizes, strict=False)
            ]

    def _flat(self, indices: list[int], operator: str) -> torch.Tensor:
        """Room for so many parameters, one after another."""
        return self._hold((sum(self.learned[i].numel() for i in indices),), self.learned[indices[0]].dtype, operator)

    def _hold(self, shape: tuple[int, ...], dtype: torch.dtype, operator: str) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._tracer.hold(tensor, operator)
        return tensor


def _arrivals(num_leaves: int) -> list[int]:
    """The order in which autograd comes to the leaves of one operator, which is neither theirs nor its reverse.

    They have the same rank in the engine's queue, so that its heap decides: the engine itself is asked.
    """
    found: list[int] = []
    with _disable_current_modes(), torch.enable_grad():
        leaves = [torch.zeros((), requires_grad=True) for _ in range(1 + num_leaves)]  # the first: DDP's own anchor
        nodes: list[Any] = [leaf.view_as(leaf).grad_fn.next_functions[0][0] for leaf in leaves]  # type: ignore[union-attr]
        for index, node in enumerate(nodes[1:]):
            node.register_hook(lambda *_, index=index: found.append(index))
        touched: torch.Tensor = Touch.apply(*leaves)
        touched.backward()
    return found
