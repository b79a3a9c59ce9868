"""`fit_grid`: one job at many batches and lengths; only what is needed to say what fits."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from vramfit.estimator.collecting import collection_paused
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.weighing import weigh
from vramfit.models.anatomy import max_positions
from vramfit.models.resolve import resolve
from vramfit.records.estimate import FitGrid
from vramfit.workload import Workload

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
                outcome = weigh(traced.stream(batch), traced.options, capacity)
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
    return {**given, "batch": workload.accumulate or 1}


def around(stops: Sequence[int], here: int, count: int) -> list[int]:
    """So many stops about a place, the place among them, as many below as above where there are.

    >>> around([1, 2, 4, 8, 16, 32, 64], 6, 5)
    [2, 4, 6, 8, 16]
    """
    all_stops = sorted({*stops, here})
    begin = max(min(all_stops.index(here) - count // 2, len(all_stops) - count), 0)
    return all_stops[begin : begin + count]
