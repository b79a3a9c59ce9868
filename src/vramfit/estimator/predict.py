"""`estimate`: the memory and the time that a workload takes, phase by phase, and why.

`advise` predicts single changes to find the one that saves most; `estimate_evaluation` predicts evaluation batches that
run after training steps in the same process.
"""

from dataclasses import dataclass, replace
from typing import Any

from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.replay import PhasePeaks, ReplayResult
from vramfit.cuda.kernels.script import CudaProfile
from vramfit.devices.catalogue import GPU
from vramfit.errors import VramfitError
from vramfit.estimator.contents import contents_at_peak, make_snapshot
from vramfit.estimator.peaks import peak_requested, predict_peaks
from vramfit.estimator.resolve import UNMASKED_NOTE, Target, resolve_workload
from vramfit.estimator.traced import (
    NUM_STEADY_STEPS,
    TracedWorkload,
    collection_paused,
    depends_on_headroom,
    headrooms_of,
)
from vramfit.records.estimate import Advice, Estimate, PeakMoment, PhaseEstimate, TimeBasis
from vramfit.records.measurement import REFERENCE
from vramfit.records.stream import Origin, Stream, StreamMark, Work
from vramfit.settings import KINDS, SETTINGS, find
from vramfit.timing.model import StepTime, speed_of, time_step, with_host_step
from vramfit.timing.speed import Links
from vramfit.trace.template import RECORDING_STREAM, StreamTemplate, order_of, recording_workspaces, rounds_of
from vramfit.workload import Workload

TALK = "talk between GPUs"
GROUP_S = 1.2e-3
"""What the host spends on a group of shards in a pass: FSDP2's hooks in Python, four of them, and three votes. Not
measured."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A step's time and how it was found."""

    step: StepTime
    basis: TimeBasis
    notes: tuple[str, ...]


def work_of(template: StreamTemplate, workload: Workload, micro_batch: int, num_passes: int | None = None) -> Work:
    """The work of one steady step: every micro-batch, the last of them smaller where the batch does not divide.

    Args:
        num_passes: of a step of so many whole passes; None for the workload's own.
    """
    num_more, last = (num_passes or workload.num_passes) - 1, micro_batch
    if num_passes is None and num_more and workload.micro_batch == micro_batch:
        last = workload.share - num_more * micro_batch
    parts = []
    num_smaller = int(last < micro_batch)
    for kind, before, after in rounds_of(workload):
        parts.append((micro_batch, f"steady.{kind}0", 1))
        if workload.trains:
            further = f"steady.{kind}1"
            parts += [(micro_batch, further, num_more - num_smaller), (last, further, num_smaller)]
        parts += [(micro_batch, f"steady.{name}", 1) for name in (*before, *after)]
    if workload.trains:
        parts.append((micro_batch, "steady.optimizer", 1))
    works = [template.work_at(size, [(name, count)]) for size, name, count in parts if count > 0]
    segments = tuple(segment for work in works for segment in work.segments)
    return Work(segments=segments, tf32=workload.has_tf32)


def has_rates(gpu: GPU) -> bool:
    """Whether a GPU's rates are known, so that steps can be timed."""
    return speed_of(gpu)[0] is not None


def time_workload(
    template: StreamTemplate, workload: Workload, micro_batch: int, target: Target, num_passes: int | None = None
) -> Timed | None:
    """Seconds of a steady step; None without a GPU, or for one whose rates are not known.

    Args:
        num_passes: as for `work_of`.
    """
    if target.gpu is None:
        return None
    speed, notes = speed_of(target.gpu)
    if speed is None:
        return None
    work = work_of(template, workload, micro_batch, num_passes)
    step, num_passes = time_step(work, speed, replays=workload.captures_graphs), num_passes or workload.num_passes
    if template.num_host_weights:
        step = with_host_step(step, template.num_host_weights, num_passes, speed, streams=template.streams_step)
    if workload.num_gpus > 1:
        links = Links.of(target.gpu, workload.num_gpus, workload.num_nodes)
        step, notes = _with_talk(step, template, num_passes, links), (*notes, links.in_words())
    return Timed(step, speed.basis, notes)


def _with_talk(step: StepTime, template: StreamTemplate, num_passes: int, links: Links) -> StepTime:
    """Replicas add up their gradients after the last pass; shards gather while they compute, twice a pass."""
    if not template.gathered_bytes:
        talk_s = links.add_up_s(template.gradient_bytes)
        seconds = step.seconds + talk_s
    else:
        gathers_s = 2 * num_passes * links.gather_s(template.gathered_bytes)
        talk_s = gathers_s + links.gather_s(template.gradient_bytes)
        hooks_s = GROUP_S * template.num_gathers * num_passes
        seconds = max(step.seconds, step.host_s + hooks_s, talk_s)
    return StepTime(seconds=seconds, host_s=step.host_s, device_s={**step.device_s, TALK: talk_s})


def reference_work(gpu: str | None) -> Work:
    """What the reference step of a calibration does on a GPU of the catalogue."""
    given = {name: getattr(REFERENCE, name) for name in SETTINGS if name not in ("model", "gpu")}
    traced, _ = resolve_workload(REFERENCE.model, {**given, "gpu": gpu})
    return work_of(traced.template(REFERENCE.batch), traced.workload, REFERENCE.batch)


def estimate(model: Any, **keywords: Any) -> Estimate:
    """Predict what a workload takes on a GPU, without the GPU and without weights.

    Args:
        model: a catalogue name, a folder with config.json, a hub id, a configuration or an `nn.Module`.
        **keywords: fields of `Workload` (task, mode, batch, seq, precision, gpu, memory, …) and
            `trust_remote_code`. Without `mask`, padded batches or those without padding: whichever take more.

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
    if target.compares_masks:
        traced = _with_larger_mask(traced, micro_batch)
        if traced.workload.mask == "ones":
            target = replace(target, notes=(*target.notes, UNMASKED_NOTE))
    template = traced.template(micro_batch)  # looked up once: a module of the user's is traced anew each time
    cold = template.instantiate(micro_batch, order_of(traced.workload, NUM_STEADY_STEPS, micro_batch))
    if depends_on_headroom(traced.workload):
        traced = replace(traced, headrooms=headrooms_of(cold, traced.options))
        template = traced.template(micro_batch)
        cold = template.instantiate(micro_batch, order_of(traced.workload, NUM_STEADY_STEPS, micro_batch))
    timed = time_workload(template, traced.workload, micro_batch, target)
    workload = _workload_at(traced.workload, micro_batch)
    return estimate_stream(
        workload, traced.options, target, cold, timed, host_bytes=template.host_bytes_at(micro_batch)
    )


def _with_larger_mask(traced: TracedWorkload, micro_batch: int) -> TracedWorkload:
    """The workload with or without padding, whichever asks for more."""
    both = [replace(traced, workload=replace(traced.workload, mask=mask)) for mask in ("ones", "padded")]
    return max(both, key=lambda each: peak_requested(each.stream(micro_batch, num_steady=1)))


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
    outcome = predict_peaks(cold, options, target.capacity_bytes)
    stream, likely = outcome.stream, outcome.likely
    shown = [p for p in likely.phases if p.name.startswith(phase or "steady_step")]
    top = max(shown if phase is not None else likely.phases, key=lambda p: p.peak_allocated_bytes)
    seen = contents_at_peak(
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


MIN_SAVED_SHARE = 0.005
"""Changes that save less than this share of the peak are not worth a line."""


def advise(model: Any, **keywords: Any) -> list[Advice]:
    """Single changes that lower the allocated peak, most saved first.

    Args:
        model, **keywords: as for `estimate`.

    Raises:
        VramfitError: whatever `estimate` raises for the workload itself.
    """
    now = estimate(model, **keywords)
    found = []
    for changed in (change for setting in SETTINGS.values() for change in setting.advised(now)):
        techniques = {name: t for name, value in changed.items() if (t := find(name, value)) is not None}
        try:
            then = estimate(model, **{**keywords, **changed})
        except VramfitError:
            continue  # this model or GPU does not have it
        saved = now.peak_allocated_bytes - then.peak_allocated_bytes
        if saved >= MIN_SAVED_SHARE * now.peak_allocated_bytes:
            found.append(
                Advice(
                    change=", ".join(f"{name} {changed[name]}" for name in techniques),
                    kind=max((t.kind for t in techniques.values()), key=KINDS.index),
                    saved_bytes=saved,
                    peak_allocated_bytes=then.peak_allocated_bytes,
                    fits=then.fits,
                )
            )
    return sorted(found, key=lambda a: -a.saved_bytes)


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
