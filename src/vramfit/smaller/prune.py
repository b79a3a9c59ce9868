"""`prune`: a model with fewer layers and fewer neurons in each, chosen by what its answers on real rows lose least."""

import statistics
from dataclasses import dataclass, replace

from vramfit.errors import VramfitError
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.device import RunDevice
from vramfit.runtime.trained import TrainedModel
from vramfit.smaller.comparison import time_alone
from vramfit.smaller.folder import fresh_folder
from vramfit.smaller.neurons import BATCH_ROWS, NUM_ROWS
from vramfit.smaller.rows import answers, difference, make_samples
from vramfit.smaller.shapes import Latencies, Measure, PruneTarget, Shape, ShapeSearch
from vramfit.smaller.sizes import sizes_of
from vramfit.smaller.source import Reduced, Reduction, load_answering, write_as_saved

NUM_TRIED = 64
"""Of the rows that importance is measured on, those on which numbers of layers are tried beside each other."""
MAX_DIFFERENCE = 1e-4
"""Between the answers of the folder that was written and of the model with masks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRequest(Reduction):
    """What is to be pruned; importance is measured on the rows."""

    target: PruneTarget


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneReport(Reduced):
    """What came of it."""

    task: str
    shape: Shape
    tried: tuple[Shape, ...]
    """All that were compared, the chosen one too."""
    latency: Latencies | None = None


def measure_latency(trained: TrainedModel, samples: Samples) -> float:
    """As `compare` measures it."""
    run_device = RunDevice(None)
    inference = trained.load(run_device, samples, batch=1, **trained.suited(run_device))
    return statistics.median(time_alone(inference, samples))


def prune(request: PruneRequest, *, measure: Measure = measure_latency) -> PruneReport:
    """Write a model with fewer layers and neurons, as a folder without masks.

    Args:
        measure: gives latencies, for a target in latency.

    Raises:
        WorkloadError: a family that cannot be pruned, or a target that it cannot reach.
        DataError: data that cannot be read, or has no texts.
        CheckpointError, UnknownModel: no model there, or no tokenizer.
        VramfitError: the output is there already, or what was written answers otherwise than the masked model.
    """
    trained, rows = request.open()
    references = rows.first(request.max_rows or NUM_ROWS)
    model = load_answering(trained)
    before = sizes_of(trained, model)
    samples, few = (make_samples(some, trained) for some in (references, references[:NUM_TRIED]))
    search = ShapeSearch(model, trained, samples, few, request.target.heads)
    latency = None
    if request.target.latency_s is None:
        shape, tried = search.find(request.target)
    else:
        shape, tried, latency = search.find_fast(request.target, request.target.latency_s, measure)
    expected = search.masked_answers(shape)
    with fresh_folder(request.output) as folder:
        search.cut(model, shape)
        write_as_saved(model, trained, folder)
        smaller = replace(trained, model=str(folder))
        model = load_answering(smaller)
        found = max(difference(a, b) for a, b in zip(expected, answers(model, search.few, BATCH_ROWS), strict=True))
        if not found <= MAX_DIFFERENCE:
            raise VramfitError(
                f"the folder answers otherwise than the model with masks, by up to {found:.3g}",
                hint="nothing was written; please report the family: this is a bug in vramfit",
            )
        after = sizes_of(smaller, model)
    return PruneReport(
        model=trained.model,
        task=trained.task,
        output=str(request.output),
        num_rows=len(search.samples),
        shape=shape,
        tried=tried,
        max_difference=found,
        before=before,
        after=after,
        latency=latency,
    )
