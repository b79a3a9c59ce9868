"""`Ledger`: which storages live, under which numbers, and the entries that say when they came and went."""

import weakref
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.records.stream import Origin, Phase
from vramfit.step.joint import FIRST
from vramfit.trace.template import (
    CallTemplate,
    Did,
    Entry,
    Launch,
    Notice,
    Part,
    Release,
    Request,
    StreamTemplate,
    Waited,
)
from vramfit.trace.unrolling import Unrolling
from vramfit.trace.work import Polynomial, StretchTemplate, WorkTemplate


class Places:
    """Follows module calls; in backward, finds the module that recorded the running autograd node.

    Args:
        others: models beside it, by what the paths of their modules begin with.
    """

    def __init__(self, model: torch.nn.Module, **others: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        for prefix, other in others.items():
            self._names |= {id(module): name for name, module in other.named_modules(prefix=prefix)}
        self._stack: list[str] = [""]
        self._by_sequence: dict[int, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "Places":
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()

    def clear(self) -> None:
        """Forget a pass that has ended, or that an error cut short."""
        self._by_sequence.clear()
        del self._stack[1:]

    @property
    def in_module(self) -> bool:
        """Whether a module's forward is running; in backward, that is recomputation."""
        return len(self._stack) > 1

    def forward(self) -> str:
        """The module running now; remembered for the autograd node that has just been made."""
        name = self._stack[-1]
        # the node's own operator comes first: later ones that need no gradient find the same number
        self._by_sequence.setdefault(torch.autograd._get_sequence_nr(), name)  # type: ignore[attr-defined]
        return name

    def backward(self) -> str:
        """The module that recorded the node running now; a module being recomputed comes first."""
        if self.in_module:
            return self.forward()
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        # the node took its number just before the operator ran, when the next number was one higher
        return self._by_sequence.get(node._sequence_nr() + 1, "")


TIMED = ("steady.", "first.micro1")
"""Segments whose work is written down: a first step is not timed, but its second micro-batch stands for all later."""


PASSES = (".micro", f".{FIRST}")
"""In the names of segments that are passes through the model."""


def stretches_of(entries: list[Entry]) -> list[StretchTemplate]:
    """The work that stands between entries."""
    stretches: list[StretchTemplate] = []
    for entry in entries:
        if type(entry) is Did:
            stretches[-1].count(entry.work, entry.phase, entry.num_calls)
        elif type(entry) is Part:
            stretches.append(StretchTemplate())
        elif type(entry) is Waited:
            stretches[-1].waits = True
            stretches.append(StretchTemplate())
    return stretches


class Ledger:
    """Writes a `StreamTemplate`; a storage's end is noticed when its last reference goes."""

    def __init__(self, template: StreamTemplate, unrolling: Unrolling | None = None) -> None:
        self.template = template
        self._unrolling = unrolling
        self._segment = ""
        self._entries: list[Entry] = []
        self._live: dict[int, tuple[int, Any]] = {}
        self._on_host: dict[int, Any] = {}
        self.for_good: set[int] = set()
        self._origins = {origin: index for index, origin in enumerate(template.origins)}
        self._next_id = template.next_id
        self._stretches: list[StretchTemplate] | None = None

    def begin(self, segment: str, part: str) -> None:
        """What follows belongs to this segment of the stream and this part of the run."""
        if segment != self._segment:
            self._end_segment()
            self._segment = segment
        self._entries = self.template.segments.setdefault(segment, [])
        self._entries.append(Part(part))
        self._stretches = self.template.work.setdefault(segment, []) if segment.startswith(TIMED) else None
        if self._stretches is not None:
            self._stretches.append(StretchTemplate())

    @property
    def _is_short(self) -> bool:
        """Whether what is written is a pass through few layers, which becomes one through all of them at its end."""
        return self._unrolling is not None and any(name in self._segment for name in PASSES)

    def _end_segment(self) -> None:
        if not self._is_short:
            return
        assert self._unrolling is not None
        entries = self._unrolling.unroll(self._entries, self)
        if self._stretches is not None:
            self._stretches[:] = stretches_of(entries)
        self._entries[:] = [entry for entry in entries if type(entry) not in (Did, Waited)]

    @property
    def counts_work(self) -> bool:
        """Whether what runs now is part of a timed step."""
        return self._stretches is not None

    def work(self, work: WorkTemplate, phase: Phase, num_calls: int = 1) -> None:
        """An operator runs."""
        if self._stretches is None:
            return
        if self._is_short:
            self._entries.append(Did(work, phase, num_calls))
        else:
            self._stretches[-1].count(work, phase, num_calls)

    def wait(self) -> None:
        """The program waits for the device before it goes on."""
        if self._stretches is None:
            return
        if self._is_short:
            self._entries.append(Waited())
        else:
            self._stretches[-1].waits = True
            self._stretches.append(StretchTemplate())

    def notice(self, name: str) -> None:
        """The driver is told of a library that is loaded."""
        self._entries.append(Notice("driver", name))

    def lives(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage has a block of its own on the device."""
        return tensor.untyped_storage()._cdata in self._live

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage needs no new block: it has one, is on the host, or is empty."""
        storage = tensor.untyped_storage()
        return storage._cdata in self._live or storage._cdata in self._on_host or storage.nbytes() == 0

    def follow(self, tensor: torch.Tensor) -> int:
        """Give the tensor's storage a number and watch for its end."""
        id_ = self.new_id()
        self._watch(tensor.untyped_storage(), id_)
        return id_

    def new_id(self) -> int:
        """A number for a block."""
        id_, self._next_id = self._next_id, self._next_id + 1
        self.template.next_id = self._next_id
        return id_

    def id_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's block; None where it has none."""
        held = self._live.get(tensor.untyped_storage()._cdata)
        return None if held is None else held[0]

    def living(self) -> set[int]:
        """The numbers of all blocks that are there."""
        return {id_ for id_, _ in self._live.values()}

    def renumber(self, numbers: dict[int, int]) -> None:
        """Blocks that are there go on under other numbers."""
        for id_, watched in list(self._live.values()):
            if id_ in numbers:
                self._watch(watched(), numbers[id_])

    def twins(self, tensors: list[torch.Tensor], id_: int) -> list[torch.Tensor]:
        """Tensors like others that share a block, in one that has been requested under this number."""
        with _disable_current_modes():
            num_elements = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
            base = torch.empty(num_elements, dtype=tensors[0].dtype, device="meta")
            made = [base.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors]
        self._watch(base.untyped_storage(), id_)
        return made

    def forget(self, tensor: torch.Tensor) -> None:
        """The end of a tensor's block has been written down."""
        self._live.pop(tensor.untyped_storage()._cdata, None)

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """The storage lives in host memory in a real run."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._on_host[key] = weakref.ref(storage, lambda _: self._on_host.pop(key, None))

    def let_go(self, tensor: torch.Tensor) -> None:
        """Free the block of a tensor that stays alive; it holds no simulated memory then (FSDP after sharding)."""
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            id_, _ = self._live.pop(key)
            self._entries.append(Release(id_))
        self.keep_on_host(tensor)

    def hand_over(self, giver: torch.Tensor, taker: torch.Tensor) -> None:
        """`taker` is `giver` changed in place: one block, though meta made two storages."""
        id_, _ = self._live.pop(giver.untyped_storage()._cdata)
        self._watch(taker.untyped_storage(), id_)

    def request(self, tensor: torch.Tensor, size: Polynomial, origin: Origin, cuda_stream: int = 0) -> None:
        """A storage comes to be."""
        self._entries.append(Request(self.follow(tensor), size, self.index(origin), cuda_stream))

    def request_for_good(self, size: int, origin: Origin) -> None:
        """A block that is never given back."""
        self.for_good.add(id_ := self.new_id())
        self._entries.append(Request(id_, (size,), self.index(origin)))

    def launch(self, call: CallTemplate, outputs: tuple[int, ...], origin: Origin) -> None:
        """A kernel with requests of its own runs."""
        self._entries.append(Launch(call, outputs, self.index(origin)))

    def _watch(self, storage: torch.UntypedStorage, id_: int) -> None:
        key = storage._cdata
        self._live[key] = (id_, weakref.ref(storage, lambda _: self._gone(key, id_)))

    def _gone(self, key: int, id_: int) -> None:
        held = self._live.get(key)
        if held is not None and held[0] == id_:
            del self._live[key]
            self._entries.append(Release(id_))

    def index(self, origin: Origin) -> int:
        """The number of an origin."""
        index = self._origins.get(origin)
        if index is None:
            index = self._origins[origin] = len(self.template.origins)
            self.template.origins.append(origin)
        return index
