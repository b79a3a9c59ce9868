"""`max_batch`: the largest batch that fits, knowing that fitting is not monotone in the batch."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from vramfit.allocator.replay import OutOfMemoryEvent
from vramfit.errors import WorkloadError
from vramfit.estimator.peaks import fails, peak_requested, predict_peaks, warm_stream
from vramfit.estimator.predict import estimate_at
from vramfit.estimator.resolve import Target, resolve_workload
from vramfit.estimator.traced import TracedWorkload, collection_paused
from vramfit.models.anatomy import max_positions
from vramfit.models.resolve import resolve
from vramfit.records.estimate import FitGrid, MaxBatch
from vramfit.records.stream import Stream
from vramfit.settings.sizes import fewest_samples
from vramfit.stages import tell
from vramfit.units import counted, format_bytes
from vramfit.workload import MAX_COUNT, SIZE_HINT, Workload

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SEQS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
NUM_BATCHES, NUM_SEQS = 9, 7


def fit_grid(workload: Workload, *, on_cell: Callable[[int, int], None] = lambda done, total: None) -> FitGrid:
    """What a job takes at batches and lengths around its own.

    Args:
        workload: the job; its settings are kept.
        on_cell: called with the cells that are done, and all of them.

    Raises:
        VramfitError: as `estimate` raises it, where the model is not to be found any more.
    """
    own = workload.micro_batch or workload.batch
    config = resolve(workload.model, task=workload.task).config
    longest = (max_positions(config) if config is not None else None) or SEQS[-1]
    batches = around(BATCHES, own, NUM_BATCHES)
    seqs = around([n for n in SEQS if n <= longest], workload.seq, NUM_SEQS)
    columns: list[list[tuple[int, bool | None]]] = []
    capacity: int | None = None
    with collection_paused():
        for seq in seqs:
            traced, target = resolve_workload(workload.model, {**_keywords(workload), "seq": seq})
            capacity = target.capacity_bytes
            columns.append([])
            for batch in batches:
                outcome = predict_peaks(traced.stream(batch), traced.options, capacity)
                columns[-1].append((outcome.safe_reserved_bytes, outcome.fits))
                on_cell(len(batches) * (len(columns) - 1) + len(columns[-1]), len(batches) * len(seqs))
    rows = range(len(batches))
    return FitGrid(
        micro_batches=tuple(batches),
        seqs=tuple(seqs),
        safe_reserved_bytes=tuple(tuple(column[i][0] for column in columns) for i in rows),
        fits=tuple(tuple(column[i][1] for column in columns) for i in rows),
        capacity_bytes=capacity,
    )


def _keywords(workload: Workload) -> dict[str, Any]:
    """The settings of a job, without its size."""
    left_out = ("model", "batch", "micro_batch", "seq", "lengths")
    given = {f.name: getattr(workload, f.name) for f in fields(workload) if f.name not in left_out}
    return {**given, "batch": workload.num_passes}


def around(stops: Sequence[int], here: int, count: int) -> list[int]:
    """So many stops about a place, the place among them, as many below as above where there are.

    >>> around([1, 2, 4, 8, 16, 32, 64], 6, 5)
    [2, 4, 6, 8, 16]
    """
    all_stops = sorted({*stops, here})
    begin = max(min(all_stops.index(here) - count // 2, len(all_stops) - count), 0)
    return all_stops[begin : begin + count]


MAX_MICRO_BATCH = 2**20
"""Beyond any use; the search stops here."""
RESOLUTION = 256
"""Large batches are searched in steps of 1/256 of their size."""
LARGE = 100
"""From so many samples on, a size counts only if the next smaller one fits too: near the edge, sizes that fit and
sizes that do not lie side by side, and a lone one that fits is not to be trusted for one percent of speed. Settled
knowing the 24 measured edges of benchmarks/results/batch_edges_h200_2026-11-15.json."""
NUM_LOOKED_BELOW = 4
"""Batches below the answer that are checked for fitting, to say where fragmentation bites."""


def max_batch(model: Any, **keywords: Any) -> MaxBatch:
    """The largest effective batch that fits the GPU or the memory given.

    What the tensors ask for grows with the batch and bounds it from above. From there down every batch is
    replayed inside the capacity until one fits wherever segments are put.

    Args:
        model, **keywords: as for `estimate`; `gpu` or `memory` is needed, `batch` is not used.

    Raises:
        WorkloadError: no capacity given, and whatever `estimate` raises.

    >>> max_batch("bert-tiny", seq=128, memory="300MiB").batch > 64
    True
    """
    keywords = {k: v for k, v in keywords.items() if k != "micro_batch"} | {"batch": fewest_samples(keywords)}
    with collection_paused():
        traced, target = resolve_workload(model, keywords)
        if target.capacity_bytes is None:
            raise WorkloadError(["max_batch needs a gpu or a memory size to fit into"], hint=SIZE_HINT)
        return _Search(traced, target, target.capacity_bytes).run()


class _Search:
    def __init__(self, traced: TracedWorkload, target: Target, capacity_bytes: int) -> None:
        self._traced = traced
        self._target = target
        self._capacity_bytes = capacity_bytes
        self._most = min(MAX_MICRO_BATCH, MAX_COUNT // traced.workload.num_passes)
        self._limit = f"nothing up to {self._most:,} samples"

    def run(self) -> MaxBatch:
        top = self._upper_bound()
        self.fits(top + 1)
        found = self._largest_fitting(top)
        limited_by = self._limit
        accumulate = self._traced.workload.num_passes
        below = [b for b in range(max(1, found - NUM_LOOKED_BELOW), found) if not self.fits(b)]
        cold = found
        while cold > 0 and not self.fits(cold, warm=False):
            cold -= max(1, cold // RESOLUTION)
        return MaxBatch(
            batch=found * accumulate,
            cold_batch=cold * accumulate,
            estimate=estimate_at(self._traced, self._target, max(found, 1)),
            limited_by=limited_by,
            not_fitting=tuple(b * accumulate for b in below),
        )

    def fits(self, micro_batch: int, *, warm: bool = True) -> bool:
        """Whether it runs inside the capacity under every placement."""
        if micro_batch > self._most:
            return False
        tell(f"trying {counted(micro_batch, 'sample')} a forward pass")
        stream = self._traced.stream(micro_batch)
        stream = warm_stream(stream) if warm else stream
        failure = fails(stream, self._traced.options, self._capacity_bytes)
        if failure is not None and warm:
            self._limit = self._describe(micro_batch, stream, failure)
        return failure is None

    def _largest_fitting(self, start: int) -> int:
        found = start
        while found > 0 and not (self.fits(found) and (found < LARGE or self.fits(found - 1))):
            found -= max(1, found // RESOLUTION)
        return found

    def _upper_bound(self) -> int:
        """The largest batch whose tensors alone would fit; these grow with the batch."""
        low, high = 0, 1
        while high <= self._most and self._requested(high) <= self._capacity_bytes:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._requested(middle) <= self._capacity_bytes else (low, middle)
        return min(low, self._most)

    def _requested(self, micro_batch: int) -> int:
        return peak_requested(self._traced.stream(micro_batch))

    def _describe(self, micro_batch: int, stream: Stream, failure: OutOfMemoryEvent) -> str:
        """In words: where a batch runs out."""
        num_requests = sum(1 for event in stream.events[: failure.index + 1] if event > 0)
        origin = stream.origins[stream.request_origins[num_requests - 1]]
        where = f"{origin.operator} in {origin.module}" if origin.module else origin.operator
        runs = "runs" if micro_batch == 1 else "run"
        return (
            f"{counted(micro_batch, 'sample')} a forward pass {runs} out in {origin.part} ({where}): "
            f"{format_bytes(failure.requested_bytes)} more, with {format_bytes(failure.allocated_bytes)} of "
            f"{format_bytes(self._capacity_bytes)} in use"
        )
