"""Answers to questions: the best span of a window, the best window of a question, and SQuAD's scores for it."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramfit.tasks.parts.reading import Reference
from vramfit.tasks.parts.results import MeanLoss, class_losses

if TYPE_CHECKING:
    import torch

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
