"""What a step of a traced workload does, and how long it takes on the target."""

from dataclasses import dataclass

from vramfit.devices.catalogue import GPU
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.target import Target
from vramfit.records.estimate import TimeBasis
from vramfit.records.measurement import REFERENCE
from vramfit.records.stream import Work
from vramfit.settings import SETTINGS
from vramfit.timing.model import StepTime, time_step, with_host_step
from vramfit.timing.profile import speed_of
from vramfit.timing.speed import Links
from vramfit.trace.template import StreamTemplate, rounds_of
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


def work_of(template: StreamTemplate, workload: Workload, micro_batch: int) -> Work:
    """The work of one steady step: every micro-batch, the last of them smaller where the batch does not divide."""
    num_more, last = workload.num_passes - 1, micro_batch
    if num_more and workload.micro_batch == micro_batch:
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


def time_workload(template: StreamTemplate, workload: Workload, micro_batch: int, target: Target) -> Timed | None:
    """Seconds of a steady step; None without a GPU, or for one whose rates are not known."""
    if target.gpu is None:
        return None
    speed, notes = speed_of(target.gpu)
    if speed is None:
        return None
    step = time_step(work_of(template, workload, micro_batch), speed, replays=workload.captures_graphs)
    if template.num_host_weights:
        num, passes = template.num_host_weights, workload.num_passes
        step = with_host_step(step, num, passes, speed, streams=template.streams_step)
    if workload.num_gpus > 1:
        links = Links.of(target.gpu, workload.num_gpus, workload.num_nodes)
        step, notes = _with_talk(step, template, workload, links), (*notes, links.in_words())
    return Timed(step, speed.basis, notes)


def _with_talk(step: StepTime, template: StreamTemplate, workload: Workload, links: Links) -> StepTime:
    """Replicas add up their gradients after the last pass; shards gather while they compute, twice a pass."""
    if not template.gathered_bytes:
        talk_s = links.add_up_s(template.gradient_bytes)
        seconds = step.seconds + talk_s
    else:
        gathers_s = 2 * workload.num_passes * links.gather_s(template.gathered_bytes)
        talk_s = gathers_s + links.gather_s(template.gradient_bytes)
        hooks_s = GROUP_S * template.num_gathers * workload.num_passes
        seconds = max(step.seconds, step.host_s + hooks_s, talk_s)
    return StepTime(seconds=seconds, host_s=step.host_s, device_s={**step.device_s, TALK: talk_s})


def reference_work(gpu: str | None) -> Work:
    """What the reference step of a calibration does on a GPU of the catalogue."""
    given = {name: getattr(REFERENCE, name) for name in SETTINGS if name not in ("model", "gpu")}
    traced, _ = resolve_workload(REFERENCE.model, {**given, "gpu": gpu})
    return work_of(traced.template(REFERENCE.batch), traced.workload, REFERENCE.batch)
