"""`GradientSlots`: a way out of the device for gradients, as wide as two small buffers that never grow.

A gradient is copied into a slot where it was made, so that its own memory is free again at once. When a slot is full,
all that is in it goes to the host on a stream of its own: many gradients are small, and each would cost the host more
time than it takes on the link. Events order the copies: nothing waits for a stream that might be late, so what is
allocated when does not depend on how fast copies are.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Adder:
    """Does what it is given, one after another, each when its event has come to pass."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._failures: list[BaseException] = []
        arguments = (self._queue, self._failures.append)  # not itself: it ends with its last reference
        Thread(target=_add_all, args=arguments, daemon=True, name="vramfit gradients").start()

    def put(self, arrived: Any, add: Callable[[], None]) -> None:
        """Add when the event has come to pass."""
        self._queue.put((arrived, add))

    def wait(self) -> None:
        """Until everything that was put has been added."""
        done: SimpleQueue[None] = SimpleQueue()
        self._queue.put(done)
        done.get()
        if self._failures:
            failure = self._failures[0]
            self._failures.clear()
            raise failure

    def __del__(self) -> None:
        self._queue.put(None)


def _add_all(queue: "SimpleQueue[Any]", fail: Callable[[BaseException], None]) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, SimpleQueue):
            item.put(None)
            continue
        arrived, add = item
        try:
            arrived.synchronize()
            with torch.no_grad():
                add()
        except BaseException as error:
            fail(error)
        del item, arrived, add


@dataclass(slots=True)
class Copies:
    """Tensors in one dimension that are copied, and where to; those that lie side by side at both ends are one."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    num_kinds: int = 1
    """So many kinds of tensors take turns: a neighbour is among the last so many."""

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One more."""
        for at in range(-1, -1 - min(self.num_kinds, len(self.targets)), -1):
            if _follows(target, self.targets[at]) and _follows(source, self.sources[at]):
                self.targets[at], self.sources[at] = _both(self.targets[at], target), _both(self.sources[at], source)
                return
        self.targets.append(target)
        self.sources.append(source)

    def send(self) -> None:
        """All of them in one call: there are thousands, and the host must be ahead of the link.

        A prediction takes them one by one, as they go: in one call, meta tensors are copied twice.
        """
        if self.targets and not any(tensor.is_meta for tensor in (self.targets[0], self.sources[0])):
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)
            return
        for target, source in zip(self.targets, self.sources, strict=True):
            target.copy_(source, non_blocking=True)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _follows(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor begins where another ends, in the same memory."""
    if tensor.is_meta or tensor.dtype != other.dtype or tensor.data_ptr() != other.data_ptr() + other.nbytes:
        return False
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _both(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.as_strided((first.numel() + second.numel(),), (1,))


BLOCK_BYTES = 64 * 2**20
"""Of pinned memory that many tensors share; one that needs more has a larger one, and others use what it leaves."""
PIN_ALIGNMENT = 64


def pinned_bytes(num_bytes: int) -> int:
    """What pinned memory of a size takes: torch takes it in powers of two (CachingHostAllocatorImpl.h, 2.11).

    >>> pinned_bytes(50 * 2**20) // 2**20
    64
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def held_bytes(num_bytes: int, device: torch.device) -> int:
    """What a tensor in host memory takes where it serves a device: on the CPU nothing is pinned.

    A prediction, on the meta device, is for a GPU.
    """
    return num_bytes if device.type == "cpu" else pinned_bytes(num_bytes)


class HostArena:
    """Host memory for many tensors that serve a device, in blocks of a power of two, so that little is rounded up.

    Args:
        num_bytes: of all tensors that will be asked for.
        device: which they serve; for a GPU they are pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.held_bytes = 0
        """What the blocks take until now."""
        self._pins = device.type == "cuda"
        self._shares = device.type != "cpu"
        self._waiting_bytes = num_bytes
        self._blocks: list[torch.Tensor | None] = []
        self._free: list[tuple[int, int, int]] = []

    @classmethod
    def measure(cls, sizes: Iterable[int], device: torch.device) -> int:
        """What tensors of these sizes in bytes will take, asked for in this order."""
        sizes = list(sizes)
        arena = cls(sum(sizes), device)
        for size in sizes:
            arena._place(size, make=False)
        return arena.held_bytes

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor of the same shape and layout."""
        if not self._shares:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            self.held_bytes += made.nbytes
            return made
        num_bytes = tensor.numel() * dtype.itemsize
        number, begin = self._place(num_bytes, make=True)
        block = self._blocks[number]
        assert block is not None
        return block[begin : begin + num_bytes].view(dtype).as_strided(tensor.shape, tensor.stride())

    def _place(self, num_bytes: int, *, make: bool) -> tuple[int, int]:
        """The first free stretch that is long enough, of a new block where there is none."""
        if not self._shares:
            self.held_bytes += num_bytes
            return 0, 0
        taken = -(-num_bytes // PIN_ALIGNMENT) * PIN_ALIGNMENT
        at = next((i for i, (_, _, left) in enumerate(self._free) if left >= taken), None)
        if at is None:
            size = max(pinned_bytes(taken), min(BLOCK_BYTES, pinned_bytes(self._waiting_bytes)))
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pins) if make else None)
            self._free.append((len(self._blocks) - 1, 0, size))
            self.held_bytes += size
            at = len(self._free) - 1
        number, begin, left = self._free[at]
        self._free[at] = (number, begin + taken, left - taken)
        self._waiting_bytes = max(self._waiting_bytes - num_bytes, 0)
        return number, begin


def out_of_sight(device: torch.device) -> AbstractContextManager[Any]:
    """Where the device is the CPU, what happens inside is not counted as the device's."""
    return _disable_current_modes() if device.type == "cpu" else nullcontext()


SLOT_BYTES = 16 * 2**20
"""Larger gradients go in pieces."""
NUM_SLOTS = 2
ALIGNMENT = 512


class GradientSlots:
    """Sends tensors from a device to host memory.

    Args:
        device: where gradients are made.
        largest_bytes: of a gradient; slots are no larger.
    """

    def __init__(self, device: torch.device, largest_bytes: int) -> None:
        size = min(SLOT_BYTES, largest_bytes)
        self.device = device
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        """What it takes on the device, for good."""
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._left = [self._event() for _ in self.slots]
        self._number = 0
        self._used_bytes = 0
        self._waiting = Copies()
        self._then: list[Callable[[Any], None]] = []

    def _event(self) -> Any:
        return torch.cuda.Event() if self._stream is not None else None  # type: ignore[no-untyped-call]

    def send(
        self, gradient: torch.Tensor, target: torch.Tensor, then: Callable[[Any], None] = lambda arrived: None
    ) -> None:
        """Copy a gradient to the host, at the latest when `flush` is called.

        Args:
            gradient: on the device; it may be freed when this returns.
            target: in host memory, of the same type and layout; pinned where the device is a GPU.
            then: called when the copy is under way, with an event that comes to pass when it is there; with None
                where it is there already.
        """
        source, width = flat(gradient), gradient.element_size()
        with out_of_sight(self.device):
            goal = flat(target)
        done, size, slot_bytes = 0, source.numel(), self.slots[0].numel()
        while done < size:
            if self._waiting.targets and (size - done) * width > slot_bytes - self._used_bytes:
                self.flush()
            num = min(size - done, slot_bytes // width)
            if num == size:
                self._put(source, goal)
            else:
                with out_of_sight(self.device):
                    place = goal[done : done + num]
                self._put(source[done : done + num], place)
            done += num
        if self._stream is None:
            then(None)
        else:
            self._then.append(then)

    def flush(self) -> None:
        """Let all that is in a slot be under way."""
        if not self._waiting.targets:
            return
        left = self._left[self._number]
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(here)
            self._waiting.send()
            left.record(self._stream)
        arrived = None
        if self._then:
            arrived = self._event()
            arrived.record(self._stream)
        then, self._then = self._then, []
        self._waiting = Copies()
        self._next()
        for tell in then:
            tell(arrived)

    def wait(self) -> None:
        """Until all that was sent is there."""
        if self._stream is not None:
            self.flush()
            self._stream.synchronize()

    def _next(self) -> None:
        self._number, self._used_bytes = (self._number + 1) % len(self.slots), 0

    def _put(self, piece: torch.Tensor, target: torch.Tensor) -> None:
        begin = self._used_bytes
        slot = self.slots[self._number][begin : begin + piece.nbytes].view(piece.dtype)
        if self._stream is None:
            slot.copy_(piece)
            with out_of_sight(self.device):
                target.copy_(slot)
            self._next()
            return
        if not self._waiting.targets:
            torch.cuda.current_stream(self.device).wait_event(self._left[self._number])
        slot.copy_(piece)
        self._waiting.add(target, slot)
        self._used_bytes = min(-(-(begin + piece.nbytes) // ALIGNMENT) * ALIGNMENT, self.slots[0].numel())
