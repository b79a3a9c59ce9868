"""Device memory that is left to reserve: counts it, and refuses what passes the capacity."""

from typing import Literal

CapacityKind = Literal["allowed", "physical"]
"""Who refuses: PyTorch, by `set_per_process_memory_fraction` ("allowed"), or the driver ("physical")."""


class DeviceMemory:
    """Bytes reserved of a capacity, and their peak."""

    __slots__ = ("capacity_bytes", "kind", "peak_reserved_bytes", "reserved_bytes")

    def __init__(self, capacity_bytes: int | None, kind: CapacityKind) -> None:
        self.capacity_bytes = capacity_bytes
        self.kind = kind
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0

    def allows(self, size: int) -> bool:
        """Whether PyTorch goes to the driver at all for `size` bytes."""
        return self.kind == "physical" or self._has_room(size)

    def take(self, size: int) -> bool:
        """Reserve `size` bytes, unless the driver has not got them."""
        if self.kind == "physical" and not self._has_room(size):
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def give_back(self, size: int) -> None:
        self.reserved_bytes -= size

    def _has_room(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes
