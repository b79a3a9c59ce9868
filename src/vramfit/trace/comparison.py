"""The comparison of all vectors of a step, traced by itself: what it asks for depends on the texts of the whole step.

Passes are traced once for every micro-batch, with nothing but a sum in place of the comparison. `trace_comparison` then
puts the comparison of a real number of vectors into that template.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.cuda.dialect import Autocast, Dialect
from vramfit.cuda.kernels.script import CudaProfile
from vramfit.models.resolve import ResolvedModel
from vramfit.records.stream import Origin, Stream
from vramfit.step.joint import END, LOSS, ROOM, JointPasses
from vramfit.step.plain import Batch, make_targets
from vramfit.step.splitting import Alone
from vramfit.step.step import Step
from vramfit.tasks import find_task
from vramfit.tasks.parts.joint import PLACES
from vramfit.tasks.parts.losses import HeadLoss, head_loss
from vramfit.techniques.application import build_prepared
from vramfit.trace.ledger import Places
from vramfit.trace.template import STEPS, Entry, Launch, Notice, Request, StreamTemplate, num_traced
from vramfit.trace.tracer import Tracer
from vramfit.workload import Workload

SEGMENTS = (ROOM, LOSS, END)
"""What `trace_comparison` writes, of each step."""


def loss_of_step(model: torch.nn.Module, workload: Workload, inputs: Batch, *, on_paper: bool) -> HeadLoss:
    """The loss of a step that compares texts, and whose micro-batches are all alike.

    Args:
        on_paper: whether nothing but a sum stands for a comparison; it does where passes are traced for any number.
    """
    num_texts, each = len(inputs[PLACES]) * num_traced(workload) * workload.num_gpus, workload.texts_per_sample
    loss = joint_loss(model, workload, -(-num_texts // each) * each)  # a row's most texts need be no whole samples
    return _on_paper(loss) if workload.runs_twice or on_paper else loss


def joint_loss(model: torch.nn.Module, workload: Workload, num_texts: int) -> HeadLoss:
    """The loss of a step of so many texts, without data; its labels wait on the host."""
    with _disable_current_modes():
        labels = find_task(workload.task).meta_labels(model, num_texts, 0, "meta")
        labels |= make_targets(model, workload.task, (num_texts, 0), "meta")
    return head_loss(model, labels, workload.task)


def _on_paper(loss: HeadLoss) -> HeadLoss:
    """The same with a sum in place of the comparison."""
    assert loss.joint is not None
    return replace(loss, joint=replace(loss.joint, labels={}, of_vectors=lambda vectors, labels: vectors.sum()))


def is_of_comparison(segment: str) -> bool:
    """Whether a segment is written by `trace_comparison`."""
    return segment.rpartition(".")[2] in SEGMENTS


def trace_comparison(
    resolved: ResolvedModel, workload: Workload, template: StreamTemplate, num_texts: int
) -> StreamTemplate:
    """A template whose passes were traced, with the comparison of so many vectors."""
    compared = _compare(resolved, workload, template.profile, num_texts)
    made, workspaces = compared.template, compared.workspaces
    origins = [*template.origins, *made.origins]
    first = f"{STEPS[0]}.micro0"
    segments = {**template.segments, first: _without(workspaces, template.segments[first], origins)}
    for name in SEGMENTS:
        entries = [_moved(entry, len(template.origins)) for entry in made.segments[f"{STEPS[1]}.{name}"]]
        segments[f"{STEPS[0]}.{name}"] = entries
        segments[f"{STEPS[1]}.{name}"] = _without(workspaces, entries, origins)
    work = {name: work for name, work in made.work.items() if is_of_comparison(name)}
    return replace(template, segments=segments, work={**template.work, **work}, origins=origins)


def vectors_bytes(resolved: ResolvedModel, workload: Workload) -> int:
    """What the vectors of all texts of a step and their gradients take: a comparison asks for more."""
    loss = joint_loss(build_prepared(resolved, workload), workload, workload.step_texts)
    assert loss.joint is not None
    return 2 * loss.joint.room(torch.device("meta")).nbytes


def compared_stream(resolved: ResolvedModel, workload: Workload, profile: CudaProfile) -> Stream:
    """What the comparison of a step asks for, whatever passes are like; weights are left out."""
    made = _compare(resolved, workload, profile, workload.step_texts).template
    return made.instantiate(1, [(f"{STEPS[1]}.{name}", None) for name in SEGMENTS])


def _compare(resolved: ResolvedModel, workload: Workload, profile: CudaProfile, num_texts: int) -> "_Compared":
    loss = joint_loss(build_prepared(resolved, workload), workload, num_texts)
    assert loss.joint is not None
    key = (workload.compared_by, loss.joint.width, num_texts, profile)
    compared = _kept.pop(key, None)
    if compared is None:
        compared = _trace_alone(loss, profile)
    _kept[key] = compared
    while len(_kept) > MAX_KEPT:
        _kept.popitem(last=False)
    return compared


@dataclass(frozen=True, slots=True)
class _Compared:
    """A comparison traced by itself: its blocks have numbers that no pass has."""

    template: StreamTemplate
    workspaces: set[Origin]
    """That it was the first to take."""


FIRST_ID = 2**40
MAX_KEPT = 8
_kept: OrderedDict[Any, _Compared] = OrderedDict()
"""What says how texts are compared, and how many → the comparison: it is the same whatever passes are like."""


@torch.inference_mode(False)
def _trace_alone(loss: HeadLoss, profile: CudaProfile) -> _Compared:
    made = StreamTemplate(profile=profile, probe=None, next_id=FIRST_ID)
    nothing = torch.nn.Linear(1, 1, device="meta")
    tracer = Tracer(made, Places(nothing))
    tracer.workspaces_are_there()
    step = Step(nothing, torch.optim.SGD(nothing.parameters(), lr=0.0), ranks=Alone())
    step.place = torch.Tensor.clone
    with tracer, Dialect(profile, Autocast(None, keeps_copies=False)):
        step.on_part = partial(_begin, tracer, STEPS[1])
        passes = JointPasses(step, (), loss, 0)
        passes.embed()
        tracer.values.forget_all()  # the room for vectors, which no pass has written into here
        passes.compare()
        passes.end()
        tracer.begin("end", "end")
    return _Compared(made, tracer.workspaces)


def _moved(entry: Entry, num_origins: int) -> Entry:
    """An entry beside those of a template that has so many origins."""
    if isinstance(entry, Request):
        return Request(entry.id, entry.size, entry.origin + num_origins, entry.cuda_stream)
    if isinstance(entry, Launch):
        return Launch(entry.call, entry.outputs, entry.origin + num_origins)
    return entry


def _begin(tracer: Tracer, step: str, part: str, segment: int | str) -> None:
    tracer.begin(f"{step}.{segment}", part)


def _without(workspaces: set[Origin], entries: list[Entry], origins: list[Origin]) -> list[Entry]:
    """What is asked for by who finds workspaces that the first comparison has taken."""
    left: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Request) and origins[entry.origin] in workspaces:
            if left and isinstance(left[-1], Notice):  # of it
                left.pop()
        else:
            left.append(entry)
    return left
