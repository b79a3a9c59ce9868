"""Pinned host memory, which a GPU can copy from and to on its own: how much of the host's memory it really takes."""

import torch


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
