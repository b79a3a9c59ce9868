"""`Ledger`: which storages live, under which numbers, and the entries that say when they came and went."""

import weakref
from typing import Any

import torch

from vramfit.records.stream import Origin
from vramfit.records.work import Phase
from vramfit.trace.affine import Polynomial
from vramfit.trace.template import CallTemplate, Entry, Launch, Notice, Part, Release, Request, StreamTemplate
from vramfit.trace.work import StretchTemplate, WorkTemplate

TIMED = ("steady.", "first.micro1")
"""Segments whose work is written down: a first step is not timed, but its second micro-batch stands for all later."""


class Ledger:
    """Writes a `StreamTemplate`; a storage's end is noticed when its last reference goes."""

    def __init__(self, template: StreamTemplate) -> None:
        self.template = template
        self._entries: list[Entry] = []
        self._live: dict[int, tuple[int, Any]] = {}
        self._on_host: dict[int, Any] = {}
        self._origins: dict[Origin, int] = {}
        self._next_id = 1
        self._stretches: list[StretchTemplate] | None = None

    def begin(self, segment: str, part: str) -> None:
        """What follows belongs to this segment of the stream and this part of the run."""
        self._entries = self.template.segments.setdefault(segment, [])
        self._entries.append(Part(part))
        self._stretches = self.template.work.setdefault(segment, []) if segment.startswith(TIMED) else None
        if self._stretches is not None:
            self._stretches.append(StretchTemplate())

    @property
    def counts_work(self) -> bool:
        """Whether what runs now is part of a timed step."""
        return self._stretches is not None

    def work(self, work: WorkTemplate, phase: Phase, num_calls: int = 1) -> None:
        """An operator runs."""
        if self._stretches is not None:
            self._stretches[-1].count(work, phase, num_calls)

    def wait(self) -> None:
        """The program waits for the device before it goes on."""
        if self._stretches is not None:
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
        id_, self._next_id = self._next_id, self._next_id + 1
        self._watch(tensor.untyped_storage(), id_)
        return id_

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """The storage lives in host memory in a real run."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._on_host[key] = weakref.ref(storage, lambda _: self._on_host.pop(key, None))

    def let_go(self, tensor: torch.Tensor) -> None:
        """The block of a tensor that lives on is given back: what it holds from now on is on paper only."""
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
        self._entries.append(Request(self.follow(tensor), size, self._index(origin), cuda_stream))

    def request_for_good(self, size: int, origin: Origin) -> None:
        """A block that is never given back."""
        self._entries.append(Request(self._next_id, (size,), self._index(origin)))
        self._next_id += 1

    def launch(self, call: CallTemplate, outputs: tuple[int, ...], origin: Origin) -> None:
        """A kernel with requests of its own runs."""
        self._entries.append(Launch(call, outputs, self._index(origin)))

    def _watch(self, storage: torch.UntypedStorage, id_: int) -> None:
        key = storage._cdata
        self._live[key] = (id_, weakref.ref(storage, lambda _: self._gone(key, id_)))

    def _gone(self, key: int, id_: int) -> None:
        held = self._live.get(key)
        if held is not None and held[0] == id_:
            del self._live[key]
            self._entries.append(Release(id_))

    def _index(self, origin: Origin) -> int:
        index = self._origins.get(origin)
        if index is None:
            index = self._origins[origin] = len(self.template.origins)
            self.template.origins.append(origin)
        return index
