"""Compiled layers in a trace: what `torch.compile` makes of a layer is found as it finds it, and run in its place; and
`hold_for_graphs`, for passes that are captured.

AOTAutograd gives the graph of a layer's forward and backward, and its partitioner cuts it: what is kept for backward is
known from there. Fusion is Inductor's business and needs a GPU; here everything between two library calls counts as
fused, so that only what a call, backward or another kernel reads takes memory.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from vramfit.models.anatomy import encoder_layers
from vramfit.step.step import Step
from vramfit.trace.calls import FusedKernel
from vramfit.trace.template import RECORDING_STREAM, STEPS, Notice, recording_workspaces
from vramfit.trace.tracer import Tracer

LIBRARY_CALLS = ("mm", "addmm", "bmm", "baddbmm", "_flash_attention", "_scaled_dot_product", "embedding", "index")
"""Operators that are kernels of their own, by the beginning of their names; all others are fused."""


MAX_KEPT = 16
_TENSOR = object()
_kept: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
_tracers: list[Tracer | None] = []
"""Those whose layers run; the last one writes down what compiled ones do, or nobody does."""


@contextmanager
def compiled_layers(
    model: torch.nn.Module, dialect: Callable[[], Any], tracer: Tracer, likeness: Hashable = None
) -> Iterator[None]:
    """While it lasts, the model's layers run as compiled ones.

    Args:
        dialect: makes the function mode under which a layer's operators go CUDA's way.
        tracer: writes down what they do.
        likeness: models with the same one share what is compiled; None where nothing may be shared.
    """
    layers, made = encoder_layers(model), _Compiled(dialect, likeness)
    for layer in layers:
        layer._compiled_call_impl = partial(made.run, layer)
    _tracers.append(tracer)
    try:
        yield
    finally:
        _tracers.pop()
        for layer in layers:
            layer._compiled_call_impl = None


class _Compiled:
    """Layers that are alike share what was compiled."""

    def __init__(self, dialect: Callable[[], Any], likeness: Hashable) -> None:
        self._dialect = dialect
        self._likeness = likeness
        self._made = OrderedDict[Any, Callable[..., Any]]() if likeness is None else _kept

    def run(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        flat, shape = tree_flatten((weights, args, kwargs))
        kinds = tuple(map(_kind, flat))
        key = (self._likeness, type(layer), shape, kinds, torch.is_grad_enabled(), layer.training)
        if key not in self._made:
            self._made[key] = self._compile(layer, flat, shape)
            while len(self._made) > MAX_KEPT:
                self._made.popitem(last=False)
        return self._made[key](*(x for x in flat if isinstance(x, torch.Tensor)))

    def _compile(self, layer: torch.nn.Module, flat: list[Any], shape: Any) -> Callable[..., Any]:
        """A function of the tensors among the layer's weights and arguments; its graphs are made at once."""
        from torch._functorch.aot_autograd import aot_function
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        others = [_TENSOR if isinstance(x, torch.Tensor) else x for x in flat]
        seen = [_Plain(layer)]

        def call(*tensors: torch.Tensor) -> Any:
            left = iter(tensors)
            weights, args, kwargs = tree_unflatten([next(left) if x is _TENSOR else x for x in others], shape)
            named = {f"layer.{name}": weight for name, weight in weights.items()}
            with self._dialect():
                return torch.func.functional_call(seen[0], named, args, kwargs)

        made: Callable[..., Any] = aot_function(
            call,
            fw_compiler=lambda graph, _: _FusedGraph(graph),
            bw_compiler=lambda graph, _: _FusedGraph(graph),
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=select_decomp_table(),
        )
        unseen = torch.autograd.graph.saved_tensors_hooks(_same, _same)  # a checkpoint counts what is saved inside it
        _tracers.append(None)
        try:
            with _disable_current_modes(), unseen:
                made(*(_like(x) for x in flat if isinstance(x, torch.Tensor)))
        finally:
            _tracers.pop()
        seen.clear()  # its graphs are made: a model that goes on living in here would never be given back
        return made


def _same(value: Any) -> Any:
    return value


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Stands for a tensor, with a storage of its own: to compile leaves cycles, which would keep the other's alive."""
    if type(tensor) is not torch.Tensor or not tensor.is_meta:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    layout: dict[str, Any] = {"dtype": tensor.dtype, "device": "meta", "requires_grad": tensor.requires_grad}
    return torch.empty_strided(tensor.shape, tensor.stride(), **layout)


class _Plain(torch.nn.Module):
    """A layer called as it would be called if it were not compiled."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer._call_impl(*args, **kwargs)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value


@dataclass(frozen=True, slots=True)
class _Layout:
    """A result that is made without running anything."""

    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    options: dict[str, Any]

    @staticmethod
    def of(value: Any) -> Any:
        """Of a tensor, or of each one in a list."""
        if isinstance(value, torch.Tensor):
            options = {"dtype": value.dtype, "device": torch.device("meta")}
            return _Layout((tuple(value.shape), tuple(value.stride())), options)
        return type(value)(map(_Layout.of, value)) if isinstance(value, list | tuple) else value


@dataclass(eq=False, slots=True)
class _Step:
    """What is done for a node of a graph, and what nobody reads any more after it."""

    node: Node
    kind: Literal["input", "view", "call", "fused", "output", "nothing"]
    done: tuple[Node, ...]
    layout: Any = None
    """Of a fused kernel's result."""
    kernel: FusedKernel | None = None
    """The kernel whose first result it is."""


class _FusedGraph:
    """Runs a graph in fused kernels: library calls run, of the rest only what somebody reads is made."""

    _boxed_call = True

    def __init__(self, graph: GraphModule) -> None:
        self._nodes = list(graph.graph.nodes)
        self._made = {node for node in self._nodes if _is_made(node)}
        kernels, last = self._fuse(), self._last_uses()
        steps = [self._step(node, tuple(last.get(i, ())), kernels.get(node)) for i, node in enumerate(self._nodes)]
        self._steps = [step for step in steps if step.kind != "nothing" or step.done]

    def _step(self, node: Node, done: tuple[Node, ...], kernel: FusedKernel | None) -> _Step:
        if node.op == "placeholder":
            return _Step(node, "input", done)
        if node.op == "output":
            return _Step(node, "output", done)
        if node not in self._made:
            return _Step(node, "nothing", done)
        if _is_view(node) or _is_library_call(node):
            return _Step(node, "view" if _is_view(node) else "call", done)
        return _Step(node, "fused", done, _Layout.of(node.meta["val"]), kernel)

    def __call__(self, inputs: list[Any]) -> Any:
        tracer = _tracers[-1]
        with nullcontext() if tracer is None else tracer.compiled():
            return self._run(inputs, tracer)

    def _run(self, inputs: list[Any], tracer: Tracer | None) -> Any:
        """Operators are handed to the tracer: views are offsets in a buffer, and no operators."""
        call = _call if tracer is None else tracer.call
        values: dict[Node, Any] = {}
        value_of = values.__getitem__
        given = list(inputs)
        inputs.clear()  # they are freed here, one by one
        given.reverse()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for step in self._steps:
                node = step.node
                if step.kind == "input":
                    values[node] = given.pop()
                elif step.kind == "view":
                    values[node] = node.target(*map_arg(node.args, value_of), **node.kwargs)  # type: ignore[operator]
                elif step.kind == "call":
                    values[node] = call(node.target, map_arg(node.args, value_of), map_arg(node.kwargs, value_of))
                elif step.kind == "fused":
                    if step.kernel is not None and tracer is not None:
                        tracer.count_fused(step.kernel)
                    values[node] = _make(step.layout, call)
                elif step.kind == "output":
                    return map_arg(node.args[0], value_of)
                for done in step.done:
                    values.pop(done, None)
        raise AssertionError("a graph has an output")

    def _fuse(self) -> dict[Node, FusedKernel]:
        """First result of a kernel → what it reads and writes: all results between two library calls are of one."""
        found: dict[Node, FusedKernel] = {}
        written: list[Node] = []
        for node in self._nodes:
            if _is_library_call(node) or node.op == "output":
                if written:
                    read = set().union(*map(self._sources, written)) - set(written)
                    taken, made = (
                        [n.meta["val"] for n in self._nodes if n in chosen] for chosen in (read, set(written))
                    )
                    found[written[0]] = FusedKernel(taken, made)
                written = []
            elif node.op == "call_function" and node in self._made and not _is_view(node):
                written.append(node)
        return found

    def _sources(self, node: Node) -> set[Node]:
        """What a fused kernel reads from memory."""
        found: set[Node] = set()
        for source in node.all_input_nodes:
            found |= {source} if source in self._made else self._sources(source)
        return found

    def _last_uses(self) -> dict[int, list[Node]]:
        """Position → what nobody reads any more after it; what a fused kernel reads is read when it gives something."""
        reads: dict[Node, int] = {}
        for position in range(len(self._nodes) - 1, -1, -1):
            node = self._nodes[position]
            at = position if node in self._made or node.op == "output" else reads.get(node, position)
            for source in node.all_input_nodes:
                reads[source] = max(reads.get(source, 0), at)
        found: dict[int, list[Node]] = {}
        for node, position in reads.items():
            found.setdefault(position, []).append(node)
        return found


def _is_made(node: Node) -> bool:
    """Whether a value is in memory: inputs, what library calls give, and of the rest what is read from outside."""
    if node.op != "call_function" or _is_library_call(node):
        return True
    source = node.args[0] if node.args else None
    return _is_made(source) if _is_view(node) and isinstance(source, Node) else _is_read(node)


def _is_read(node: Node) -> bool:
    """Whether a library call or the caller reads a value, or a view of it."""
    return any(
        user.op == "output" or _is_library_call(user) or (_is_view(user) and _is_read(user)) for user in node.users
    )


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else schema.name.partition("::")[2]


def _is_library_call(node: Node) -> bool:
    return node.op == "call_function" and _name(node).startswith(LIBRARY_CALLS)


def _is_view(node: Node) -> bool:
    """Whether a value lies where its source lies."""
    schema = getattr(node.target, "_schema", None)
    returns = () if schema is None else schema.returns
    return node.target is operator.getitem or any(value.alias_info is not None for value in returns)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _make(layout: Any, call: Callable[..., Any]) -> Any:
    """A result of a fused kernel, or each of several."""
    if isinstance(layout, _Layout):
        return call(torch.ops.aten.empty_strided.default, layout.sizes, layout.options)
    return type(layout)(_make(part, call) for part in layout) if isinstance(layout, list | tuple) else layout


def hold_for_graphs(tracer: Tracer, step: Step) -> list[torch.Tensor]:
    """Before passes are recorded, what the first step left in the cache is given back.

    Gradients stay in their places from now on, and the stream that passes are recorded on has workspaces.
    """
    tracer.begin("graphs", "backward")
    tracer.template.recorded = f"{STEPS[1]}.micro"
    tracer.template.segments["graphs"].append(Notice("empty_cache", ""))
    made = []
    for size in recording_workspaces(tracer.template.profile):
        with _disable_current_modes():
            made.append(torch.empty(size, dtype=torch.uint8, device="meta"))
        tracer.hold(made[-1], "cublas_workspace", cuda_stream=RECORDING_STREAM)
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    step.keeps_gradients = True
    return made
