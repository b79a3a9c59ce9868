"""What a student learns from a teacher's answers: which of them, how much they are softened, and what they count."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vramfit.settings.setting import Module, Setting, Workload
from vramfit.settings.values import Choice, Count, Number, is_text
from vramfit.tasks import all_tasks, find_task

LOGITS, HIDDEN = "logits", "hidden"
TEMPERATURE, ALPHA = 2.0, 0.5


def is_taught(w: Workload) -> bool:
    """Whether a student learns from the answers of a teacher."""
    return w.distill is not None


def reads_hidden(w: Workload) -> bool:
    """Whether it learns from the outputs of the teacher's layers too."""
    return bool(w.distill == HIDDEN)


class OfTeaching(Setting):
    """A setting that only training with a teacher has."""

    modes = ("train",)
    in_run = True
    is_measured = on_page = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.distill is None:
            yield f"{self.keyword} is for training with a teacher: take distill {LOGITS}"


@dataclass(frozen=True, kw_only=True)
class Answers(Choice):
    """What of a teacher's answers is learned from; what people may expect besides is refused by name."""

    def problems(self, name: str, value: Any) -> list[str]:
        if is_text(value, "relations", "attention"):
            return [
                f"{name} {value}: attention relations are not learned from, since attention kernels give no weights of "
                f"attention, and families name their queries, keys and values differently; take {name} {HIDDEN}"
            ]
        return super().problems(name, value)


class Distill(OfTeaching):
    keyword, order, applied = "distill", 101, 7
    value = Answers(names=(LOGITS, HIDDEN), optional=True)
    help = "Learn from a teacher: its logits (or vectors, scores), or its layers' hidden states too."
    asked = (is_taught, reads_hidden)

    def contradictions(self, w: Workload) -> Iterator[str]:
        kind = find_task(w.task)
        if not kind.answers:
            able = ", ".join(task.name for task in all_tasks() if task.answers)
            yield f"distill is for {able}, not {w.task}"
        if not w.trains:
            yield f"distill is for mode train, not {w.mode}"
        if w.captures_graphs:
            yield "graphs and distill do not go together: recorded passes read nothing but tokens and labels"
        if w.reads_hidden and w.is_joint:
            yield (
                f"distill {HIDDEN} needs a loss for each pass, and this loss compares all texts of a step: "
                f"take distill {LOGITS}"
            )
        if w.distill_width is not None and (w.has_adapters or w.num_gpus > 1):
            yield "distill_width needs a projection beside the student, which goes with neither lora nor several GPUs"
        if w.reads_hidden and w.offloads:
            yield f"distill {HIDDEN} and offload {w.offload} do not go together: a layer's output must stay"

    def in_few_layers(self, w: Workload) -> str | None:
        if w.reads_hidden:
            raise LookupError("the loss reads the outputs of all layers")
        return w.distill

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.tasks.parts.distilled import Teaching, teach

        if not w.is_taught:
            return
        if w.reads_hidden:
            give_hidden(model, w.distill_width)
        temperature = TEMPERATURE if w.distill_temperature is None else w.distill_temperature
        alpha = ALPHA if w.distill_alpha is None else w.distill_alpha
        config: Any = model.config
        hidden_width = (w.distill_width or int(config.hidden_size)) if w.reads_hidden else None
        teach(model, Teaching(temperature=temperature, alpha=alpha, hidden_width=hidden_width))


def give_hidden(model: Module, width: int | None = None) -> None:
    """Prepare a model to give the outputs of its layers.

    transformers puts its hooks on a model when it is first asked for them; a window that is done again would find them
    there twice. Layers are numbered, so that no two are alike: a prediction runs them all.

    Args:
        width: of the teacher's hidden states, where it is another one: a projection is learned beside the model.
    """
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    from vramfit.models.anatomy import backbone, encoder_layers
    from vramfit.tasks.parts.distilled import add_projection

    if width is not None:
        add_projection(model, width)

    maybe_install_capturing_hooks(backbone(model))
    for place, layer in enumerate(encoder_layers(model)):
        layer.__dict__["_taught_at"] = place


class DistillTemperature(OfTeaching):
    keyword, order = "distill_temperature", 102
    value = Number(optional=True, high=1e3, words="a number above 0 and below 1,000")
    in_trace = "step"
    help = f"What logits of teacher and student are divided by before they are compared. Default: {TEMPERATURE:g}."


class DistillWidth(OfTeaching):
    keyword, order = "distill_width", 104
    value = Count(optional=True)
    help = "Hidden size of the teacher, if it differs from the student's; a run reads it from the teacher."

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not w.reads_hidden:
            yield f"distill_width is for distill {HIDDEN}"


class DistillAlpha(OfTeaching):
    keyword, order = "distill_alpha", 103
    value = Number(optional=True, high=1.0000001, includes_low=True, words="a number from 0 to 1")
    in_trace = "step"
    help = f"Share of the loss that is the teacher's; the rest is that of the labels. Default: {ALPHA:g}."
