"""What training embeddings needs to know: the texts of a sample, how a text's vector is made, and the loss."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from vramfit.settings.setting import Module, Setting, Workload
from vramfit.settings.values import Choice, Count, Number, Value, is_count
from vramfit.tasks import find_task
from vramfit.units import counted, plain, shown

LOSSES = ("in-batch", "in-batch-symmetric", "triplet", "contrastive", "cosent", "angle", "margin-mse")
"""In-batch negatives, one way and both; then by the names they are known by."""
IN_BATCH = LOSSES[:2]
OF_PAIRS = ("contrastive", "cosent", "angle")
"""Losses of two texts and the score of the two."""
OF_NEGATIVES = ("triplet", "margin-mse")
"""Losses that compare an anchor's positive with its negatives, and know no others."""
SCORED = (*OF_PAIRS, "margin-mse")
"""Losses that read scores beside texts."""
POOLINGS = ("mean", "cls", "last", "max", "weighted-mean")


def texts_per_sample(w: Workload) -> int:
    """Texts of a sample that is learned from, each of which passes by itself; elsewhere a text is a sample."""
    if not w.trains:
        return 1
    return w.texts or (3 if w.loss in OF_NEGATIVES else find_task(w.task).texts_per_sample)


def sample_tokens(w: Workload) -> int:
    """Tokens of a sample whose texts all have full length."""
    return texts_per_sample(w) * w.seq


def is_joint(w: Workload) -> bool:
    """Whether the loss of a step looks at all of its samples at once: no pass has a loss of its own."""
    return w.trains and find_task(w.task).pools_itself


def runs_twice(w: Workload) -> bool:
    """Whether the passes of a step run twice: first for the vectors that its loss compares, then to learn."""
    return is_joint(w) and w.num_passes > 1 and w.loop == "stepper"


def step_texts(w: Workload) -> int:
    """Texts of a whole step, those of all GPUs."""
    return w.batch * texts_per_sample(w)


def texts_problems(loss: str, num_texts: int) -> Iterator[str]:
    """Why a loss cannot take samples of so many texts."""
    if loss in OF_PAIRS and num_texts != 2:
        yield f"loss {loss} compares the two texts of a pair, and a sample has {num_texts}: take texts 2"
    if loss in IN_BATCH and num_texts < 2:
        yield f"loss {loss} needs an anchor and a positive, and a sample has 1 text: take texts 2 or more"
    if loss in OF_NEGATIVES and num_texts < 3:
        has = counted(num_texts, "text")
        yield f"loss {loss} needs an anchor, a positive and a negative, and a sample has {has}: take texts 3 or more"


class OfEmbeddings(Setting):
    """A setting that only a task with vectors has."""

    losses: ClassVar[tuple[str, ...]] = LOSSES
    """Those that it does something to."""
    modes: ClassVar[tuple[str, ...]] = ("train",)
    in_run = True
    is_measured = on_page = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        if getattr(w, self.keyword) is None:
            return
        if not find_task(w.task).pools_itself:
            yield f"{self.keyword} is for tasks that learn vectors of texts, not {w.task}"
        elif (w.loss or LOSSES[0]) not in self.losses:
            yield f"{self.keyword} is for loss {', '.join(self.losses)}, not {w.loss or LOSSES[0]}: leave it out"


class Texts(OfEmbeddings):
    keyword, order, group = "texts", 85, "job"
    value = Count(optional=True)
    label = "Texts a sample"
    help = "Texts of a sample, each with a vector: 2 for pairs, 3 with a negative. Default: as few as the loss takes."
    asked = (texts_per_sample, sample_tokens, is_joint, runs_twice, step_texts)
    is_said = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        yield from super().contradictions(w)
        if is_joint(w) and w.loss is None:
            yield from texts_problems(LOSSES[0], texts_per_sample(w))


class Pooling(OfEmbeddings):
    keyword, order, applied = "pooling", 92, 5
    value = Choice(names=POOLINGS, optional=True)
    modes = ("train", "forward", "infer")
    help = "How the vectors of a text's tokens become one. Default: as the model's folder says, else their mean."
    at_load = in_inference = True

    def is_applied_for(self, w: Workload) -> bool:
        return find_task(w.task).pools_itself

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.tasks.parts.pooling import Contrast, head_of

        head = head_of(model)
        if head is None:
            return
        if w.pooling is not None:
            head.pool_by(w.pooling)
        given: dict[str, Any] = {
            "loss": w.loss,
            "temperature": w.temperature,
            "margin": w.loss_margin,
            "dims": w.matryoshka,
        }
        given |= {"num_texts": texts_per_sample(w), "mask_above": w.mask_above}
        head.contrast = Contrast(**{name: value for name, value in given.items() if value is not None})


class Loss(OfEmbeddings):
    keyword, order = "loss", 94
    value = Choice(names=LOSSES, optional=True)
    help = "What vectors learn: every other sample is a negative (in-batch), or as the loss of that name compares them."

    def contradictions(self, w: Workload) -> Iterator[str]:
        yield from super().contradictions(w)
        if is_joint(w) and w.loss is not None:
            yield from texts_problems(w.loss, texts_per_sample(w))


class Temperature(OfEmbeddings):
    keyword, order = "temperature", 95
    losses = (*IN_BATCH, "cosent", "angle")
    value = Number(optional=True)
    help = "What similarities are divided by, for in-batch, cosent and angle. Default: 0.05."


class Margin(OfEmbeddings):
    keyword, order = "loss_margin", 96
    losses = ("triplet", "contrastive")
    value = Number(optional=True)
    help = "How far apart texts are to be that do not belong together, for triplet (default 5) and contrastive (0.5)."


class MaskAbove(OfEmbeddings):
    keyword, order = "mask_above", 97
    losses = IN_BATCH
    value = Number(optional=True)
    help = "Leave out in-batch negatives whose cosine similarity is above this: positives that nobody marked."


@dataclass(frozen=True, kw_only=True)
class Dimensions(Value):
    """Lengths of vectors."""

    optional: bool = True
    metavar: str | None = "N,…"
    kind: ClassVar[Any] = tuple[int, ...]

    def normal(self, value: Any) -> Any:
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else value

    def problems(self, name: str, value: Any) -> list[str]:
        if value is None:
            return []
        wrong = [n for n in value if not is_count(n)] if isinstance(value, tuple) else [value]
        return [f"{name} {shown(wrong[:3] or ())} are not whole numbers from 1"] if wrong or not value else []

    def parse(self, text: str) -> Any:
        parts = [part.strip() for part in text.split(",")]
        return tuple(int(part) if part.isdecimal() else part for part in parts)


class Matryoshka(OfEmbeddings):
    keyword, order = "matryoshka", 98
    value = Dimensions()
    help = "Shorter vectors that are to be as good: losses of vectors cut to these lengths are added up."
