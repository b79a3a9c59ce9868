"""Passes captured as CUDA graphs and replayed: of a step, the host then sends little more than its batch.

A small model's kernels are over sooner than the host can send them. A CUDA graph is all that a pass sends, kept with
its places in memory: sent at once, as often as wanted. So rows are filled up to a few sizes (`packing`), what
goes in and out lies in fixed places, and all graphs share the memory of one pass, since one of them runs at a time.

That memory is held between passes. Whoever else calls the model, for an evaluation, is given it first.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vramfit.models.anatomy import max_positions
from vramfit.step.plain import Batch
from vramfit.step.recovery import is_out_of_memory
from vramfit.tasks.parts.losses import HeadLoss, model_inputs
from vramfit.techniques import compiling, packing
from vramfit.techniques.packing import FILLED, fill_up, row_size

_UNENDED: list[torch.cuda.CUDAGraph] = []
"""Captures that torch could not end: its allocators may ask them later on whose memory a stream takes."""


class CudaCapture:
    """Captures calls as CUDA graphs, all of them in the memory of one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.forget()
        self._prepare()

    def forget(self) -> None:
        """Give its memory back, and all that is cached beside."""
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _prepare(self) -> None:
        """Have cuBLAS take its workspaces of this stream now, forward's and backward's: in a graph's memory, they would
        keep it for ever."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream), torch.enable_grad():
            layer = torch.nn.Linear(16, 16, dtype=torch.bfloat16, device=self._device)
            made = layer(torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device, requires_grad=True))
            made.sum().backward()
        torch.cuda.synchronize(self._device)

    def __call__(self, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a call, which does nothing yet.

        What others of the process do meanwhile is their own affair (`thread_local`): a loader may be at work.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                call()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture in which something failed.

        Where CUDA has made it invalid, `capture_end` raises before it tells the allocator and the random generator
        (CUDAGraph.cpp, 2.11): from then on `empty_cache` fails, and so does every dropout.
        """
        with suppress(Exception):
            graph.capture_end()
            return
        with suppress(Exception):  # the first of these fails where it had got beyond that
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
            _UNENDED.append(graph)
        with suppress(Exception):  # a capture that ends well takes the generator along
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            other.capture_end()


NUM_GRAPHS = 64
"""Kept at most; the one that was not needed for longest goes."""
FEW_REPLAYS = 32
"""Memory that is given away after fewer replays than this, again and again, is not worth taking."""
MAX_GIVEN_AWAY = 3
NUMBERS = frozenset({bool, int, float})
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Of a module."""


class CannotCapture(RuntimeError):
    """A model or a batch does something that no graph can hold."""


class Graph(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Do it again."""


class Capture(Protocol):
    """Captures calls."""

    def __call__(self, call: Callable[[], None]) -> Graph:
        """Capture a call, which does nothing yet."""

    def forget(self) -> None:
        """All graphs are gone: their memory is free."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The sizes of packed rows."""

    max_tokens: int
    """Of a row at most."""
    longest: int
    """Tokens of the longest sequence there can be."""
    least_tokens: int = 0
    """Of a row at least."""


class PassGraphs:
    """The passes of a model, one graph a size; adds up gradients and losses by replaying them.

    Args:
        model: that takes packed batches.
        learned: its parameters that get a gradient, as an eager pass has shown.
        autocast: the context of a forward pass.
        capture: captures calls; as CUDA graphs.
    """

    _guard: Any = None

    def __init__(
        self,
        model: torch.nn.Module,
        learned: Sequence[torch.nn.Parameter],
        autocast: Callable[[], AbstractContextManager[Any]],
        sizes: RowSizes,
        *,
        capture: Capture | None = None,
    ) -> None:
        self.num_captured = 0
        """Graphs made, of which some may be gone."""
        self.learned = learned
        """Changed only while there are no graphs."""
        self._model, self._autocast = model, autocast
        self._sizes = sizes
        self._device = next(model.parameters()).device
        self._capture: Capture = capture or CudaCapture(self._device)
        self._graphs: OrderedDict[tuple[int, int], tuple[Graph, dict[str, Any]]] = OrderedDict()
        self._inputs: dict[str, torch.Tensor] = {}
        self._gradients: list[torch.Tensor] = []
        self._mean = self._total = torch.empty(0)
        self._is_at_work = False
        self._num_replays = self._num_given_away = 0

    def __del__(self) -> None:
        if self._guard is not None:
            self._guard.remove()

    @staticmethod
    def takes(batch: Batch, loss: HeadLoss) -> bool:
        """Whether rows of a batch can be filled up: it has nothing unknown, and its loss leaves out what is ignored."""
        known = set(batch) <= FILLED and all(value.device.type == "cpu" for value in batch.values())
        labels = batch.get("labels")
        if not known or not loss.leaves_out or labels is None or labels.is_floating_point():
            return False
        return labels.dim() == 1 or labels.shape == batch["input_ids"].shape

    def accumulate(self, batches: Sequence[Batch], loss: HeadLoss, total: int) -> torch.Tensor:
        """As `Step.passes`: gradients of the mean loss are left, and the loss is given.

        Raises:
            CannotCapture: then nothing was changed but gradients, and all graphs are gone.
        """
        self._begin(total)
        self._is_at_work = True
        try:
            for batch in batches:
                self._replay(batch, loss)
        finally:
            self._is_at_work = False
        return self._mean.clone()

    def _replay(self, batch: Batch, loss: HeadLoss) -> None:
        packed = packing.pack(batch, self._model)
        num_tokens, longest, most = packed["input_ids"].shape[1], packed["max_length_q"], self._sizes
        if num_tokens > most.max_tokens or longest > most.longest:
            self.release()
            raise CannotCapture(f"a row of {num_tokens:,} tokens, the longest sequence of {longest:,}")
        num_sequences = len(packed["cu_seq_lens_q"]) - 1
        size = row_size(num_tokens, num_sequences, most.max_tokens, most.longest, most.least_tokens)
        if not self._graphs and size < most.max_tokens:  # the largest first: the memory of all others lies in its own
            self._graph(fill_up(packed, self._model, most.max_tokens, most.longest), loss)
        row = fill_up(packed, self._model, size, most.longest)
        graph, inputs = self._graph(row, loss)
        for name, buffer in inputs.items():
            if isinstance(buffer, torch.Tensor):
                source = row[name].pin_memory() if self._device.type == "cuda" else row[name]
                buffer.copy_(source, non_blocking=True)
        graph.replay()
        self._num_replays += 1

    def release(self) -> None:
        """Let go of all graphs and of their memory; they are made anew when they are needed."""
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        self._graphs.clear()
        self._gradients.clear()
        self._inputs.clear()
        self._mean = self._total = torch.empty(0)
        self._capture.forget()

    @property
    def is_worth_it(self) -> bool:
        """Whether graphs live long enough: some loops call the model between steps."""
        return self._num_given_away < MAX_GIVEN_AWAY

    def _begin(self, total: int) -> None:
        """Gradients and loss of nothing yet, in their places."""
        if not self._gradients:
            self._capture.forget()  # what stays is to lie close together, and not among what will be given back
            self._gradients = [torch.empty_like(p) for p in self.learned]
            self._mean, self._total = (torch.empty((), device=self._device) for _ in range(2))
        torch._foreach_zero_(self._gradients)
        self._mean.zero_()
        self._total.fill_(float(total))
        for parameter, gradient in zip(self.learned, self._gradients, strict=True):
            parameter.grad = gradient

    def _graph(self, row: dict[str, Any], loss: HeadLoss) -> tuple[Graph, dict[str, Any]]:
        """The graph of a row's size, and the places that the row is to be put in."""
        key = (row["input_ids"].shape[1], len(row["cu_seq_lens_q"]))
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if len(self._graphs) >= NUM_GRAPHS:
            self._graphs.popitem(last=False)
        if self._guard is None:
            self._guard = self._model.register_forward_pre_hook(_Guard(self))
        inputs = {name: self._input(name, value) for name, value in row.items()}
        try:
            graph = self._capture(lambda: self._pass(inputs, loss))
            self._check_what_learns()
        except BaseException as error:
            self.release()
            if is_out_of_memory(error) or not isinstance(error, Exception):
                raise
            raise CannotCapture(" ".join(str(error).split())[:300]) from error
        self._graphs[key] = graph, inputs
        self.num_captured += 1
        return graph, inputs

    def _input(self, name: str, value: Any) -> Any:
        """Where a tensor is put before a replay: the beginning of a buffer that has room for the longest row."""
        if not isinstance(value, torch.Tensor):
            return value
        if name not in self._inputs:
            self._inputs[name] = torch.zeros(self._sizes.max_tokens + 1, dtype=value.dtype, device=self._device)
        return self._inputs[name][: value.numel()].view(value.shape)

    def _pass(self, inputs: dict[str, Any], loss: HeadLoss) -> None:
        torch.clear_autocast_cache()  # of a context around: a graph makes the casts that it reads, and lends none
        with self._autocast():
            value = loss.sums(self._model(**model_inputs(inputs)), inputs)[0] / self._total
        torch.clear_autocast_cache()
        value.backward()
        self._mean.add_(value.detach())

    def _check_what_learns(self) -> None:
        """A gradient that was made while capturing would lie in the memory of graphs, and learn nothing."""
        known = set(map(id, self.learned))
        if any(p.grad is not None and id(p) not in known for p in self._model.parameters()):
            raise CannotCapture("a parameter that had no gradient in the passes before has one now")

    def give_way(self) -> None:
        """The model is called by someone else, who needs memory for it."""
        if not self._is_at_work:
            self._num_given_away = self._num_given_away + 1 if self._num_replays < FEW_REPLAYS else 0
            self._num_replays = 0
            self.release()


def fixed_state(model: torch.nn.Module) -> list[Any]:
    """What a graph holds of a model once and for all: it is of no use where this has changed.

    Where tensors lie, which of them learn, the hooks of all, and the numbers of modules: whether they train, shares of
    dropout.
    """
    found: list[Any] = []
    waiting = [model]
    while waiting:
        own = vars(waiting.pop())  # every step asks: a tenth of a millisecond for four layers
        found += [value for value in own.values() if type(value) in NUMBERS]
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                found += (id(tensor), tensor.data_ptr(), tensor.requires_grad)
                found += (*(tensor._backward_hooks or ()), *(tensor._post_accumulate_grad_hooks or ()))
        for hooks in map(own.__getitem__, HOOKS):
            if hooks:
                found += [key for key, hook in hooks.items() if type(hook) is not _Guard]
        waiting += [module for module in own["_modules"].values() if module is not None]
    return found


class _Guard:
    """Tells the graphs of a model that it is called, and does not keep them; a copy of the model has none."""

    def __init__(self, graphs: PassGraphs | None) -> None:
        self._graphs = None if graphs is None else weakref.ref(graphs)

    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        graphs = None if self._graphs is None else self._graphs()
        if graphs is not None:
            graphs.give_way()

    def __reduce__(self) -> Any:
        return _Guard, (None,)


class GraphUse:
    """Whether the passes of a `Stepper` are captured and replayed, from when on, and until when.

    The first eager pass shows which parameters get gradients; later passes of the same model are captured.

    Args:
        model, autocast: of the passes.
        is_on: whether they are captured at all.
    """

    def __init__(
        self, model: torch.nn.Module, autocast: Callable[[], AbstractContextManager[Any]], *, is_on: bool
    ) -> None:
        self.is_on = is_on
        self.is_paused = False
        """Whether passes run eagerly for now."""
        self.has_stopped = False
        """Whether memory was short, or something could not be captured: the state of a run says so."""
        self.passes: PassGraphs | None = None
        self._model, self._autocast = model, autocast
        self._learned: list[torch.nn.Parameter] | None = None
        self._state_then: list[Any] = []

    def saw(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Passes have run eagerly: of these parameters, those that have gradients learn."""
        if self.is_on:
            self._learned = [p for p in parameters if p.grad is not None]
            self._state_then = fixed_state(self._model)

    def graphs_for(self, batch: Batch, loss: HeadLoss, *, max_tokens: int, seq: int) -> PassGraphs | None:
        """What replays the passes of a batch; None where they run eagerly, as the first ones do.

        Args:
            max_tokens: of a row at most.
            seq: tokens of a sequence at most.
        """
        if not self.is_on or self.is_paused or self._learned is None or not PassGraphs.takes(batch, loss):
            return None
        if fixed_state(self._model) != self._state_then:
            self._learned = None
            if self.passes is not None:
                self.passes.give_way()
            return None
        if self.passes is None:
            least = max_tokens // 2 if compiling.is_applied(self._model) else 0
            longest = min(seq, max_positions(self._model) or seq)
            sizes = RowSizes(max_tokens, longest, least)
            self.passes = PassGraphs(self._model, self._learned, self._autocast, sizes)
        self.passes.learned = self._learned
        if not self.passes.is_worth_it:
            self.stop()
        return self.passes

    def stop(self) -> None:
        """From now on passes run eagerly: memory is short, or what they do cannot be captured."""
        self.release()
        self.is_on, self.has_stopped = False, True

    def release(self) -> None:
        """Let go of all graphs."""
        if self.passes is not None:
            self.passes.release()
            self.passes = None
