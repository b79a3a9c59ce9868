"""One rank of several, on paper: what DDP and FSDP2 hold and ask for around a step, in the order in which they do.

The collectives themselves ask for nothing: what they read and write is here. `runtime.distributed` runs the real ones.
FSDP2's order is that of torch 2.11 and 2.13 (torch/distributed/fsdp/_fully_shard).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.cuda.side_streams import ALL_GATHER, SHARDED_GRADIENT
from vramfit.models.anatomy import encoder_layers
from vramfit.step.window import clip
from vramfit.trace.tracer import Tracer
from vramfit.workload import Workload

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's `_DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`."""
BROADCAST_BYTES = 250 * 2**20
NUM_BROADCASTS = 2
"""Its `broadcast_bucket_size`, and `max_in_flight` of `broadcast_coalesced` (torch/csrc/distributed/c10d/comm.cpp)."""
NUM_SCALARS = 2
"""What a pass over DDP's wrapper begins with, and the gradient it is given."""


class RankOnPaper(Protocol):
    """What a traced step asks of its rank."""

    learned: list[torch.nn.Parameter]
    """What the optimizer steps."""

    def begin(self) -> None: ...
    def before_pass(self, index: int, num_passes: int) -> None: ...
    def clip(self, max_grad_norm: float | None) -> None: ...


def rank_on_paper(tracer: Tracer, model: torch.nn.Module, workload: Workload) -> RankOnPaper:
    """The rank that a workload's GPU is."""
    if workload.num_gpus == 1:
        return AloneOnPaper(model)
    if workload.parallel == "fsdp":
        return ShardOnPaper(tracer, model, workload.num_gpus)
    return ReplicaOnPaper(tracer, model)


class AloneOnPaper:
    """One GPU."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.learned = [p for p in model.parameters() if p.requires_grad]

    def begin(self) -> None:
        return

    def before_pass(self, index: int, num_passes: int) -> None:
        return

    def clip(self, max_grad_norm: float | None) -> None:
        clip(self.learned, max_grad_norm)


class ReplicaOnPaper(AloneOnPaper):
    """A rank of DDP: gradients are views of buckets that stay."""

    def __init__(self, tracer: Tracer, model: torch.nn.Module) -> None:
        super().__init__(model)
        with _disable_current_modes():
            self._broadcast(tracer)
            buckets = self._buckets(FIRST_BUCKET_BYTES, BUCKET_BYTES)
            self._views = dict(view for b in reversed(buckets) for view in self._bucket(tracer, b))
            self._views.clear()  # laid out anew after the first pass
            self._views = dict(view for b in buckets for view in self._bucket(tracer, b))
            tracer.template.gradient_bytes = sum(p.nbytes for p in self.learned)
            self._scalars = [torch.empty((), device="meta") for _ in range(NUM_SCALARS)]
        for scalar in self._scalars:
            tracer.hold(scalar, "ddp_scalar")

    def _buckets(self, *limits: int) -> list[list[int]]:
        """Parameters that go together, the last ones first."""
        assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        found, _ = assign(self.learned[::-1], list(limits))
        last = len(self.learned) - 1
        return [[last - i for i in indices] for indices in found]

    def _broadcast(self, tracer: Tracer) -> None:
        """Rank 0's weights go to all in flat copies."""
        under_way: deque[torch.Tensor] = deque(maxlen=NUM_BROADCASTS)
        for indices in self._buckets(BROADCAST_BYTES):
            if len(under_way) == NUM_BROADCASTS:
                under_way.popleft()
            size = sum(self.learned[i].numel() for i in indices)
            under_way.append(torch.empty(size, dtype=self.learned[indices[0]].dtype, device="meta"))
            tracer.hold(under_way[-1], "ddp_broadcast")

    def _bucket(self, tracer: Tracer, indices: list[int]) -> list[tuple[int, torch.Tensor]]:
        """A bucket, and the gradients that lie in it."""
        sizes = [self.learned[i].numel() for i in indices]
        flat = torch.empty(sum(sizes), dtype=self.learned[indices[0]].dtype, device="meta")
        tracer.hold(flat, "ddp_bucket")
        starts = accumulate(sizes, initial=0)
        return [
            (i, flat[start : start + size].view_as(self.learned[i]))
            for i, start, size in zip(indices, starts, sizes, strict=False)
        ]

    def begin(self) -> None:
        """Gradients are zero, and not none: every pass adds to them."""
        torch._foreach_zero_(list(self._views.values()))
        for index, view in self._views.items():
            self.learned[index].grad = view


@dataclass(eq=False)
class _Group:
    """Parameters that FSDP2 gathers together."""

    module: torch.nn.Module
    path: str
    parameters: list[torch.nn.Parameter]
    shards: list[torch.nn.Parameter]
    padded: list[int]
    """Elements of each shard, as if all ranks had the same."""
    is_root: bool
    state: str = "idle"
    buffer: torch.Tensor | None = None
    gathered: list[torch.Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)


class ShardOnPaper:
    """Rank 0 of FSDP2, which has no less than any other.

    Passes compute with the whole parameters, which take no memory here; what stands for the gathered ones is held and
    let go when FSDP2 does so.
    """

    def __init__(self, tracer: Tracer, model: torch.nn.Module, num_ranks: int) -> None:
        self._tracer = tracer
        self._num_ranks = num_ranks
        self._synchronises = True
        self._queued = False
        self._order: list[_Group] = []
        self._last_gather: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        names = {module: name for name, module in model.named_modules()}
        claimed: set[int] = set()
        modules = [*encoder_layers(model), model]
        self._groups = [self._group(m, names[m], claimed, is_root=m is model) for m in modules]
        sizes = [sum(p.nbytes for p in g.parameters) for g in self._groups]
        tracer.template.gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        tracer.template.gathered_bytes, tracer.template.num_gathers = sum(sizes), len(sizes)
        tracer.template.gathered_peak_bytes = sizes[-1] + 2 * max(sizes)
        shard_of = {id(p): shard for g in self._groups for p, shard in zip(g.parameters, g.shards, strict=True)}
        self.learned = [shard_of[id(p)] for p in model.parameters() if p.requires_grad]
        for group in self._groups:
            group.module.register_forward_pre_hook(self._hook(self._pre_forward, group), prepend=True, with_kwargs=True)
            group.module.register_forward_hook(self._hook(self._post_forward, group))

    def _group(self, module: torch.nn.Module, path: str, claimed: set[int], *, is_root: bool) -> _Group:
        """Every parameter of a module that no group has yet, cut; then the whole ones go."""
        parameters = [p for p in module.parameters() if id(p) not in claimed]
        claimed.update(id(p) for p in parameters)
        shards, padded = [], []
        for parameter in parameters:
            rows = -(-parameter.shape[0] // self._num_ranks)
            shard = self._hold((rows, *parameter.shape[1:]), parameter.dtype, "shard", path)
            shards.append(torch.nn.Parameter(shard, requires_grad=parameter.requires_grad))
            padded.append(shard.numel())
        for parameter in parameters:
            self._tracer.let_go(parameter)
        return _Group(module, path, parameters, shards, padded, is_root)

    @staticmethod
    def _hook(method: Any, group: _Group) -> Any:
        return lambda module, *arguments: method(group, *arguments)

    def _hold(self, shape: Sequence[int], dtype: torch.dtype, operator: str, path: str) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.empty(*shape, dtype=dtype, device="meta")
        self._tracer.hold(tensor, operator, path)
        return tensor

    def begin(self) -> None:
        return

    def before_pass(self, index: int, num_passes: int) -> None:
        self._synchronises = index == num_passes - 1

    def clip(self, max_grad_norm: float | None) -> None:
        """As `Shards.clip`."""
        if max_grad_norm is None:
            return
        grads = [p.grad for p in self.learned if p.grad is not None]
        torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, 1.0)

    def _gather(self, group: _Group) -> None:
        if group.buffer is None and not group.gathered and group.parameters:
            numel = sum(group.padded) * self._num_ranks
            group.buffer = self._hold((numel,), group.parameters[0].dtype, ALL_GATHER, group.path)

    def _copy_out(self, group: _Group, *, forward: bool) -> None:
        if group.buffer is None:
            return
        group.gathered = [
            self._hold((n * self._num_ranks,), p.dtype, "gathered", group.path)
            for n, p in zip(group.padded, group.parameters, strict=True)
        ]
        if forward:  # the buffer before goes only now: `wait_for_unshard` has a name for it until it returns
            self._last_gather = group.buffer
        group.buffer = None

    def _pre_forward(self, group: _Group, args: Any, kwargs: Any) -> Any:
        if group.state == "backward":  # computed again
            return None
        group.state = "forward"
        self._gather(group)
        self._copy_out(group, forward=True)
        return self._watched(group, args, kwargs)

    def _watched(self, group: _Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inputs whose gradients say that the group is through."""
        if not torch.is_grad_enabled():
            return None
        values = [*args, *kwargs.values()]
        found = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
        if not found:
            return None
        for i, tensor in zip(found, _Through.apply(self, group, *(values[i] for i in found)), strict=True):
            values[i] = tensor
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _post_forward(self, group: _Group, args: Any, output: Any) -> None:
        if group.state == "backward":
            return
        if not group.is_root:
            group.gathered = []
        group.indices.append(len(self._order))
        self._order.append(group)
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._pre_backward(group))
        group.state = "idle"
        if group.is_root:
            self._last_gather = None

    def _pre_backward(self, group: _Group) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if group.state == "backward":
            return
        group.state = "backward"
        self._gather(group)
        self._copy_out(group, forward=False)
        index = group.indices.pop() if group.indices else 0
        if index > 0:
            self._gather(self._order[index - 1])

    def post_backward(self, group: _Group) -> None:
        """Gradients of a group are complete: added up as they are, or scattered."""
        group.state = "through"
        group.gathered = []
        if not self._synchronises:
            return
        self._reduced = None
        learned = [i for i, p in enumerate(group.parameters) if p.grad is not None]
        if not learned:
            return
        numel, dtype = sum(group.padded[i] for i in learned), group.parameters[learned[0]].dtype
        self._reduced = self._hold((numel * self._num_ranks,), dtype, "reduce_scatter", group.path)
        for i in learned:
            group.parameters[i].grad = None
        scattered = self._hold((numel,), dtype, SHARDED_GRADIENT, group.path)
        with _disable_current_modes():
            parts = scattered.split([group.padded[i] for i in learned])
            for i, part in zip(learned, parts, strict=True):
                shard = group.shards[i]
                if shard.grad is None:
                    shard.grad = part.view_as(shard)

    def _end_backward(self) -> None:
        for group in (self._groups[-1], *self._groups[:-1]):
            if group.state != "through":
                self.post_backward(group)
            group.state = "idle"
            group.indices.clear()
        self._reduced = None
        self._order.clear()
        self._queued = False


class _Through(torch.autograd.Function):
    """Inputs as they are; their gradients come when the group's own are complete."""

    @staticmethod
    def forward(ctx: Any, rank: ShardOnPaper, group: _Group, *inputs: torch.Tensor) -> Any:
        ctx.rank, ctx.group = rank, group
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.rank.post_backward(ctx.group)
        return (None, None, *gradients)


def _tensors_in(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return [tensor for value in values for tensor in _tensors_in(value)]
