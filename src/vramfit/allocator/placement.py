"""Where the driver puts segments: addresses decide which of several equally large free blocks is taken."""

import random
from typing import Literal, Protocol, get_args

from vramfit.units import MIB, TIB

DriverEvent = Literal["model_loaded", "cublas_loaded"]
"""What changes the driver's address space besides segments: the first kernel after the model was copied to
the GPU; a cuBLAS handle, one for each thread that multiplies matrices, before its workspace is requested."""
DRIVER_EVENTS: tuple[DriverEvent, ...] = get_args(DriverEvent)

_BASE_ADDRESS = 2**62  # anywhere: only the order of addresses matters, and those below must do for any batch


class Placement(Protocol):
    """cudaMalloc and cudaFree, as far as addresses go. One object serves one allocator."""

    def place(self, size: int) -> int:
        """The address of a new segment of `size` bytes."""

    def release(self, address: int, size: int) -> None:
        """Take back a segment."""

    def on_event(self, event: DriverEvent) -> None:
        """Be told what else happened to the address space."""


class AscendingPlacement:
    """Every segment above all earlier ones."""

    def __init__(self) -> None:
        self._next = _BASE_ADDRESS

    def place(self, size: int) -> int:
        address = self._next
        self._next += size
        return address

    def release(self, address: int, size: int) -> None:
        """Addresses are not used twice."""

    def on_event(self, event: DriverEvent) -> None:
        """Nothing moves."""


class DescendingPlacement:
    """Every segment below all earlier ones."""

    def __init__(self) -> None:
        self._lowest = _BASE_ADDRESS

    def place(self, size: int) -> int:
        self._lowest -= size
        return self._lowest

    def release(self, address: int, size: int) -> None:
        """Addresses are not used twice."""

    def on_event(self, event: DriverEvent) -> None:
        """Nothing moves."""


class ShuffledPlacement:
    """Segments in an order that only the seed decides."""

    _SLOT_BYTES = TIB  # no segment is larger, so slots never overlap
    _NUM_SLOTS = 2**20

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._taken: set[int] = set()

    def place(self, size: int) -> int:
        slot = self._random.randrange(self._NUM_SLOTS)
        while slot in self._taken:
            slot = self._random.randrange(self._NUM_SLOTS)
        self._taken.add(slot)
        return slot * self._SLOT_BYTES

    def release(self, address: int, size: int) -> None:
        self._taken.discard(address // self._SLOT_BYTES)

    def on_event(self, event: DriverEvent) -> None:
        """Nothing moves."""


class FreshPlacement:
    """What a process does whose first CUDA call brings a model to the GPU; the default.

    - The driver reserves address space in chunks of 32 MiB, each below the last. A segment starts a chunk;
      what its last chunk leaves is a hole.
    - A segment goes to the low end of the newest hole it fits, not of the tightest. (12 MiB went to a 16 MiB
      hole while an older one of exactly 12 MiB was free.) Only then is a new chunk reserved.
    - The code of cuBLAS takes 30 MiB when it is first used.

    Chosen among fourteen variants as the one that fits 159 runs on an H200 (CUDA 13) best: 146 of them had exactly
    this allocated peak in their last step. Nothing was recorded of cudaFree: a released segment is the newest hole.
    """

    _CHUNK_BYTES = 32 * MIB
    _CUBLAS_CODE_BYTES = 30 * MIB

    def __init__(self) -> None:
        self._lowest = _BASE_ADDRESS
        self._holes: list[tuple[int, int]] = []
        self._has_cublas = False

    def place(self, size: int) -> int:
        for i in range(len(self._holes) - 1, -1, -1):
            address, hole_bytes = self._holes[i]
            if hole_bytes > size:
                self._holes[i] = (address + size, hole_bytes - size)
                return address
            if hole_bytes == size:
                del self._holes[i]
                return address
        return self._reserve(size)

    def release(self, address: int, size: int) -> None:
        for hole in list(self._holes):
            if hole[0] + hole[1] == address:
                address, size = hole[0], hole[1] + size
                self._holes.remove(hole)
            elif address + size == hole[0]:
                size += hole[1]
                self._holes.remove(hole)
        self._holes.append((address, size))

    def on_event(self, event: DriverEvent) -> None:
        if event == "cublas_loaded" and not self._has_cublas:
            self._has_cublas = True
            self.place(self._CUBLAS_CODE_BYTES)

    def _reserve(self, size: int) -> int:
        chunk_bytes = -(-size // self._CHUNK_BYTES) * self._CHUNK_BYTES
        self._lowest -= chunk_bytes
        if chunk_bytes > size:
            self._holes.append((self._lowest + size, chunk_bytes - size))
        return self._lowest


class AlternatingPlacement(FreshPlacement):
    """A fresh process whose weights come to lie in two ranges, by turns that only the seed decides.

    While a model is loaded, the host memory of weights already copied becomes free, and the driver puts chunks there
    too; which ones differs from run to run. It shows where weights are let go one by one, as shards are cut.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._above = _BASE_ADDRESS + TIB
        self._is_loading = True

    def on_event(self, event: DriverEvent) -> None:
        super().on_event(event)
        self._is_loading = self._is_loading and event != "model_loaded"

    def _reserve(self, size: int) -> int:
        if not self._is_loading or self._random.random() < 0.5:
            return super()._reserve(size)
        lowest, self._lowest = self._lowest, self._above
        address = super()._reserve(size)
        self._above, self._lowest = self._lowest, lowest
        return address


class UsedProcessPlacement(FreshPlacement):
    """What 21 recorded processes on an H200 (CUDA 13) did, which used the GPU before they loaded a model.

    Chunks and holes as in a fresh process, and besides:
    - The oldest reservation, of 512 MiB, lies above all chunks. While the model is loaded it has two holes:
      2 MiB, where the first segment of the process goes, and 24 MiB. With the first kernel 414 MiB more
      become free there: the oldest hole, filled upwards whenever no newer one fits.
    - Code takes space too: the first kernel's the newest hole, the first cuBLAS handle's 2 MiB of the newest
      hole and 30 MiB of a new chunk. Every cuBLAS handle takes 64 MiB.

    Not modelled, since it differs from run to run: while a model loads, chunks alternate between two ranges
    as the host memory of its weights becomes free, and code of further kernels takes 2 to 10 MiB, mostly of
    the oldest reservation.
    """

    _OLDEST_RESERVATION = _BASE_ADDRESS + TIB
    _FREE_AT_START = ((488 * MIB, 24 * MIB), (414 * MIB, 2 * MIB))
    _FREE_ONCE_LOADED_BYTES = 410 * MIB  # 414, less what further kernels take at the least
    _CUBLAS_SHARED_CODE_BYTES = 2 * MIB
    _CUBLAS_HANDLE_BYTES = 64 * MIB

    def __init__(self) -> None:
        super().__init__()
        self._holes = [(self._OLDEST_RESERVATION + at, size) for at, size in self._FREE_AT_START]
        self._is_loaded = False

    def on_event(self, event: DriverEvent) -> None:
        if event == "cublas_loaded":
            self._load_cublas()
        elif not self._is_loaded:
            self._is_loaded = True
            del self._holes[-1:]
            self._holes.insert(0, (self._OLDEST_RESERVATION, self._FREE_ONCE_LOADED_BYTES))

    def _load_cublas(self) -> None:
        if not self._has_cublas:
            self._has_cublas = True
            if len(self._holes) > 1 and self._holes[-1][1] > self._CUBLAS_SHARED_CODE_BYTES:
                self.place(self._CUBLAS_SHARED_CODE_BYTES)
            self._reserve(self._CUBLAS_CODE_BYTES)
        self.place(self._CUBLAS_HANDLE_BYTES)
