"""Passes recorded once and replayed: of a step, the host then sends little more than its batch.

A small model's kernels are over sooner than the host can send them. A CUDA graph is all that a pass sends, kept with
its places in memory: sent at once, as often as wanted. So rows are filled up to a few sizes (`techniques.rows`), what
goes in and out lies in fixed places, and all graphs share the memory of one pass, since one of them runs at a time.

That memory is held between passes. Whoever else calls the model, for an evaluation, is given it first.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from vramfit.runtime.cuda_graphs import CudaRecords
from vramfit.step.inputs import Batch
from vramfit.step.out_of_memory import is_out_of_memory
from vramfit.tasks.parts.losses import HeadLoss, model_inputs
from vramfit.techniques import packing
from vramfit.techniques.rows import FILLED, fill_up, row_size

NUM_GRAPHS = 64
"""Kept at most; the one that was not needed for longest goes."""
FEW_REPLAYS = 32
"""Memory that is given away after fewer replays than this, again and again, is not worth taking."""
MAX_GIVEN_AWAY = 3
NUMBERS = frozenset({bool, int, float})
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Of a module."""


class CannotRecord(RuntimeError):
    """A model or a batch does something that no graph can hold."""


class Replayed(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Do it again."""


class Records(Protocol):
    """What records calls."""

    def __call__(self, call: Callable[[], None]) -> Replayed:
        """Record a call, which does nothing yet."""

    def forget(self) -> None:
        """What was recorded is gone: its memory is free."""


class Recorder:
    """Records the passes of a model, one graph a size, and adds up gradients and losses by replaying them.

    Args:
        model: that takes packed batches.
        learned: its parameters that get a gradient, as a pass that ran as it is has shown.
        autocast: the context of a forward pass.
        max_tokens: of a row at most.
        longest: tokens of the longest sequence there can be.
        least_tokens: of a row at least.
        records: records calls; as CUDA graphs.
    """

    _guard: Any = None

    def __init__(
        self,
        model: torch.nn.Module,
        learned: Sequence[torch.nn.Parameter],
        autocast: Callable[[], AbstractContextManager[Any]],
        *,
        max_tokens: int,
        longest: int,
        least_tokens: int = 0,
        records: Records | None = None,
    ) -> None:
        self.num_recorded = 0
        """Graphs made, of which some may be gone."""
        self.learned = learned
        """Changed only while nothing is recorded."""
        self._model, self._autocast = model, autocast
        self._max_tokens, self._longest, self._least_tokens = max_tokens, longest, least_tokens
        self._device = next(model.parameters()).device
        self._records: Records = records or CudaRecords(self._device)
        self._graphs: OrderedDict[tuple[int, int], tuple[Replayed, dict[str, Any]]] = OrderedDict()
        self._places: dict[str, torch.Tensor] = {}
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
            CannotRecord: then nothing was changed but gradients, and all graphs are gone.
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
        num_tokens, longest = packed["input_ids"].shape[1], packed["max_length_q"]
        if num_tokens > self._max_tokens or longest > self._longest:
            self.release()
            raise CannotRecord(f"a row of {num_tokens:,} tokens, the longest sequence of {longest:,}")
        num_sequences = len(packed["cu_seq_lens_q"]) - 1
        size = row_size(num_tokens, num_sequences, self._max_tokens, self._longest, self._least_tokens)
        if not self._graphs and size < self._max_tokens:  # the largest first: the memory of all others lies in its own
            self._graph(fill_up(packed, self._model, self._max_tokens, self._longest), loss)
        row = fill_up(packed, self._model, size, self._longest)
        graph, inputs = self._graph(row, loss)
        for name, place in inputs.items():
            if isinstance(place, torch.Tensor):
                place.copy_(_pinned(row[name], self._device), non_blocking=True)
        graph.replay()
        self._num_replays += 1

    def release(self) -> None:
        """Let go of all graphs and of their memory; they are made anew when they are needed."""
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        self._graphs.clear()
        self._gradients.clear()
        self._places.clear()
        self._mean = self._total = torch.empty(0)
        self._records.forget()

    @property
    def is_worth_it(self) -> bool:
        """Whether graphs live long enough: some loops call the model between steps."""
        return self._num_given_away < MAX_GIVEN_AWAY

    def _begin(self, total: int) -> None:
        """Gradients and loss of nothing yet, in their places."""
        if not self._gradients:
            self._records.forget()  # what stays is to lie close together, and not among what will be given back
            self._gradients = [torch.empty_like(p) for p in self.learned]
            self._mean, self._total = (torch.empty((), device=self._device) for _ in range(2))
        torch._foreach_zero_(self._gradients)
        self._mean.zero_()
        self._total.fill_(float(total))
        for parameter, gradient in zip(self.learned, self._gradients, strict=True):
            parameter.grad = gradient

    def _graph(self, row: dict[str, Any], loss: HeadLoss) -> tuple[Replayed, dict[str, Any]]:
        """The graph of a row's size, and the places that the row is to be put in."""
        key = (row["input_ids"].shape[1], len(row["cu_seq_lens_q"]))
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if len(self._graphs) >= NUM_GRAPHS:
            self._graphs.popitem(last=False)
        if self._guard is None:
            self._guard = self._model.register_forward_pre_hook(_Guard(self))
        inputs = {name: self._place(name, value) if _is_tensor(value) else value for name, value in row.items()}
        try:
            graph = self._records(lambda: self._pass(inputs, loss))
            self._check_what_learns()
        except BaseException as error:
            self.release()
            if is_out_of_memory(error) or not isinstance(error, Exception):
                raise
            raise CannotRecord(" ".join(str(error).split())[:300]) from error
        self._graphs[key] = graph, inputs
        self.num_recorded += 1
        return graph, inputs

    def _place(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Where an input of a pass is put: the beginning of a place that has room for the longest row."""
        if name not in self._places:
            self._places[name] = torch.zeros(self._max_tokens + 1, dtype=value.dtype, device=self._device)
        return self._places[name][: value.numel()].view(value.shape)

    def _pass(self, inputs: dict[str, Any], loss: HeadLoss) -> None:
        torch.clear_autocast_cache()  # of a context around: a graph makes the casts that it reads, and lends none
        with self._autocast():
            value = loss.sums(self._model(**model_inputs(inputs)), inputs)[0] / self._total
        torch.clear_autocast_cache()
        value.backward()
        self._mean.add_(value.detach())

    def _check_what_learns(self) -> None:
        """A gradient that was made while recording would lie in the memory of graphs, and learn nothing."""
        known = set(map(id, self.learned))
        if any(p.grad is not None and id(p) not in known for p in self._model.parameters()):
            raise CannotRecord("a parameter that had no gradient in the passes before has one now")

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
    """Tells a recorder that its model is called, and does not keep it; a copy of the model has no recorder."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = None if recorder is None else weakref.ref(recorder)

    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        recorder = None if self._recorder is None else self._recorder()
        if recorder is not None:
            recorder.give_way()

    def __reduce__(self) -> Any:
        return _Guard, (None,)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _pinned(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value.pin_memory() if device.type == "cuda" else value
