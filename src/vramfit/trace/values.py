"""`Values`: what tensors of a trace hold, as far as the inputs of a step decide it.

Models ask about masks, positions and tokens: does the mask hide anything, does one text follow another in a row, where
is the last token? A trace runs on tensors without data, but the inputs of a step are known, and so is all that is
computed from them alone. Beside such a tensor a few real, small ones are kept, which hold what it would hold at a few
small batches: an operator whose tensors are all known is written down, and runs on them when a model asks. A question
has one answer where they agree, or where they differ as a number does that grows with the batch. What comes from
weights is never known.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.step.plain import Batch, make_batch
from vramfit.trace.work import at, split, tensors_in
from vramfit.workload import Workload

SAMPLED = (2, 4)
"""Batches at which values are kept, in a trace for any batch. Both are even: half of the rows may be padded."""
MOST_NUMBERS = 2**24
"""Larger tensors are not followed: an answer would take long."""
FILLED: dict[str, Any] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
}
GIVEN = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}
"""Factories that are told what they fill with, and the place of that argument."""
KNOWN_INPUTS = ("input_ids", "attention_mask")
"""Labels are data, and so is what packed rows are made of."""
FAILURES = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
Layout = tuple[Any, ...]
Samples = tuple[torch.Tensor, ...]
"""A tensor for each batch that is kept."""


class _Later:
    """What a tensor holds, computed when somebody asks."""

    def __init__(self, make: Callable[[], Samples | None]) -> None:
        self._make: Callable[[], Samples | None] | None = make
        self._samples: Samples | None = None

    def samples(self) -> Samples | None:
        """None where the operator does not run on the host."""
        if self._make is not None:
            make, self._make = self._make, None
            self._samples = make()
        return self._samples


class Values:
    """The known values of a trace, by storage and by layout in it: views share what they see.

    Args:
        probe: the batch of a trace for any batch; None for a trace of a real one, whose values are kept whole.
    """

    def __init__(self, probe: int | None) -> None:
        self._probe = probe
        self.batches: tuple[int | None, ...] = (None,) if probe is None else SAMPLED
        self._known: dict[int, tuple[Any, dict[Layout, _Later]]] = {}
        self._waiting: weakref.WeakSet[_Later] = weakref.WeakSet()

    def give(self, tensor: torch.Tensor, make: Callable[[int | None], torch.Tensor]) -> None:
        """What a tensor holds, from what it would hold at each batch that is kept; None is the real one."""
        self._keep(tensor, lambda: tuple(make(batch) for batch in self.batches))

    def forget(self, tensor: torch.Tensor) -> None:
        """The tensor holds data."""
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def forget_all(self) -> None:
        """All that was made so far holds data."""
        self._known.clear()

    def follow(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator has given a result: its values, where those of its arguments are known."""
        if isinstance(result, torch.Tensor) and self._follow_factory(name, args, result):
            return
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta and first.untyped_storage()._cdata not in self._known:
            return  # most operators: what comes from weights
        if not self._are_known(args, kwargs) or not _is_determined(func):
            return
        made = list(tensors_in(result))
        if not any(t.is_meta for t in made) or any(self._num_numbers(tensor) > MOST_NUMBERS for tensor in made):
            return
        run = self._prepared(func, args, kwargs)
        for index, tensor in enumerate(made):
            self._keep(tensor, partial(_picked, run, index))

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Any]) -> None:
        """An operator writes into its arguments, which are known afterwards where all of them were before."""
        known = [t for t in tensors_in(list(written)) if t.untyped_storage()._cdata in self._known]
        if not known:
            return
        if self._are_known(args, kwargs) and _is_determined(func):
            for waiting in list(self._waiting):  # what was computed before sees what was there before
                waiting.samples()
            self._waiting.clear()
            if self._prepared(func, args, kwargs)() is not None:
                return
        for tensor in known:
            self.forget(tensor)

    def made_by(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator whose shapes depend on values; None where those are not known."""
        if not self._are_known(args, kwargs):
            return None
        found = self._prepared(func, args, kwargs)()
        if found is None:
            return None
        if isinstance(found[0], torch.Tensor):
            made = self._made([found])
            return None if made is None else made[0]
        if isinstance(found[0], tuple | list):
            return self._made(list(zip(*found, strict=True)))
        return found[0] if all(value == found[0] for value in found) else None

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of what a tensor holds; None where that is not known, or not the same at every batch."""
        values = self._samples(tensor)
        if values is None or not all(v.shape == values[0].shape and torch.equal(v, values[0]) for v in values):
            return None
        return values[0].clone()

    def answer(self, tensor: torch.Tensor) -> Any:
        """The one number a tensor holds; None where that is not known."""
        values = self._samples(tensor)
        if values is None:
            return None
        numbers = [value.item() for value in values]
        if all(n == numbers[0] for n in numbers):
            return numbers[0]
        whole = [n for n in numbers if type(n) is int]
        return self._lifted(whole) if len(whole) == len(numbers) else None

    def _made(self, found: list[Any]) -> list[torch.Tensor] | None:
        """Tensors of a trace, from what they hold at each batch; None where a size does not grow evenly."""
        made: list[torch.Tensor] = []
        for values in found:
            sizes = [self._lifted(dims) for dims in zip(*(v.shape for v in values), strict=True)]
            if None in sizes:
                return None
            tensor = torch.empty([s for s in sizes if s is not None], dtype=values[0].dtype, device="meta")
            self._keep(tensor, partial(tuple, values))
            made.append(tensor)
        return made

    def _lifted(self, numbers: Sequence[int]) -> int | None:
        """A number of the trace, from what it is at each batch."""
        if self._probe is None or numbers[0] == numbers[1]:
            return numbers[0]
        slope, rest = divmod(numbers[1] - numbers[0], SAMPLED[1] - SAMPLED[0])
        return None if rest else numbers[0] + slope * (self._probe - SAMPLED[0])

    def _follow_factory(self, name: str, args: tuple[Any, ...], result: torch.Tensor) -> bool:
        """Whether an operator fills what it makes with one number; where it does, that is kept."""
        if name not in FILLED and name not in GIVEN:
            return False
        if self._num_numbers(result) <= MOST_NUMBERS:
            number = FILLED[name] if name in FILLED else args[GIVEN[name]]
            shape, dtype = tuple(result.shape), result.dtype
            self.give(result, lambda batch: torch.full(self._sampled(shape, batch), number, dtype=dtype, device="cpu"))
        return True

    def _are_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether all tensors among arguments are; a factory that counts has none."""
        return all(not t.is_meta or self._of(t) is not None for t in tensors_in((args, tuple(kwargs.values()))))

    def _prepared(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], list[Any] | None]:
        """An operator that runs once, at each batch, when it is called; None where it fails."""
        held = self._held(args), {name: self._held(value) for name, value in kwargs.items()}
        return cache(partial(self._run, func, *held))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any] | None:
        try:
            return [
                func(
                    *self._sampled(args, batch, index),
                    **{name: self._sampled(value, batch, index) for name, value in kwargs.items()},
                )
                for index, batch in enumerate(self.batches)
            ]
        except FAILURES:
            return None

    def _held(self, value: Any) -> Any:
        """An argument without its tensors, which may go before it is asked for: with what they hold."""
        if isinstance(value, torch.Tensor):
            return self._of(value) or value
        return type(value)(map(self._held, value)) if isinstance(value, tuple | list) else value

    def _sampled(self, value: Any, batch: int | None, index: int = 0) -> Any:
        """An argument as it is at a batch: sizes follow the batch, tensors are those that are kept, on the host."""
        if type(value) is int:
            return value if batch is None else at(split(value, self._probe), batch)
        if isinstance(value, _Later):
            samples = value.samples()
            if samples is None:
                raise RuntimeError("an operator before it failed")
            return samples[index]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, tuple | list):
            return type(value)(self._sampled(v, batch, index) for v in value)
        return value

    def _num_numbers(self, tensor: torch.Tensor) -> int:
        return math.prod(self._sampled(tuple(tensor.shape), self.batches[-1]))

    def _of(self, tensor: torch.Tensor) -> _Later | None:
        held = self._known.get(tensor.untyped_storage()._cdata)
        return None if held is None else held[1].get(_layout(tensor))

    def _samples(self, tensor: torch.Tensor) -> Samples | None:
        held = self._of(tensor)
        return None if held is None else held.samples()

    def _keep(self, tensor: torch.Tensor, make: Callable[[], Samples | None]) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = (weakref.ref(storage, lambda _: self._known.pop(key, None)), {})
        later = self._known[key][1][_layout(tensor)] = _Later(make)
        self._waiting.add(later)


def _picked(run: Callable[[], list[Any] | None], index: int) -> Samples | None:
    """One of the tensors that an operator gives, at each batch."""
    found = run()
    return None if found is None else tuple(list(tensors_in(sample))[index] for sample in found)


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@cache
def _is_determined(func: Any) -> bool:
    """Whether an operator gives the same for the same arguments, and needs some; of factories, `arange` does."""
    has_tensors = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return not is_random and (has_tensors or func._schema.name == "aten::arange")


@cache
def depends_on_values(func: Any) -> bool:
    """Whether the shape of what an operator gives, or a truth that it gives, depends on what tensors hold."""
    return torch.Tag.dynamic_output_shape in func.tags or func is torch.ops.aten.equal.default


def give_inputs(values: Values, model: torch.nn.Module, workload: Workload, inputs: Batch) -> None:
    """Tell a trace what the inputs of a step hold."""
    for tensor in inputs.values():
        if isinstance(tensor, torch.Tensor):
            values.forget(tensor)
    num_texts = len(inputs["input_ids"])

    @cache
    def example(batch: int | None) -> Batch:
        rows = num_texts if batch is None else batch * workload.texts_per_sample
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return make_batch(model, workload.task, "infer", workload.mask, rows, workload.seq, "cpu")

    for name in () if workload.is_packed else KNOWN_INPUTS:
        if name in inputs:
            values.give(inputs[name], partial(_input_of, example, name))


def _input_of(example: Callable[[int | None], Batch], name: str, batch: int | None) -> torch.Tensor:
    return example(batch)[name]
