"""PyTorch's CUDA caching allocator, simulated: streams of requests in, peaks and segments out; no torch."""

from vramfit.allocator.caching import BlockState, CachingAllocator, Segment, SimulatedOutOfMemory
from vramfit.allocator.options import AllocatorOptionError, AllocatorOptions, CapacityKind
from vramfit.allocator.placement import (
    AscendingPlacement,
    DescendingPlacement,
    DriverEvent,
    FreshPlacement,
    Placement,
    ShuffledPlacement,
    UsedProcessPlacement,
)
from vramfit.allocator.pool import Block
from vramfit.allocator.replay import Mark, OutOfMemoryEvent, PhasePeaks, PlacementBounds, ReplayResult, bounds, replay

__all__ = [
    "AllocatorOptionError",
    "AllocatorOptions",
    "AscendingPlacement",
    "Block",
    "BlockState",
    "CachingAllocator",
    "CapacityKind",
    "DescendingPlacement",
    "DriverEvent",
    "FreshPlacement",
    "Mark",
    "OutOfMemoryEvent",
    "PhasePeaks",
    "Placement",
    "PlacementBounds",
    "ReplayResult",
    "Segment",
    "ShuffledPlacement",
    "SimulatedOutOfMemory",
    "UsedProcessPlacement",
    "bounds",
    "replay",
]
