"""The comparison of all vectors of a step, traced by itself: what it asks for depends on the texts of the whole step.

Passes are traced once for every micro-batch, with nothing but a sum in place of the comparison. `trace_comparison` then
puts the comparison of a real number of vectors into that template.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vramfit.cuda.autocast import Autocast
from vramfit.cuda.dialect import Dialect
from vramfit.models.build import build_for
from vramfit.models.resolve import ResolvedModel
from vramfit.records.stream import Origin
from vramfit.step.joint import END, LOSS, ROOM, JointPasses
from vramfit.step.ranks import Alone
from vramfit.step.step import Step
from vramfit.tasks import find_task
from vramfit.tasks.parts.losses import HeadLoss, head_loss
from vramfit.techniques.application import apply
from vramfit.trace.ledger import Places
from vramfit.trace.template import STEPS, Entry, Request, StreamTemplate
from vramfit.trace.tracer import Tracer
from vramfit.workload import Workload


def joint_loss(model: torch.nn.Module, workload: Workload, num_texts: int) -> HeadLoss:
    """The loss of a step of so many texts, without data."""
    return head_loss(model, find_task(workload.task).meta_labels(model, num_texts, 0, "meta"), workload.task)


def on_paper(loss: HeadLoss) -> HeadLoss:
    """The same with a sum in place of the comparison."""
    assert loss.joint is not None
    return replace(loss, joint=replace(loss.joint, labels={}, of_vectors=lambda vectors, labels: vectors.sum()))


def is_of_comparison(segment: str) -> bool:
    """Whether a segment is written by `trace_comparison`."""
    return segment.rpartition(".")[2] in (ROOM, LOSS, END)


@torch.inference_mode(False)
def trace_comparison(
    resolved: ResolvedModel, workload: Workload, template: StreamTemplate, num_texts: int
) -> StreamTemplate:
    """A template whose passes were traced, with the comparison of so many vectors."""
    model = build_for(resolved, workload)
    apply(model, workload)
    loss = joint_loss(model, workload, num_texts)
    made = StreamTemplate(
        profile=template.profile, probe=None, origins=list(template.origins), next_id=template.next_id
    )
    nothing = torch.nn.Linear(1, 1, device="meta")
    tracer = Tracer(made, Places(nothing), mask_has_padding=False)
    tracer.workspaces_are_there()
    step = Step(nothing, torch.optim.SGD(nothing.parameters(), lr=0.0), ranks=Alone())
    step.place = torch.Tensor.clone
    with tracer, Dialect(template.profile, Autocast(None, keeps_copies=False)):
        for name in STEPS:
            step.on_part = partial(_begin, tracer, name)
            passes = JointPasses(step, (), loss, 0)
            passes.embed()
            passes.compare()
            passes.end()
    tracer.begin("end", "end")
    first = f"{STEPS[0]}.micro0"
    passes_left = _without_workspaces(template.segments[first], tracer.workspaces, made.origins)
    return replace(
        template,
        segments={**template.segments, **_own(made.segments), first: passes_left},
        work={**template.work, **_own(made.work)},
        origins=made.origins,
        next_id=made.next_id,
    )


def _begin(tracer: Tracer, step: str, part: str, segment: int | str) -> None:
    tracer.begin(f"{step}.{segment}", part)


def _own(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if is_of_comparison(name)}


def _without_workspaces(entries: list[Entry], taken: set[Origin], origins: list[Origin]) -> list[Entry]:
    """The entries of a pass whose workspaces a comparison before it has taken."""
    left: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Request) and origins[entry.origin] in taken:
            left.pop()  # what the driver notices of it
        else:
            left.append(entry)
    return left
