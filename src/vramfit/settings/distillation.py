"""What a student learns from a teacher's answers: which of them, how much they are softened, and what they count."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vramfit.settings.setting import Module, Setting, Workload, given
from vramfit.settings.values import Choice, Count, Number, Text
from vramfit.tasks import all_tasks, find_task

LOGITS, HIDDEN, RELATIONS = "logits", "hidden", "relations"
TEMPERATURE, ALPHA = 2.0, 0.5
AUTO, DISK, MEMORY = "auto", "disk", "memory"
"""Where a run has a teacher's answers from."""


def is_taught(w: Workload) -> bool:
    """Whether a student learns from the answers of a teacher."""
    return w.distill is not None


def teacher_written_ns(w: Workload) -> int | None:
    """When the configuration of a held teacher was written; None for one that is no folder."""
    try:
        return (Path(w.held_teacher or "").expanduser() / "config.json").stat().st_mtime_ns
    except OSError:
        return None


def reads_hidden(w: Workload) -> bool:
    """Whether it learns from the outputs of the teacher's layers too."""
    return bool(w.distill == HIDDEN)


def reads_relations(w: Workload) -> bool:
    """Whether it learns from how the teacher's tokens are related too."""
    return bool(w.distill == RELATIONS)


def reads_layers(w: Workload) -> bool:
    """Whether it learns from what is inside the teacher."""
    return reads_hidden(w) or reads_relations(w)


class OfTeaching(Setting):
    """A setting that only training with a teacher has."""

    modes = ("train",)
    in_run = True
    is_measured = on_page = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.distill is None:
            yield f"{self.keyword} is for training with a teacher: take distill {LOGITS}"


class Distill(OfTeaching):
    keyword, order, applied = "distill", 101, 7
    value = Choice(names=(LOGITS, HIDDEN, RELATIONS), optional=True)
    help = (
        "Distil from a teacher: learn its logits (for some tasks vectors or scores), or logits and hidden states, or "
        "logits and attention relations."
    )
    asked = (is_taught, reads_hidden, reads_relations, reads_layers)

    def contradictions(self, w: Workload) -> Iterator[str]:
        kind = find_task(w.task)
        if not kind.answers:
            able = ", ".join(task.name for task in all_tasks() if task.answers)
            yield f"distill is for {able}, not {w.task}"
        if not w.trains:
            yield f"distill is for mode train, not {w.mode}"
        if w.captures_graphs:
            yield "graphs and distill do not go together: recorded passes read nothing but tokens and labels"
        if w.reads_layers and w.is_joint:
            yield (
                f"distill {w.distill} needs a loss for each pass, and this loss compares all texts of a step: "
                f"take distill {LOGITS}"
            )
        if w.distill_width is not None and (w.has_adapters or w.num_gpus > 1):
            yield "distill_width adds a projection to the student, which works neither with lora nor on several GPUs"
        if w.reads_hidden and w.offloads:
            yield f"distill {HIDDEN} and offload {w.offload} do not go together: a layer's output must stay"

        if w.reads_relations and not w.holds_teacher:
            yield (
                f"distill {RELATIONS} needs the teacher in memory, since its queries, keys and values are not kept on "
                "the disk: take held_teacher"
            )
        if w.reads_relations and (w.is_compiled or w.is_fused):
            how = "compile" if w.is_compiled else "fused"
            yield f"distill {RELATIONS} and {how} do not go together: such layers do not call the attention interface"

    def in_few_layers(self, w: Workload) -> str | None:
        if w.reads_layers:
            raise LookupError("the loss reads the outputs of all layers")
        return w.distill

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.tasks.parts.distilled import Teaching, teach

        if not w.is_taught:
            return
        width = _teacher_width(model, w) if w.holds_teacher and w.reads_hidden else w.distill_width
        if w.reads_hidden:
            give_hidden(model, width)
        if w.reads_relations:
            from vramfit.techniques.relations import give_relations

            give_relations(model)
            number_layers(model)
        temperature = TEMPERATURE if w.distill_temperature is None else w.distill_temperature
        alpha = ALPHA if w.distill_alpha is None else w.distill_alpha
        config: Any = model.config
        hidden_width = (width or int(config.hidden_size)) if w.reads_hidden else None
        teach(model, Teaching(temperature=temperature, alpha=alpha, hidden_width=hidden_width))


def _teacher_width(model: Module, w: Workload) -> int | None:
    """The hidden size of a teacher in memory; None where it is the student's.

    Raises:
        WorkloadError: another one was given.
    """
    from vramfit.errors import WorkloadError
    from vramfit.techniques.teachers import hidden_size_of

    width = hidden_size_of(w)
    config: Any = model.config
    if w.distill_width not in (None, width):
        raise WorkloadError([f"distill_width {w.distill_width:,}: the hidden size of {w.held_teacher} is {width:,}"])
    return None if width == config.hidden_size else width


def give_hidden(model: Module, width: int | None = None) -> None:
    """Prepare a model to give the outputs of its layers.

    transformers puts its hooks on a model when it is first asked for them; a window that is done again would find them
    there twice.

    Args:
        width: of the teacher's hidden states, where it is another one: a projection is learned beside the model.
    """
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    from vramfit.models.anatomy import backbone
    from vramfit.tasks.parts.distilled import add_projection

    if width is not None:
        add_projection(model, width)

    maybe_install_capturing_hooks(backbone(model))
    number_layers(model)


def number_layers(model: Module) -> None:
    """Mark the layers of a model, so that no two are alike: a prediction runs them all."""
    from vramfit.models.anatomy import encoder_layers

    for place, layer in enumerate(encoder_layers(model)):
        layer.__dict__["_taught_at"] = place


class DistillTemperature(OfTeaching):
    keyword, order = "distill_temperature", 102
    value = Number(optional=True, high=1e3, words="a number above 0 and below 1,000")
    in_trace = "step"
    help = f"Divides the logits of teacher and student before they are compared. Default: {TEMPERATURE:g}."


class DistillWidth(OfTeaching):
    keyword, order = "distill_width", 104
    value = Count(optional=True)
    help = "Hidden size of the teacher, if it differs from the student's; a run reads it from the teacher."

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not w.reads_hidden:
            yield f"distill_width is for distill {HIDDEN}"


class OfRelations(OfTeaching):
    """A setting of attention relations."""

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not w.reads_relations:
            yield f"{self.keyword} is for distill {RELATIONS}"


class DistillRelationHeads(OfRelations):
    keyword, order = "distill_relation_heads", 106
    value = Count(optional=True)
    help = "Number of heads that attention relations are compared in. Default: as many as the teacher has."


class DistillRelationLayer(OfRelations):
    keyword, order = "distill_relation_layer", 107
    value = Count(optional=True)
    help = "Layer of the teacher, counted from 1, whose relations the student's last layer learns. Default: the last."


class DistillAlpha(OfTeaching):
    keyword, order = "distill_alpha", 103
    value = Number(optional=True, high=1.0000001, includes_low=True, words="a number from 0 to 1")
    in_trace = "step"
    help = f"Weight of the teacher's answers in the loss; the labels have the rest. Default: {ALPHA:g}."


class HeldTeacher(OfTeaching):
    keyword, order, applied = "held_teacher", 105, 8
    value = Text(such="my-teacher", metavar="MODEL")
    in_run = False
    help = (
        "Predict a teacher in memory next to the student. Default: its answers come with the batch. vramfit distill "
        "has --teacher-answers instead."
    )
    asked = (
        given("held_teacher", "holds_teacher", "Whether a teacher is in memory beside its student."),
        teacher_written_ns,
    )
    is_said = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        yield from super().contradictions(w)
        for is_wrong, why in (
            (w.is_joint, "the loss compares all texts of a step, and the teacher is asked pass by pass"),
            (w.loop != "stepper", "the plain loop does not ask it: take loop stepper"),
            (w.num_gpus > 1, "each GPU would hold it"),
            (w.offloads, f"offload {w.offload} is there to keep less in memory"),
        ):
            if is_wrong:
                yield f"held_teacher: {why}"

    def in_few_layers(self, w: Workload) -> None:
        """Without a teacher, a step takes less."""

    def apply(self, model: Module, w: Workload) -> None:
        """A real teacher is loaded by the run."""
        from vramfit.techniques.teachers import hold_on_meta

        if next(model.parameters()).is_meta:
            hold_on_meta(model, w)

    def words(self, w: Workload) -> str | None:
        return "teacher in memory" if w.holds_teacher else None
