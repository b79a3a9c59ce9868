"""`estimate`: what a workload takes, phase by phase, and why."""

from dataclasses import replace
from typing import Any

from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.replay import PhasePeaks, ReplayResult
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.target import Target
from vramfit.estimator.timing import Timed, time_workload
from vramfit.estimator.traced import NUM_STEADY_STEPS, TracedWorkload, collection_paused, rooms_of, steps_by_room
from vramfit.estimator.walk import make_snapshot, walk
from vramfit.estimator.weighing import weigh
from vramfit.records.estimate import Estimate, PeakMoment, PhaseEstimate
from vramfit.records.stream import Stream
from vramfit.trace.template import order_of
from vramfit.workload import Workload


def estimate(model: Any, **keywords: Any) -> Estimate:
    """Predict what a workload takes on a GPU, without the GPU and without weights.

    Args:
        model: a catalogue name, a folder with config.json, a hub id, a configuration or an `nn.Module`.
        **keywords: fields of `Workload` (task, mode, batch, seq, precision, gpu, memory, …) and
            `trust_remote_code`.

    Raises:
        WorkloadError: the keywords contradict each other, the model or the GPU; carries every problem.
        UnknownModel, UnknownGPU: no such name, with the nearest ones.
        TraceError: the model's forward depends on data; names the operator and the module.

    >>> estimate("bert-tiny", batch=8, seq=128, gpu="t4").fits
    True
    """
    with collection_paused():
        traced, target = resolve_workload(model, keywords)
        assert traced.workload.micro_batch is not None
        return estimate_at(traced, target, traced.workload.micro_batch)


def estimate_at(traced: TracedWorkload, target: Target, micro_batch: int) -> Estimate:
    """The estimate of a traced workload at a micro-batch."""
    template = traced.template(micro_batch)  # looked up once: a module of the user's is traced anew each time
    cold = template.instantiate(micro_batch, order_of(traced.workload, NUM_STEADY_STEPS, micro_batch))
    if steps_by_room(traced.workload):
        traced = replace(traced, rooms=rooms_of(cold, traced.options))
        template = traced.template(micro_batch)
        cold = template.instantiate(micro_batch, order_of(traced.workload, NUM_STEADY_STEPS, micro_batch))
    timed = time_workload(template, traced.workload, micro_batch, target)
    workload = _workload_at(traced.workload, micro_batch)
    return estimate_stream(
        workload, traced.options, target, cold, timed, host_bytes=template.host_bytes_at(micro_batch)
    )


def estimate_stream(
    workload: Workload,
    options: AllocatorOptions,
    target: Target,
    cold: Stream,
    timed: Timed | None,
    *,
    phase: str | None = None,
    host_bytes: int = 0,
) -> Estimate:
    """The estimate of a workload whose stream is known.

    Args:
        cold: the stream of a process that has not used cuBLAS before.
        phase: the phase whose peak and course are shown; None takes the highest, and the course of a steady step.
        host_bytes: what offloading holds in host memory.
    """
    outcome = weigh(cold, options, target.capacity_bytes)
    stream, likely = outcome.stream, outcome.likely
    shown = [p for p in likely.phases if p.name.startswith(phase or "steady_step")]
    top = max(shown if phase is not None else likely.phases, key=lambda p: p.peak_allocated_bytes)
    seen = walk(
        stream,
        top.allocated_peak_index,
        _stretch(likely, shown[0], stream),
        options,
        outcome.replayed_capacity_bytes,
        outcome.make_placement(),
    )
    request = _request_at(stream, top.allocated_peak_index)
    origin = stream.origins[stream.request_origins[request]]
    profile = target.profile
    host_fits = workload.host_memory is None or host_bytes <= workload.host_memory
    return Estimate(
        workload=workload,
        gpu=target.gpu.name if target.gpu is not None else None,
        compute_capability=profile.compute_capability,
        torch_version=target.torch_version,
        basis=target.basis,
        peak_requested_bytes=likely.peak_requested_bytes if phase is None else top.peak_requested_bytes,
        peak_allocated_bytes=top.peak_allocated_bytes,
        peak_reserved_bytes=likely.peak_reserved_bytes,
        peak_process_bytes=likely.peak_reserved_bytes + target.context_bytes,
        context_bytes=target.context_bytes,
        context_basis=target.context_basis,
        safe_reserved_bytes=outcome.safe_reserved_bytes,
        capacity_bytes=target.capacity_bytes,
        total_memory_bytes=target.gpu.total_memory_bytes if target.gpu is not None else None,
        fits=outcome.fits and host_fits,
        fits_cold=outcome.fits_cold and host_fits,
        num_retries=outcome.num_retries,
        phases=_phases(outcome.replays),
        peak=PeakMoment(
            phase="steady_step" if top.name.startswith("steady") else top.name,
            part=origin.part,
            module=origin.module,
            operator=origin.operator,
        ),
        breakdown=seen.breakdown(),
        modules=seen.modules(),
        groups=seen.groups(),
        timeline=seen.timeline,
        notes=(*target.notes, *(timed.notes if timed else ())),
        step_time_s=timed.step.seconds if timed else None,
        time_basis=timed.basis if timed else None,
        time_breakdown=timed.step.breakdown() if timed else {},
        host_bytes=host_bytes,
        snapshot=lambda: make_snapshot(stream, options),
    )


def _workload_at(workload: Workload, micro_batch: int) -> Workload:
    """The workload at a micro-batch; as it is where that is its own, which may not divide its batch."""
    if workload.micro_batch == micro_batch:
        return workload
    return workload.with_batch(micro_batch * workload.num_passes)


def _phases(replays: tuple[ReplayResult, ...]) -> dict[str, PhaseEstimate]:
    """Phases by name, each with the most it takes in any of the replays; the steady steps together."""
    named: dict[str, list[PhasePeaks]] = {}
    for phase in (phase for result in replays for phase in result.phases):
        named.setdefault("steady_step" if phase.name.startswith("steady_step") else phase.name, []).append(phase)
    return {
        name: PhaseEstimate(
            peak_requested_bytes=max(p.peak_requested_bytes for p in group),
            peak_allocated_bytes=max(p.peak_allocated_bytes for p in group),
            peak_reserved_bytes=max(p.cumulative_reserved_bytes for p in group),
        )
        for name, group in named.items()
    }


def _stretch(result: ReplayResult, phase: PhasePeaks, stream: Stream) -> tuple[int, int]:
    """First and last event of a phase."""
    later = [p.begin for p in result.phases if p.begin > phase.begin]
    return phase.begin, min(later, default=len(stream.events))


def _request_at(stream: Stream, index: int) -> int:
    """The number of the last request up to an event."""
    return max(sum(1 for event in stream.events[: index + 1] if event > 0) - 1, 0)
