"""What memory contains at the peak: the blocks that are live, what each is for, and the timeline of the step."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from vramfit.allocator.caching import CachingAllocator
from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.placement import FreshPlacement, Placement
from vramfit.allocator.pool import Block
from vramfit.records.estimate import CATEGORIES, Category, TensorGroup, TimelinePoint
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


NUM_TIMELINE_POINTS = 96
OF_RANKS: dict[str, Category] = {
    "ddp_bucket": "gradients",
    "reduce_scatter": "gradients",
    "sharded_gradient": "gradients",
    "chunk_cat": "temporaries",
    "split_with_sizes_copy": "temporaries",
    "all_gather": "weights",
    "gathered": "weights",
}
"""What one rank of several holds whatever the part: buckets of gradients, layers that were gathered."""
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block that is held at the peak."""

    origin: Origin
    category: Category
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The blocks that are live at the peak, and memory over the steady step."""

    live: list[LiveBlock]
    timeline: tuple[TimelinePoint, ...]

    def breakdown(self) -> dict[str, int]:
        """Category → bytes at the peak, every category named."""
        totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for block in self.live:
            totals[block.category] += block.allocated_bytes
        return totals

    def modules(self) -> dict[str, int]:
        """Module path → bytes at the peak, largest first."""
        totals: dict[str, int] = defaultdict(int)
        for block in self.live:
            totals[block.origin.module] += block.allocated_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def groups(self) -> tuple[TensorGroup, ...]:
        """Like blocks together, largest first."""
        found: dict[tuple[Category, str, str], list[int]] = defaultdict(list)
        for block in self.live:
            module = _LAYER_NUMBER.sub(".*", block.origin.module)
            found[block.category, block.origin.operator, module].append(block.allocated_bytes)
        groups = [
            TensorGroup(
                category=category, operator=operator, module=module, num_blocks=len(sizes), allocated_bytes=sum(sizes)
            )
            for (category, operator, module), sizes in found.items()
        ]
        return tuple(sorted(groups, key=lambda g: -g.allocated_bytes))


def contents_at_peak(
    stream: Stream,
    peak_index: int,
    steady: tuple[int, int],
    options: AllocatorOptions,
    capacity_bytes: int | None = None,
    placement: Placement | None = None,
) -> Contents:
    """Replay a stream once more and note what is live at its peak.

    Args:
        peak_index: the event at which the allocated peak occurs.
        steady: first and last event of the steady step, for the timeline.
        options, capacity_bytes, placement: of the replay whose peak it is.
    """
    allocator = CachingAllocator(capacity_bytes, options, placement)
    others = [m for m in stream.marks if m.kind != "phase"]
    held: list[Block] = []
    live: dict[int, Block] = {}
    sizes_at_peak: dict[int, int] = {}
    at_begin: dict[int, int] = {}
    changes: list[tuple[int, int]] = []
    begin, end = steady
    for index, event in enumerate(stream.events[: max(end, peak_index + 1)]):
        while others and others[0].index == index:
            mark = others.pop(0)
            if mark.kind == "driver":
                allocator.placement.on_event(mark.name)  # type: ignore[arg-type]
            else:
                allocator.empty_cache()
        if index == begin:
            at_begin = {request: block.size for request, block in live.items()}
        if event > 0:
            block = allocator.malloc(event, stream.request_streams.get(len(held), 0))
            request, change = len(held), block.size
            live[request] = block
            held.append(block)
        else:
            block = live.pop(-event)
            request, change = -event, -block.size
            allocator.free(block)
        if index == peak_index:
            sizes_at_peak = {request: block.size for request, block in live.items()}
        if begin <= index < end:
            changes.append((request, change))
    categories = _Categories(stream)
    blocks = [
        LiveBlock(stream.origins[stream.request_origins[request]], categories.of(request), size)
        for request, size in sizes_at_peak.items()
    ]
    return Contents(blocks, tuple(_timeline(stream, begin, at_begin, changes, categories)))


class _Categories:
    """What a block is: by the part that asked for it, and whether it outlives that part."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._part_begins = [index for index, _ in stream.parts]
        self._requested_at: list[int] = []
        self._freed_at: dict[int, int] = {}
        for index, event in enumerate(stream.events):
            if event > 0:
                self._requested_at.append(index)
            else:
                self._freed_at[-event] = index
        self._infers = not any(part == "backward" for _, part in stream.parts)
        self._known: dict[int, Category] = {}

    def of(self, request: int) -> Category:
        """The category of a request's block."""
        category = self._known.get(request)
        if category is None:
            category = self._known[request] = self._find(request)
        return category

    def _find(self, request: int) -> Category:
        origin = self._stream.origins[self._stream.request_origins[request]]
        if origin.operator in OF_RANKS:
            return OF_RANKS[origin.operator]
        if origin.part == "load":
            return "weights"
        if origin.part == "inputs":
            return "inputs"
        if origin.operator.endswith("_workspace"):
            return "workspaces"
        if origin.part == "recompute":
            return "activations"
        survives = self._survives(request)
        if origin.part == "forward":
            return "activations" if survives or self._infers else "temporaries"
        if not survives:
            return "temporaries"
        return "optimizer" if origin.part == "optimizer" else "gradients"

    def _survives(self, request: int) -> bool:
        """Whether it is freed only after the part it was requested in."""
        freed_at = self._freed_at.get(request)
        if freed_at is None:
            return True
        following = bisect_right(self._part_begins, self._requested_at[request])
        return following < len(self._part_begins) and freed_at >= self._part_begins[following]


def _timeline(
    stream: Stream, begin: int, at_begin: dict[int, int], changes: list[tuple[int, int]], categories: _Categories
) -> Iterator[TimelinePoint]:
    """The step in equal stretches, each with its highest point and what is live then.

    Args:
        begin: the first event of the step.
        at_begin: request → bytes of the blocks that are live before it.
        changes: (request, bytes) of every event of the step, negative for a free.
    """
    totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for request, size in at_begin.items():
        totals[categories.of(request)] += size
    curve = list(accumulate((size for _, size in changes), initial=sum(at_begin.values())))[1:]
    asked = [event for event in stream.events if event > 0]
    requested, requested_then = sum(asked[request] for request in at_begin), 0
    num_points = min(NUM_TIMELINE_POINTS, len(curve))
    begins, parts = [index for index, _ in stream.parts], _parts_drawn(stream)
    edges = [i * len(curve) // num_points for i in range(num_points + 1)] if num_points else []
    for first, last in pairwise(edges):
        top = max(curve[first:last])
        shown: dict[str, int] = {}
        for index in range(first, last):
            request, size = changes[index]
            totals[categories.of(request)] += size
            requested += asked[request] if size > 0 else -asked[request]
            if not shown and curve[index] == top:
                shown = {category: total for category, total in totals.items() if total}
                requested_then = requested
        part = parts[bisect_right(begins, begin + first) - 1]
        yield TimelinePoint(part=part, allocated_bytes=top, requested_bytes=requested_then, breakdown=shown)


def _parts_drawn(stream: Stream) -> list[str]:
    """The parts as a reader knows them: what a pass drops between backward and the optimizer ends its backward."""
    parts = [part for _, part in stream.parts]
    return [
        "backward" if around == ("backward", "forward", "optimizer") else around[1]
        for around in zip(["", *parts], parts, [*parts[1:], ""], strict=False)
    ]
