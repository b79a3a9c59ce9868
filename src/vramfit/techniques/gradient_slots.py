"""`GradientSlots`: a way out of the device for gradients, as wide as two small buffers that never grow.

A gradient is copied into a slot where it was made, so that its own memory is free again at once, and from there to the
host on a stream of its own. Events order the copies: nothing waits for a stream that might be late, so what is
allocated when does not depend on how fast copies are.
"""

from typing import Any

import torch

from vramfit.techniques.sight import out_of_sight

SLOT_BYTES = 16 * 2**20
"""Larger gradients go in pieces."""
NUM_SLOTS = 2


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
        self._next = 0
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._left = [self._event() for _ in self.slots]

    def _event(self) -> Any:
        return torch.cuda.Event() if self._stream is not None else None  # type: ignore[no-untyped-call]

    def send(self, gradient: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy a gradient to the host; gives an event that has come to pass when it is there, or None if it is.

        Args:
            gradient: on the device; it may be freed when this returns.
            target: in host memory, of the same type and layout; pinned where the device is a GPU.
        """
        size = self.slots[0].numel() // gradient.element_size()
        with out_of_sight(self.device):
            targets = torch.split(flat(target), size)
        for piece, place in zip(torch.split(flat(gradient), size), targets, strict=True):
            self._send_piece(piece, place)
        if self._stream is None:
            return None
        arrived = self._event()
        arrived.record(self._stream)
        return arrived

    def _send_piece(self, piece: torch.Tensor, target: torch.Tensor) -> None:
        number, self._next = self._next, (self._next + 1) % len(self.slots)
        slot = self.slots[number][: piece.nbytes].view(piece.dtype)
        if self._stream is None:
            slot.copy_(piece)
            with out_of_sight(self.device):
                target.copy_(slot)
            return
        here = torch.cuda.current_stream(self.device)
        here.wait_event(self._left[number])
        slot.copy_(piece)
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(here)
            target.copy_(slot, non_blocking=True)
            self._left[number].record(self._stream)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
