"""A teacher in memory beside its student: every pass asks it about its part of the batch, without a graph.

Its answers have the names, the types and the padding that `runtime.training.answers` gives them, so that a student
learns the same from a teacher that is held as from answers that were kept.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from transformers.utils import ModelOutput

from vramfit.errors import WorkloadError
from vramfit.models.resolve import resolve
from vramfit.tasks import Task, find_task
from vramfit.tasks.parts.distilled import teaching_of
from vramfit.tasks.parts.losses import HIDDEN, RELATIONS, Batch, model_inputs, taken_by, target_name
from vramfit.techniques.application import build_prepared
from vramfit.techniques.relations import give_relations, width_of_relations
from vramfit.workload import Workload


@dataclass
class WithHidden(ModelOutput):  # type: ignore[misc]
    """What a teacher gives, with the hidden states of its layers in one tensor."""

    logits: torch.Tensor | None = None
    start_logits: torch.Tensor | None = None
    end_logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


def give_hidden(model: Any, num_layers: int) -> None:
    """Have a teacher give the outputs of as many layers as its student has, evenly spaced, the last one too."""

    def keep(module: Any, args: Any, output: Any) -> WithHidden:
        states = output.hidden_states[1:]
        chosen = [states[(place + 1) * len(states) // num_layers - 1] for place in range(num_layers)]
        given = {name: value for name, value in output.items() if name.endswith("logits")}
        return WithHidden(**given, hidden=torch.cat([state.half() for state in chosen], -1))

    model.config.output_hidden_states = True
    model.register_forward_hook(keep)


class HeldTeacher:
    """A teacher that answers micro-batches on its device.

    Args:
        model: prepared for inference, as `teacher_workload` says.
        kind: its task.
        num_layers: of the student, whose hidden states are compared; None where they are not.
        relations: whether attention relations are compared.
        relation_layer: of which layer; None for the last one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        kind: Task,
        *,
        num_layers: int | None = None,
        relations: bool = False,
        relation_layer: int | None = None,
    ) -> None:
        self.model, self._kind = model.eval().requires_grad_(False), kind
        of_layers = ({HIDDEN} if num_layers else set()) | ({RELATIONS} if relations else set())
        self.names = frozenset(map(target_name, kind.answers)) | of_layers
        """Of its answers in a batch."""
        self.answers_tokens = kind.answers_tokens and not kind.reads_windows
        """Whether logits have a row for each token."""
        if num_layers:
            give_hidden(model, num_layers)
        if relations:
            give_relations(model, relation_layer, infers=True)

    def complete(self, batch: Batch) -> Batch:
        """A micro-batch, as the student takes it, with the teacher's answers."""
        with torch.no_grad():
            output = self.model(**taken_by(self.model, model_inputs(batch)))
        found = {target_name(name): self._answer(output[name], batch) for name in self._kind.answers}
        if HIDDEN in self.names:
            found[HIDDEN] = output["hidden"]
        if RELATIONS in self.names:
            found[RELATIONS] = torch.cat(output.relations, -1)
        return batch | found

    def _answer(self, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        """In fp32; of places, minus infinity for those outside of a text."""
        given = value.float()
        if not self._kind.reads_windows:
            return given
        mask = batch.get("attention_mask")
        outside = value == torch.finfo(value.dtype).min if mask is None else mask == 0  # packed ones are laid out so
        return given.masked_fill(outside, -torch.inf)


def teacher_workload(w: Workload) -> Workload:
    """How a teacher answers the passes of a student: in the type that autocast casts to, laid out as they are."""
    assert w.held_teacher is not None
    return Workload(
        model=w.held_teacher,
        task=w.task,
        mode="infer",
        batch=w.batch,
        seq=w.seq,
        precision=w.precision.removeprefix("amp-"),
        attention=w.attention,
        mask=w.mask,
    )


def hold(model: Any, teacher: torch.nn.Module, w: Workload) -> None:
    """Keep a teacher beside its student, out of the student's modules."""
    how = teaching_of(model)
    assert how is not None
    held = HeldTeacher(
        teacher,
        find_task(w.task),
        num_layers=int(model.config.num_hidden_layers) if w.reads_hidden else None,
        relations=w.reads_relations,
        relation_layer=w.distill_relation_layer,
    )
    num_heads = relation_heads(model, teacher, w.distill_relation_heads) if w.reads_relations else None
    model._teaching = replace(how, held=held, relation_heads=num_heads)


def relation_heads(student: Any, teacher: Any, asked: int | None) -> int:
    """Into how many heads queries, keys and values of both are divided, whatever heads they have themselves.

    Raises:
        WorkloadError: those asked for do not divide both.
    """
    widths = [width_of_relations(model) for model in (student, teacher)]
    own = [int(model.config.num_attention_heads) for model in (teacher, student)]
    usual = next((n for n in own if not any(width % n for width in widths)), gcd(*widths, *own))
    if asked is not None and any(width % asked for width in widths):
        raise WorkloadError(
            [
                f"distill_relation_heads {asked} does not divide the queries of student and teacher ({widths[0]} and "
                f"{widths[1]} numbers)"
            ],
            hint=f"take {usual}, as it is by itself",
        )
    return asked or usual


def held_by(model: Any) -> torch.nn.Module | None:
    """The teacher that is held beside a model."""
    how = teaching_of(model)
    return None if how is None or how.held is None else how.held.model


def check_family(student: Any, teacher: Any, name: str) -> None:
    """Refuse a teacher that would read the batches of its student in another way.

    Args:
        student, teacher: their configurations.
        name: of the teacher.

    Raises:
        WorkloadError: they are of different families.
    """
    if student.model_type != teacher.model_type:
        raise WorkloadError(
            [
                f"{name} ({teacher.model_type}) cannot be held beside a student of another family "
                f"({student.model_type}): it would read the student's positions and token types"
            ],
            hint="take a teacher of the student's family; or leave out --held-teacher: its answers then come with the "
            "batch, as with vramfit distill --teacher-answers disk",
        )


def hidden_size_of(w: Workload) -> int:
    """The hidden size of the teacher that a workload names.

    Raises:
        UnknownModel, WorkloadError: no such model.
    """
    return int(resolve(teacher_workload(w).model, task=w.task).config.hidden_size)


def hold_on_meta(model: Any, w: Workload) -> None:
    """`hold` for a prediction: the teacher is built without weights.

    Raises:
        UnknownModel, WorkloadError: no such model, or one of another family.
    """
    own = teacher_workload(w)
    resolved = resolve(own.model, task=w.task)
    check_family(model.config, resolved.config, own.model)
    hold(model, build_prepared(resolved, own), w)
