"""`ShardOnPaper`: a rank of FSDP2, which keeps a part of each parameter and gathers a layer when its turn comes.

The order is that of torch 2.11 and 2.13 (torch/distributed/fsdp/_fully_shard). What is gathered, and what is left of
the gradients, is asked for on CUDA streams of their own: no other stream can use their blocks again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.cuda.kernels.elementwise import chunk_cat_bytes, split_copy_bytes
from vramfit.models.anatomy import encoder_layers
from vramfit.step.splitting import Alone
from vramfit.trace.tracer import Tracer

GATHER_STREAM, REDUCE_STREAM = 1, 2
"""`all_gather_copy_in_stream` and `reduce_scatter_stream` of FSDPCommContext."""


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

    def reshard(self) -> None:
        """What was gathered goes, the first parameter first."""
        while self.gathered:
            self.gathered.pop(0)


class ShardOnPaper(Alone):
    """Rank 0 of FSDP2, which has no less than any other.

    Passes compute with the whole parameters, which take no memory here; what stands for the gathered ones is held and
    let go when FSDP2 does so.
    """

    is_sharded = True

    def __init__(self, tracer: Tracer, model: torch.nn.Module, num_ranks: int) -> None:
        self._tracer = tracer
        self.size = self._num_ranks = num_ranks
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
        self._whole_bytes = {id(shard_of[id(p)]): p.nbytes for p in model.parameters()}
        for group in self._groups:
            group.module.register_forward_pre_hook(self._hook(self._pre_forward, group), prepend=True, with_kwargs=True)
            group.module.register_forward_hook(self._hook(self._post_forward, group))

    def _group(self, module: torch.nn.Module, path: str, claimed: set[int], *, is_root: bool) -> _Group:
        """Every parameter of a module that no group has yet, cut; then the whole ones go."""
        parameters = list(_managed(module, claimed))
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

    def _hold(
        self, shape: Sequence[int], dtype: torch.dtype, operator: str, path: str, cuda_stream: int = 0
    ) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.empty(*shape, dtype=dtype, device="meta")
        self._tracer.hold(tensor, operator, path, cuda_stream=cuda_stream)
        return tensor

    def before_pass(self, index: int, num_passes: int) -> None:
        self._synchronises = index == num_passes - 1

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float | None) -> None:
        """As `Shards.clip`."""
        if max_grad_norm is None:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, 1.0)

    def size_of(self, parameter: torch.nn.Parameter) -> int:
        """As `DTensor.nbytes`: of the whole parameter."""
        return self._whole_bytes[id(parameter)]

    def total(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(loss)

    def _gather(self, group: _Group) -> None:
        if group.buffer is None and not group.gathered and group.parameters:
            numel = sum(group.padded) * self._num_ranks
            group.buffer = self._hold((numel,), group.parameters[0].dtype, "all_gather", group.path, GATHER_STREAM)

    def _copy_out(self, group: _Group, *, forward: bool) -> None:
        if group.buffer is None:
            return
        group.gathered = [
            self._hold((n * self._num_ranks,), p.dtype, "gathered", group.path)
            for n, p in zip(group.padded, group.parameters, strict=True)
        ]
        parts = [n * p.dtype.itemsize for n, p in zip(group.padded, group.parameters, strict=True)]
        table_bytes = split_copy_bytes(parts, self._num_ranks, self._tracer.template.profile)
        self._hold((table_bytes,), torch.uint8, "split_with_sizes_copy", group.path)
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
            group.reshard()
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
        group.reshard()
        if not self._synchronises:
            return
        self._reduced = None
        learned = [i for i, p in enumerate(group.parameters) if p.grad is not None]
        if not learned:
            return
        numel, dtype = sum(group.padded[i] for i in learned), group.parameters[learned[0]].dtype
        self._reduced = self._hold((numel * self._num_ranks,), dtype, "reduce_scatter", group.path)
        table_bytes = chunk_cat_bytes([group.padded[i] * dtype.itemsize for i in learned])
        self._hold((table_bytes,), torch.uint8, "chunk_cat", group.path)
        last = group.parameters[learned[-1]].grad  # `foreach_reduce` has a name for it until it returns
        for i in reversed(learned):
            group.parameters[i].grad = None
        scattered = self._hold((numel,), dtype, "sharded_gradient", group.path, REDUCE_STREAM)
        del last
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


def _managed(module: torch.nn.Module, claimed: set[int]) -> Iterator[torch.nn.Parameter]:
    """Parameters that no group has yet, those of children first (`_get_managed_modules`)."""
    for child in module.children():
        yield from _managed(child, claimed)
    for parameter in module.parameters(recurse=False):
        if id(parameter) not in claimed:
            claimed.add(id(parameter))
            yield parameter


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
