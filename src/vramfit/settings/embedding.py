"""What training embeddings needs to know: the texts of a sample, how a text's vector is made, and the loss."""

from collections.abc import Iterator
from typing import Any, ClassVar

from vramfit.settings.setting import Module, Setting, Workload
from vramfit.settings.values import Choice, Count, Counts, Number
from vramfit.tasks import all_tasks, find_task

LOSSES = tuple(dict.fromkeys(loss for task in all_tasks() for loss in task.losses))
"""Of all tasks."""
IN_BATCH = ("in-batch", "in-batch-symmetric")
POOLINGS = ("mean", "cls", "last", "max", "weighted-mean")
TEXT_TOKENS = 16
"""Least tokens of a text on average, of unknown texts: attention's kernel holds memory for every one, however short."""


def texts_per_sample(w: Workload) -> int:
    """Texts of a sample that is learned from, each of which passes by itself; elsewhere a text is a sample."""
    if not w.trains:
        return 1
    kind = find_task(w.task)
    return w.texts or (kind.fewest_texts(loss_of(w)) if kind.losses else 1)


def loss_of(w: Workload) -> str:
    """The loss, of a task that has several."""
    losses = find_task(w.task).losses
    return w.loss or (losses[0] if losses else "")


def sample_tokens(w: Workload) -> int:
    """Tokens of a sample whose texts all have full length."""
    return texts_per_sample(w) * w.seq


def row_texts(w: Workload) -> int:
    """Texts that a packed row has at most for each of its samples, where texts are compared."""
    return max(sample_tokens(w) // (w.text_tokens or TEXT_TOKENS), texts_per_sample(w))


def is_joint(w: Workload) -> bool:
    """Whether the loss of a step looks at all of its samples at once: no pass has a loss of its own."""
    return w.trains and loss_of(w) in find_task(w.task).joint_losses


def runs_twice(w: Workload) -> bool:
    """Whether the passes of a step run twice: first for the vectors that its loss compares, then to learn."""
    return is_joint(w) and w.num_passes > 1 and w.loop == "stepper"


def step_texts(w: Workload) -> int:
    """Texts of a whole step, those of all GPUs."""
    return w.batch * texts_per_sample(w)


def compared_by(w: Workload) -> tuple[object, ...]:
    """All that says how texts are compared: workloads that are equal in it compare alike."""
    of_teacher = w.distill, w.distill_temperature, w.distill_alpha
    return w.task, texts_per_sample(w), loss_of(w), w.temperature, w.loss_margin, w.mask_above, w.matryoshka, of_teacher


class OfComparison(Setting):
    """A setting that only a task with losses to choose from has."""

    losses: ClassVar[tuple[str, ...]] = LOSSES
    """Those that it does something to."""
    modes: ClassVar[tuple[str, ...]] = ("train",)
    in_run = True
    is_measured = on_page = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        if getattr(w, self.keyword) is None:
            return
        read_by = [loss for loss in find_task(w.task).losses if loss in self.losses]
        if not read_by:
            yield f"{self.keyword} is not for {w.task}: leave it out"
        elif loss_of(w) not in read_by:
            yield f"{self.keyword} is for loss {', '.join(read_by)}, not {loss_of(w)}: leave it out"


class Texts(OfComparison):
    keyword, order, group = "texts", 85, "job"
    value = Count(optional=True)
    label = "Texts a sample"
    help = (
        "Texts per sample, each with its own vector: 2 for pairs, 3 with a negative. Default: the fewest for the loss."
    )
    asked = (texts_per_sample, sample_tokens, row_texts, is_joint, runs_twice, step_texts, compared_by)
    is_said = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        yield from super().contradictions(w)
        if w.trains and w.loss is None:
            yield from find_task(w.task).texts_problems(loss_of(w), texts_per_sample(w))


class TextTokens(OfComparison):
    keyword, order, group = "text_tokens", 86, "job"
    value = Count(optional=True)
    is_live = True
    is_said = must_match_on_resume = False
    in_trace = "step"
    help = (
        "Least tokens of a text on average, where the texts of a step are compared: a packed pass holds no more texts. "
        "Default: as the lengths of the data say, otherwise 16."
    )


class Pooling(OfComparison):
    keyword, order, applied = "pooling", 92, 5
    value = Choice(names=POOLINGS, optional=True)
    modes = ("train", "forward", "infer")
    help = (
        "How the vectors of tokens become the vector of a text. Default: as the model's folder says, otherwise mean; "
        "for a causal decoder, last."
    )
    at_load = in_inference = True

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.pooling is not None and not find_task(w.task).pools_itself:
            yield f"pooling is for tasks that give vectors of texts, not {w.task}"

    def is_applied_for(self, w: Workload) -> bool:
        return w.pooling is not None

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.tasks.parts.pooling import head_of

        head = head_of(model)
        if head is not None and w.pooling is not None:
            head.pool_by(w.pooling)


class Loss(OfComparison):
    keyword, order, applied = "loss", 94, 6
    value = Choice(names=LOSSES, optional=True)
    help = "Loss of embeddings and rerankers; in-batch compares each text with all others of the step."

    def contradictions(self, w: Workload) -> Iterator[str]:
        kind = find_task(w.task)
        if w.loss is not None and w.loss not in kind.losses:
            instead = f"; it has {', '.join(kind.losses)}" if kind.losses else ", whose labels say what its loss is"
            yield f"loss {w.loss} is not for {w.task}{instead}"
        elif w.trains and w.loss is not None:
            yield from kind.texts_problems(w.loss, texts_per_sample(w))

    def is_applied_for(self, w: Workload) -> bool:
        return bool(find_task(w.task).losses)

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.tasks.parts.pooling import Contrast

        given: dict[str, Any] = {"temperature": w.temperature, "margin": w.loss_margin, "dims": w.matryoshka}
        given |= {"loss": loss_of(w), "num_texts": texts_per_sample(w), "mask_above": w.mask_above}
        find_task(w.task).learn_by(model, Contrast(**{n: value for n, value in given.items() if value is not None}))


class Temperature(OfComparison):
    keyword, order = "temperature", 95
    losses = (*IN_BATCH, "cosent", "angle", "listwise")
    value = Number(optional=True)
    help = "Divides similarities in the losses in-batch, cosent, angle (default 0.05) and listwise (default 1)."


class Margin(OfComparison):
    keyword, order = "loss_margin", 96
    losses = ("triplet", "contrastive")
    value = Number(optional=True)
    help = "Least distance between texts that do not belong together, in triplet (default 5) and contrastive (0.5)."


class MaskAbove(OfComparison):
    keyword, order = "mask_above", 97
    losses = IN_BATCH
    value = Number(optional=True)
    help = "Leave out in-batch negatives whose cosine similarity is above this: probably unmarked positives."


class Matryoshka(OfComparison):
    keyword, order = "matryoshka", 98
    value = Counts()
    help = "Train vectors truncated to these lengths as well: their losses are added."

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.matryoshka is not None and not find_task(w.task).pools_itself:
            yield f"matryoshka is for tasks that give vectors of texts, not {w.task}"
