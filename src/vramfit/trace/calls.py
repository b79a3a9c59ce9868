"""`Calls`: what operators give, remembered: layers repeat, so most calls need not run a second time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.cuda.kernels import KERNELS
from vramfit.trace.template import CallTemplate, SpecTemplate
from vramfit.trace.work import (
    SEQUENCES,
    Polynomial,
    WorkTemplate,
    product,
    split,
    tensors_in,
    view_work,
    work_in_place,
    work_of,
)

MAX_REMEMBERED = 8192
"""Kinds of calls that traces share; a plan meets some hundreds."""
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride, type."""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that an operator gives."""

    layout: Layout
    size: Polynomial
    """Bytes of its storage."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What an operator gives for one kind of arguments."""

    outputs: tuple[Any, ...] | None
    """An `Output` for each new tensor, other values as they are; None: it must really run (views, host tensors)."""
    single: bool
    work: WorkTemplate
    call: CallTemplate | None = None
    """Set where the kernel has requests of its own."""

    def make(self) -> Any:
        """The result anew, without running anything."""
        assert self.outputs is not None
        made = [_empty(*o.layout) if isinstance(o, Output) else o for o in self.outputs]
        return made[0] if self.single else made


class FusedKernel:
    """What a compiled kernel reads and writes."""

    __slots__ = ("key", "made", "num_tensors", "taken")

    def __init__(self, taken: list[Any], made: list[Any]) -> None:
        self.taken = taken
        self.made = made
        self.key = ("fused", _key(taken), _key(made))
        """Equal for kernels that do the same."""
        self.num_tensors = sum(1 for _ in tensors_in([taken, made]))


class Memory:
    """What calls were found to give and to do, by what they are called with."""

    __slots__ = ("in_place", "known")

    def __init__(self) -> None:
        self.known: dict[Any, Remembered] = {}
        self.in_place: dict[Any, WorkTemplate] = {}

    def __len__(self) -> int:
        return len(self.known) + len(self.in_place)


_shared: dict[int | None, Memory] = {}
"""Batch of the probe → what all traces at it remember."""


def _memory(probe: int | None, *, shared: bool) -> Memory:
    if not shared:
        return Memory()
    if sum(map(len, _shared.values())) > MAX_REMEMBERED:
        _shared.clear()
    return _shared.setdefault(probe, Memory())


class Calls:
    """Results by operator and kind of arguments; sizes as functions of the batch.

    Args:
        probe: the batch of the trace, where sizes are functions of it.
        shared: what one trace finds serves others; for models of plain tensors, since kinds are told by their shapes.
    """

    def __init__(self, probe: int | None, *, shared: bool = False) -> None:
        self._probe = probe
        memory = _memory(probe, shared=shared)
        self._known = memory.known
        self._in_place = memory.in_place

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Equal for calls that give like results."""
        return (func, _key(args), _key(tuple(kwargs.items())) if kwargs else ())

    def find(self, key: Any) -> Remembered | None:
        return self._known.get(key)

    def remember(self, key: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Remembered:
        """Keep what a call gave; not results that share storage with an argument, nor calls that no other is like."""
        single = isinstance(result, torch.Tensor)
        outputs = [result] if single else list(result) if isinstance(result, tuple | list) else None
        inputs = {t.untyped_storage()._cdata for t in tensors_in((args, tuple(kwargs.values())))}
        if outputs is None or not all(_is_new(o, inputs) for o in outputs):
            known = Remembered(None, single, view_work(name))
        else:
            known = Remembered(
                tuple(self._output(o) if isinstance(o, torch.Tensor) else o for o in outputs),
                single,
                work_of(name, (*args, *kwargs.values()), outputs, self._probe),
                self._call(name, args, kwargs, outputs),
            )
        if not any(isinstance(value, torch.ScriptObject) for value in args):
            self._known[key] = known
        return known

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> WorkTemplate:
        """The work of an operator that writes into its arguments."""
        name = func._schema.name.partition("::")[2]
        given = (*args, *kwargs.values())
        if any(isinstance(value, list) for value in given):  # long lists: a key costs more than the answer
            listed = work_in_place(name, given, written, self._probe)
            return self._in_place.setdefault(listed.figures, listed)
        key = self.key(func, args, kwargs)
        work = self._in_place.get(key)
        if work is None:
            work = self._in_place[key] = work_in_place(name, given, written, self._probe)
        return work

    def fused(self, kernel: FusedKernel) -> WorkTemplate:
        """The work of a compiled kernel: it reads and writes."""
        work = self._in_place.get(kernel.key)
        if work is None:
            made = list(tensors_in(kernel.made))
            work = self._in_place[kernel.key] = work_of("fused", (kernel.taken,), made, self._probe)
        return work

    def size(self, tensor: torch.Tensor) -> Polynomial:
        """Bytes of the storage under a tensor that has just been made."""
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes == tensor.numel() * tensor.element_size():
            return product(tuple(split(n, self._probe) for n in tensor.shape), tensor.element_size())
        if not any(split(n, self._probe)[0] for n in tensor.shape):
            return (nbytes,)
        k, c = split(nbytes, self._probe)  # padded or expanded: read off the total
        return (c, k)

    def _output(self, tensor: torch.Tensor) -> Output:
        return Output((tuple(tensor.shape), tensor.stride(), tensor.dtype), self.size(tensor))

    def _call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]
    ) -> CallTemplate | None:
        kernel = KERNELS.get(name)
        if kernel is None:
            return None
        specs = tuple(self._abstract(o) if isinstance(o, torch.Tensor) else None for o in outputs)
        sizes = tuple(self.size(o) if isinstance(o, torch.Tensor) else (0,) for o in outputs)
        return CallTemplate(name, kernel, self._abstract(args), self._abstract(kwargs), specs, sizes)

    def _abstract(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return SpecTemplate(
                tuple(split(n, self._probe) for n in value.shape),
                tuple(split(n, self._probe) for n in value.stride()),
                str(value.dtype).removeprefix("torch."),
                value.dtype.itemsize,
            )
        if isinstance(value, list | tuple):
            return tuple(self._abstract(v) for v in value)
        if isinstance(value, dict):
            return {k: self._abstract(v) for k, v in value.items()}
        return value


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    """Which elements count depends on data: all of them is the dearest case."""
    return torch.empty(x.numel(), x.dim(), dtype=torch.long, device="meta")


def _int4_product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """Its meta function asks for a device that only fake tensors have."""
    return x.new_empty(x.shape[0], 8 * weight.shape[0])


def _grouped_product(a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, **_: Any) -> torch.Tensor:
    """GroupedMMUtils.h (2.11): rows start at multiples of 16 bytes. Its meta function takes bf16 alone, and CUDA others
    too, which it multiplies group by group."""
    rows, columns = a.shape[-2], b.shape[-1]
    width = -(-columns * a.element_size() // 16) * 16 // a.element_size()
    if a.dim() != b.dim():
        return torch.empty_strided((rows, columns), (width, 1), dtype=a.dtype, device="meta")
    num_groups = (a if a.dim() > 2 else offs).shape[0]
    return torch.empty_strided((num_groups, rows, columns), (rows * width, width, 1), dtype=a.dtype, device="meta")


OWN_RESULTS: dict[str, Any] = {
    "nonzero": _nonzero,
    "_weight_int4pack_mm": _int4_product,
    "_grouped_mm": _grouped_product,
}
"""Operators whose meta functions do not say what CUDA gives."""


def numbers_in(value: Any) -> Iterator[int]:
    """Every whole number in nested lists and tuples."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, SEQUENCES):
        for item in value:
            yield from numbers_in(item)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    return [
        kwargs[a.name] if a.name in kwargs else args[i]
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write and (a.name in kwargs or i < len(args))
    ]


def _is_new(output: Any, inputs: set[int]) -> bool:
    if not isinstance(output, torch.Tensor):
        return True
    on_device = output.is_meta and output.storage_offset() == 0
    return on_device and output.untyped_storage()._cdata not in inputs


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.is_meta)
    if isinstance(value, SEQUENCES):
        return tuple([_key(v) for v in value])
    return type(value), value if value.__hash__ is not None else repr(value)  # 1, 1.0 and True are equal


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
