"""An evaluation beside the training state: its batches come when training has left weights, state and a used cache."""

from dataclasses import replace

from vramfit.cuda.profile import CudaProfile
from vramfit.estimator.predict import estimate_stream
from vramfit.estimator.target import Target
from vramfit.estimator.timing import time_workload
from vramfit.estimator.traced import TracedWorkload
from vramfit.records.estimate import Estimate
from vramfit.records.stream import Origin, Stream, StreamMark
from vramfit.trace.captured import RECORDING_STREAM, recording_workspaces

PHASE = "evaluation"
ORDER = (("inputs", PHASE), ("first.micro0", None), ("steady.micro0", None))
"""Two batches; the weights are there already."""


def estimate_evaluation(training: Stream, evaluation: TracedWorkload, target: Target, batch: int) -> Estimate:
    """What evaluation batches take after training steps, in the same process.

    Args:
        training: the steps before.
        evaluation: an inference of the same model.
        batch: samples a batch.
    """
    template = evaluation.template(batch)
    stream = after(training, template.instantiate(batch, ORDER))
    timed = time_workload(template, evaluation.workload, batch, target)
    workload = evaluation.workload.with_batch(batch)
    return estimate_stream(workload, evaluation.options, target, stream, timed, phase=PHASE)


def evaluation_stream(training: Stream, evaluation: TracedWorkload, batch: int) -> Stream:
    """Training steps, and evaluation batches after them."""
    return after(training, evaluation.template(batch).instantiate(batch, ORDER))


def after_recorded(training: Stream, profile: CudaProfile) -> Stream:
    """Training steps whose passes were recorded, when these have been let go of, and all that was cached with them:
    workspaces of their stream stay."""
    sizes = recording_workspaces(profile)
    numbers = range(training.num_requests, training.num_requests + len(sizes))
    return replace(
        training,
        events=[*training.events, *sizes],
        request_origins=[*training.request_origins, *[len(training.origins)] * len(sizes)],
        origins=[*training.origins, Origin("cublas_workspace", "", "optimizer")],
        marks=[*training.marks, StreamMark(len(training.events), "empty_cache", "")],
        request_streams=training.request_streams | dict.fromkeys(numbers, RECORDING_STREAM),
    )


def after(first: Stream, second: Stream) -> Stream:
    """One stream after another in a process: what the first has not freed stays.

    cuBLAS has its workspaces by then, so that the second does not ask for them again.
    """
    events = list(first.events)
    request_origins = list(first.request_origins)
    moved_to: list[int] = []
    number: dict[int, int] = {}
    request = 0
    for event in second.events:
        moved_to.append(len(events))
        if event <= 0:
            if -event in number:
                events.append(-number[-event])
            continue
        origin = second.request_origins[request]
        if not second.origins[origin].operator.endswith("_workspace"):
            number[request] = len(request_origins)
            request_origins.append(len(first.origins) + origin)
            events.append(event)
        request += 1
    moved_to.append(len(events))
    return Stream(
        events=events,
        request_origins=request_origins,
        origins=[*first.origins, *second.origins],
        marks=[*first.marks, *(replace(m, index=moved_to[m.index]) for m in second.marks if m.kind == "phase")],
        parts=[*first.parts, *((moved_to[index], part) for index, part in second.parts)],
        request_streams=first.request_streams
        | {number[request]: cuda_stream for request, cuda_stream in second.request_streams.items()},
    )
