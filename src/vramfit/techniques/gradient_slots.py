"""`GradientSlots`: a way out of the device for gradients, as wide as two small buffers that never grow.

A gradient is copied into a slot where it was made, so that its own memory is free again at once. When a slot is full,
all that is in it goes to the host on a stream of its own: many gradients are small, and each would cost the host more
time than it takes on the link. Events order the copies: nothing waits for a stream that might be late, so what is
allocated when does not depend on how fast copies are.
"""

from collections.abc import Callable
from typing import Any

import torch

from vramfit.techniques.copies import Copies, flat
from vramfit.techniques.sight import out_of_sight

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
