"""The predicted stream in the form of `torch.cuda.memory._snapshot()`, for PyTorch's memory visualiser."""

from collections.abc import Callable
from typing import Any

from vramfit.allocator.caching import CachingAllocator
from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.placement import FreshPlacement
from vramfit.allocator.pool import Block
from vramfit.records.stream import Origin, Stream


def make_snapshot(stream: Stream, options: AllocatorOptions) -> dict[str, Any]:
    """A snapshot as torch 2.11 pickles it: requests, frees and segments as trace entries, and the final state."""
    entries: list[dict[str, Any]] = []
    placement = _Watched(lambda action, address, size: entries.append(_entry(action, address, size)))
    allocator = CachingAllocator(options=options, placement=placement)
    live: dict[int, tuple[Block, int]] = {}
    num_requests = 0
    emptied = {m.index for m in stream.marks if m.kind == "empty_cache"}
    for index, event in enumerate(stream.events):
        if index in emptied:
            allocator.empty_cache()
        if event > 0:
            before_bytes = allocator.reserved_bytes
            cuda_stream = stream.request_streams.get(num_requests, 0)
            block = allocator.malloc(event, cuda_stream)
            if options.expandable_segments and allocator.reserved_bytes > before_bytes:
                entries.append(_entry("segment_map", block.address, allocator.reserved_bytes - before_bytes))
            origin = stream.origins[stream.request_origins[num_requests]]
            entries.append(_entry("alloc", block.address, event, _frames(origin), cuda_stream))
            live[num_requests] = (block, event)
            num_requests += 1
        else:
            block, size = live.pop(-event)
            entries.extend(
                _entry(action, block.address, size, cuda_stream=block.pool.stream)
                for action in ("free_requested", "free_completed")
            )
            allocator.free(block)
    return {
        "segments": _segments(allocator, options.expandable_segments),
        "device_traces": [entries],
        "allocator_settings": {},
    }


class _Watched(FreshPlacement):
    """Tells of every segment that comes and goes."""

    def __init__(self, tell: Callable[[str, int, int], None]) -> None:
        super().__init__()
        self._tell = tell

    def place(self, size: int) -> int:
        address = super().place(size)
        self._tell("segment_alloc", address, size)
        return address

    def release(self, address: int, size: int) -> None:
        super().release(address, size)
        self._tell("segment_free", address, size)


def _entry(
    action: str, address: int, size: int, frames: list[dict[str, Any]] | None = None, cuda_stream: int = 0
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": cuda_stream,
        "device": 0,
        "time_us": 0,
        "frames": frames or [],
    }


def _frames(origin: Origin) -> list[dict[str, Any]]:
    """Innermost first, as the visualiser shows them: the operator, the module, the part of the step."""
    names = (origin.operator, origin.module, origin.part)
    return [{"filename": "", "line": 0, "name": name} for name in names if name]


def _segments(allocator: CachingAllocator, expandable: bool) -> list[dict[str, Any]]:
    return [
        {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": sum(b.size for b in segment.blocks if b.state == "used"),
            "active_size": sum(b.size for b in segment.blocks if b.state == "used"),
            "requested_size": sum(b.requested_bytes for b in segment.blocks),
            "stream": segment.stream,
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": expandable,
            "frames": [],
            "blocks": [
                {
                    "address": b.address,
                    "size": b.size,
                    "requested_size": b.requested_bytes,
                    "state": "active_allocated" if b.state == "used" else "inactive",
                    "frames": [],
                }
                for b in segment.blocks
            ],
        }
        for segment in allocator.segments()
    ]
