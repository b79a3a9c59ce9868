"""The comparison of all vectors of a step, traced by itself: what it asks for depends on the texts of the whole step.

Passes are traced once for every micro-batch, with nothing but a sum in place of the comparison. `trace_comparison` then
puts the comparison of a real number of vectors into that template.
"""

from dataclasses import replace
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.cuda.autocast import Autocast
from vramfit.cuda.dialect import Dialect
from vramfit.models.build import build_for
from vramfit.models.resolve import ResolvedModel
from vramfit.records.stream import Origin
from vramfit.step.joint import END, LOSS, ROOM, JointPasses
from vramfit.step.plain import Batch
from vramfit.step.ranks import Alone
from vramfit.step.step import Step
from vramfit.tasks import find_task
from vramfit.tasks.parts.joint import PLACES
from vramfit.tasks.parts.losses import HeadLoss, head_loss
from vramfit.techniques.application import apply
from vramfit.trace.ledger import Places
from vramfit.trace.template import STEPS, Entry, Notice, Request, StreamTemplate, num_traced
from vramfit.trace.tracer import Tracer
from vramfit.workload import Workload

SEGMENTS = (ROOM, LOSS, END)
"""What `trace_comparison` writes, of each step."""


def loss_of_step(model: torch.nn.Module, workload: Workload, inputs: Batch, *, on_paper: bool) -> HeadLoss:
    """The loss of a step whose micro-batches are all alike.

    Args:
        on_paper: whether nothing but a sum stands for a comparison; it does where passes are traced for any number.
    """
    if not workload.is_joint:
        return head_loss(model, inputs, workload.task)
    num_texts, each = len(inputs[PLACES]) * num_traced(workload) * workload.num_gpus, workload.texts_per_sample
    loss = joint_loss(model, workload, -(-num_texts // each) * each)  # a row's most texts need be no whole samples
    return _on_paper(loss) if workload.runs_twice or on_paper else loss


def joint_loss(model: torch.nn.Module, workload: Workload, num_texts: int) -> HeadLoss:
    """The loss of a step of so many texts, without data; its labels wait on the host."""
    with _disable_current_modes():
        labels = find_task(workload.task).meta_labels(model, num_texts, 0, "meta")
    return head_loss(model, labels, workload.task)


def _on_paper(loss: HeadLoss) -> HeadLoss:
    """The same with a sum in place of the comparison."""
    assert loss.joint is not None
    return replace(loss, joint=replace(loss.joint, labels={}, of_vectors=lambda vectors, labels: vectors.sum()))


def is_of_comparison(segment: str) -> bool:
    """Whether a segment is written by `trace_comparison`."""
    return segment.rpartition(".")[2] in SEGMENTS


def model_of(resolved: ResolvedModel, workload: Workload) -> torch.nn.Module:
    """The model with its techniques applied, on the meta device."""
    model = build_for(resolved, workload)
    apply(model, workload)
    return model


@torch.inference_mode(False)
def trace_comparison(
    resolved: ResolvedModel, workload: Workload, template: StreamTemplate, num_texts: int
) -> StreamTemplate:
    """A template whose passes were traced, with the comparison of so many vectors."""
    loss = joint_loss(model_of(resolved, workload), workload, num_texts)
    made = StreamTemplate(
        profile=template.profile, probe=None, origins=list(template.origins), next_id=template.next_id
    )
    nothing = torch.nn.Linear(1, 1, device="meta")
    tracer = Tracer(made, Places(nothing), mask_has_padding=False)
    tracer.workspaces_are_there()
    step = Step(nothing, torch.optim.SGD(nothing.parameters(), lr=0.0), ranks=Alone())
    step.place = torch.Tensor.clone
    with tracer, Dialect(template.profile, Autocast(None, keeps_copies=False)):
        step.on_part = partial(_begin, tracer, STEPS[1])
        passes = JointPasses(step, (), loss, 0)
        passes.embed()
        passes.compare()
        passes.end()
        tracer.begin("end", "end")
    first = f"{STEPS[0]}.micro0"
    segments = {**template.segments, first: _without(tracer.workspaces, template.segments[first], made.origins)}
    for name in SEGMENTS:
        entries = made.segments[f"{STEPS[1]}.{name}"]
        segments[f"{STEPS[0]}.{name}"] = entries
        segments[f"{STEPS[1]}.{name}"] = _without(tracer.workspaces, entries, made.origins)
    return replace(
        template,
        segments=segments,
        work={**template.work, **{name: work for name, work in made.work.items() if is_of_comparison(name)}},
        origins=made.origins,
        next_id=made.next_id,
    )


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
