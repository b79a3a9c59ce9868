"""Host to device: one tensor at a time, in its final type when it arrives; nothing else is allocated there."""

from typing import Protocol

import torch

STAGE_BYTES = 16 * 2**20
"""Each of two pinned buffers: while one is on its way, the other is filled."""
STAGED_FROM_BYTES = 2**20
"""Smaller tensors are copied at once: the driver has a buffer of its own for them."""


class Transfer(Protocol):
    """Brings host tensors to a device."""

    device: torch.device

    def bring(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the device, in `dtype`."""

    def finish(self) -> None:
        """Wait until everything has arrived."""


def make_transfer(device: torch.device) -> Transfer:
    """The way to a device."""
    return ToCuda(device) if device.type == "cuda" else ToHost(device)


class ToHost:
    """Stays on the host: a tensor already in its type stays a view of its file, and is read when it is used."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def bring(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return source.to(self.device, dtype)

    def finish(self) -> None:
        pass


class ToCuda:
    """Through two pinned buffers, converted on the host: fewer bytes travel, and the device holds only the result."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._stages]  # type: ignore[no-untyped-call]
        self._next = 0

    def bring(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        target = torch.empty(source.shape, dtype=dtype, device=self.device)
        if target.numel() * target.element_size() < STAGED_FROM_BYTES:
            target.copy_(source)
            return target
        from_, to = source.contiguous().view(-1), target.view(-1)
        step = STAGE_BYTES // dtype.itemsize
        for begin in range(0, to.numel(), step):
            self._send(from_[begin : begin + step], to[begin : begin + step])
        return target

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        stage, sent = self._stages[self._next], self._sent[self._next]
        self._next = 1 - self._next
        sent.synchronize()
        piece = stage.view(target.dtype)[: target.numel()]
        piece.copy_(source)
        target.copy_(piece, non_blocking=True)
        sent.record(torch.cuda.current_stream(self.device))

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)
