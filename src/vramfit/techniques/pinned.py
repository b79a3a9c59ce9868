"""Pinned host memory, which a GPU can copy from and to on its own: how much of the host's memory it really takes."""

from collections.abc import Iterable

import torch

BLOCK_BYTES = 64 * 2**20
"""Of pinned memory that many tensors share; one that needs more has a larger one, and others use what it leaves."""
ALIGNMENT = 64


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
        taken = -(-num_bytes // ALIGNMENT) * ALIGNMENT
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
