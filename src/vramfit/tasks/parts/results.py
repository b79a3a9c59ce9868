"""What comes of a model's outputs: metrics that run along, as sums on the host, and scores in rows of predictions.

For questions: the best span of a window, the best window of a question, and SQuAD's scores.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, Protocol

from vramfit.tasks import all_tasks, find_task
from vramfit.tasks.parts.reading import Reference

if TYPE_CHECKING:
    import torch

    Batch = dict[str, torch.Tensor]


class RunningMetrics(Protocol):
    """Takes the outputs of batches in any order and split in any way; `result` is the same."""

    best_metric: str
    """Which result decides what is best."""
    higher_is_better: bool

    def update(self, output: Any, batch: "Batch", references: Sequence[Reference]) -> None:
        """Adds a batch.

        Args:
            output: with logits, on any device.
            batch: with its labels, on any device.
            references: of its samples, in its order.
        """
        ...

    def merge(self, other: Any) -> None:
        """Adds what another one of this kind was given."""
        ...

    def result(self) -> dict[str, float]:
        """Name → figure, over all that was added."""
        ...


class MeanLoss:
    """A mean over everything that has a label."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, losses: "torch.Tensor") -> None:
        """Some more of them."""
        values = losses.double().cpu().tolist()
        self.total += sum(values)
        self.count += len(values)

    def merge(self, other: "MeanLoss") -> None:
        """Those of another one."""
        self.total += other.total
        self.count += other.count

    def mean(self) -> float:
        """0 of nothing."""
        return self.total / self.count if self.count else 0.0


def class_losses(logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    """The cross entropy of each label, in fp32."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.float(), labels.to(logits.device), reduction="none")


class ClassCounts:
    """A confusion matrix that grows."""

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels
        self._pairs: Counter[tuple[int, int]] = Counter()
        """(true, said) → how often."""

    def add(self, true: Iterable[int], said: Iterable[int]) -> None:
        """Some more samples."""
        self._pairs.update(zip(true, said, strict=True))

    def merge(self, other: "ClassCounts") -> None:
        """The samples of another one."""
        self._pairs.update(other._pairs)

    def scores(self) -> dict[str, float]:
        """`accuracy`, `macro_f1` over the classes that occur; with two classes `f1` of the second and `mcc`."""
        total = sum(self._pairs.values())
        right = sum(count for (true, said), count in self._pairs.items() if true == said)
        seen = sorted({label for pair in self._pairs for label in pair})
        macro = sum(self._f1(label) for label in seen) / len(seen) if seen else 0.0
        scores = {"accuracy": right / total if total else 0.0, "macro_f1": macro}
        return scores | {"f1": self._f1(1), "mcc": self._mcc()} if self._num_labels == 2 else scores

    def _f1(self, label: int) -> float:
        right = self._pairs[label, label]
        either = sum(c * ((true == label) + (said == label)) for (true, said), c in self._pairs.items())
        return 2 * right / either if either else 0.0

    def _mcc(self) -> float:
        """Matthews' correlation of two classes; 0 where one of them never occurs."""
        yes, no = self._pairs[1, 1], self._pairs[0, 0]
        false_yes, false_no = self._pairs[0, 1], self._pairs[1, 0]
        below = (yes + false_yes) * (yes + false_no) * (no + false_yes) * (no + false_no)
        return (yes * no - false_yes * false_no) / sqrt(below) if below else 0.0


def place_of(reference: Reference) -> dict[str, Any]:
    """Where a sample is in its file; a request of a server has no more than a number."""
    return {name: reference[name] for name in ("row", "index") if name in reference}


def rounded(score: float) -> float:
    """A score in six significant digits, which is what fp32 leaves of it."""
    return float(f"{score:.6g}")


def best_scores(
    values: Sequence[float], places: Sequence[int], names: Sequence[str], top_k: int
) -> list[dict[str, Any]]:
    """The best labels of one text or word."""
    best = list(zip(places, values, strict=True))[:top_k]
    return [{"label": names[place], "probability": rounded(value)} for place, value in best]


def best_labels(logits: "torch.Tensor", references: Sequence[Reference]) -> tuple[list[Any], list[Any]]:
    """Probabilities and places of the best labels, the best first: as many as any of the samples asks for."""
    most = max((reference.get("top_k") or 1 for reference in references), default=1)
    probabilities = logits.float().softmax(-1)
    if most == 1:
        values, places = probabilities.max(-1, keepdim=True)
    else:
        values, places = probabilities.topk(min(most, logits.shape[-1]), -1)
    return values.tolist(), places.tolist()


def wrong_top_k(top_k: Any, task: str | None = None) -> str | None:
    """Why so many scores cannot be given; None where they can.

    Args:
        task: of the model, where it is known.

    >>> wrong_top_k(0)
    'top_k 0 is not a whole number from 1'
    >>> wrong_top_k(3, "sequence-classification")
    """
    if type(top_k) is not int or top_k < 1:
        return f"top_k {str(top_k)[:40]} is not a whole number from 1"
    if task is None:
        return None
    most = find_task(task).max_scores
    if most is None:
        scored = [one.name for one in all_tasks() if one.max_scores is not None]
        return f"top_k is not for {task}: {', '.join(scored)} have scores to choose from"
    return f"top_k {top_k} is more than the {most:,} scores that are given for {task}" if top_k > most else None


MAX_ANSWER_TOKENS = 30
"""As the SQuAD examples of transformers limit it."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a window, or all windows of a question, say."""

    text: str
    begin: int
    end: int
    """Characters of the context."""
    score: float
    """Logits of the first and the last token, added; of windows, the highest counts."""
    no_answer_score: float
    """The same for saying nothing; of windows, the lowest counts."""

    def or_better(self, other: "Answer") -> "Answer":
        """The answer of two windows together."""
        best = other if (other.score, -other.begin) > (self.score, -self.begin) else self
        silence = min(self.no_answer_score, other.no_answer_score)
        return Answer(best.text, best.begin, best.end, best.score, silence)


def read_answers(output: Any, references: Sequence[Reference]) -> list[Answer]:
    """The best answer of each window; two numbers a token come to the host, where the spans are compared."""
    import torch

    start, end = output.start_logits.float().cpu(), output.end_logits.float().cpu()
    width = start.shape[1]
    begins = torch.tensor([r["context_at"] for r in references])[:, None]
    sizes = torch.tensor([len(r["offsets"]) // 2 for r in references])[:, None]
    places = torch.arange(width)
    outside = (places < begins) | (places >= begins + sizes)
    score, first, last = _best_spans(start.masked_fill(outside, -torch.inf), end.masked_fill(outside, -torch.inf))
    answers = []
    for i, reference in enumerate(references):
        silence = float(start[i, reference["cls"]] + end[i, reference["cls"]])
        answers.append(_answer(reference, float(score[i]), int(first[i]), int(last[i]), silence))
    return answers


def _best_spans(start: "torch.Tensor", end: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Score, first and last token of the best span of each row; all spans up to the longest allowed are compared."""
    import torch

    best = torch.full((start.shape[0],), -torch.inf)
    first, last = torch.zeros_like(best, dtype=torch.long), torch.zeros_like(best, dtype=torch.long)
    for more in range(min(MAX_ANSWER_TOKENS, start.shape[1])):
        score, place = (start[:, : start.shape[1] - more] + end[:, more:]).max(dim=1)
        better = score > best
        best = torch.where(better, score, best)
        first, last = torch.where(better, place, first), torch.where(better, place + more, last)
    return best, first, last


def _answer(reference: dict[str, Any], score: float, first: int, last: int, silence: float) -> Answer:
    offsets, at = reference["offsets"], reference["context_at"]
    if not 0 <= 2 * (last - at) < len(offsets) or not first >= at:  # no token of the context is in this window
        return Answer("", 0, 0, silence, silence)
    begin, end = offsets[2 * (first - at)], offsets[2 * (last - at) + 1]
    return Answer(reference["context"][begin:end], begin, end, score, silence)


def normalized(text: str) -> str:
    """As SQuAD's script compares answers: lower case, no punctuation, no articles, single spaces.

    >>> normalized("The  Eiffel-Tower, a  sight!")
    'eiffeltower sight'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def scores(answer: str, gold: Iterable[str], *, may_be_silent: bool) -> tuple[float, float]:
    """Exact match and F1 of an answer: the best over all true ones, each for itself.

    The scripts of SQuAD 1.1 and 2.0 differ in texts of which normalization leaves nothing, such as "The": in 2.0 they
    are no true answers, and silence is right where there are none; in 1.1 they match exactly, but share no words.

    Args:
        may_be_silent: whether questions may be without an answer, as in SQuAD 2.0; there none is `[]` or `[""]`.

    >>> scores("in the Louvre", ["Louvre", "The Louvre in Paris"], may_be_silent=False)
    (0.0, 0.8)
    """
    said, true = normalized(answer), [normalized(g) for g in gold]
    if may_be_silent:
        true = [text for text in true if text] or [""]
        if not said or true == [""]:
            return float(said in true), float(said in true)
    return float(said in true), max(_f1(said.split(), text.split()) for text in true)


def _f1(said: list[str], true: list[str]) -> float:
    num_shared = sum((Counter(said) & Counter(true)).values())
    if not num_shared:
        return 0.0
    precision, recall = num_shared / len(said), num_shared / len(true)
    return 2 * precision * recall / (precision + recall)


class AnswerMetrics:
    """`exact_match` and `f1` as SQuAD's scripts give them, of 100; `loss`.

    Windows of one context are merged: the best answer of them counts. Silence is an answer only where some questions
    have none (SQuAD 2.0): it wins where it scores higher than any span.
    """

    best_metric = "f1"
    higher_is_better = True

    def __init__(self) -> None:
        self._answers: dict[int, Answer] = {}
        self._gold: dict[int, list[str]] = {}
        self._loss = MeanLoss()

    def update(self, output: Any, batch: Any, references: Sequence[Reference]) -> None:
        start = class_losses(output.start_logits, batch["start_positions"])
        self._loss.add((start + class_losses(output.end_logits, batch["end_positions"])) / 2)
        for answer, reference in zip(read_answers(output, references), references, strict=True):
            self._take(reference["question_number"], answer, reference["answers"])

    def merge(self, other: "AnswerMetrics") -> None:
        for number, answer in other._answers.items():
            self._take(number, answer, other._gold[number])
        self._loss.merge(other._loss)

    def _take(self, number: int, answer: Answer, gold: list[str]) -> None:
        known = self._answers.get(number)
        self._answers[number] = answer if known is None else known.or_better(answer)
        self._gold[number] = gold

    def result(self) -> dict[str, float]:
        may_be_silent = any(not gold for gold in self._gold.values())
        exact = shared = 0.0
        for number, answer in self._answers.items():
            text = "" if may_be_silent and answer.no_answer_score > answer.score else answer.text
            match, overlap = scores(text, self._gold[number], may_be_silent=may_be_silent)
            exact += match
            shared += overlap
        count = max(len(self._answers), 1)
        return {"exact_match": 100 * exact / count, "f1": 100 * shared / count, "loss": self._loss.mean()}
