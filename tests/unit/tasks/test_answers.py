"""SQuAD's scores by hand, and the best span of windows."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vramfit.tasks.parts.results import MAX_ANSWER_TOKENS, normalized, read_answers, scores


@pytest.mark.parametrize(
    ("said", "gold", "silent", "exact", "shared"),
    [
        ("The Panthers!", ["panthers"], False, 1.0, 1.0),
        ("in Berlin", ["Berlin", "Berlin, Germany"], False, 0.0, 2 / 3),  # 1 of 2 said, 1 of 1 true
        ("Santa Clara, California", ["Santa Clara"], True, 0.0, 0.8),  # 2/3 and 1
        ("one one two", ["one two two"], False, 0.0, 2 / 3),  # shared: one, two
        ("x", ["y"], False, 0.0, 0.0),
        ("", [], True, 1.0, 1.0),
        ("x", [], True, 0.0, 0.0),
        ("the", ["a"], True, 1.0, 1.0),  # articles alone are no true answer in 2.0
        ("the", ["a", "Beatles"], True, 0.0, 0.0),
        ("the", ["a"], False, 1.0, 0.0),  # in 1.1 they match, but share no words
    ],
)
def test_scores_of_an_answer(said: str, gold: list[str], silent: bool, exact: float, shared: float) -> None:
    assert scores(said, gold, may_be_silent=silent) == (exact, pytest.approx(shared))


def test_normalized_as_the_script_does() -> None:
    assert normalized("An  apple-a-day, the  DOCTOR’s") == "appleaday doctor’s"


def window(context: str, at: int, offsets: list[int]) -> dict[str, Any]:
    return {"context": context, "context_at": at, "offsets": array("i", offsets), "cls": 0}


def output(start: list[list[float]], end: list[list[float]]) -> SimpleNamespace:
    return SimpleNamespace(start_logits=torch.tensor(start), end_logits=torch.tensor(end))


def test_the_best_span_lies_in_the_context_and_does_not_run_backwards() -> None:
    reference = window("ab cd ef", 2, [0, 2, 3, 5, 6, 8])
    start = [[9.0, 9.0, 1.0, 0.0, 5.0, 9.0]]  # places 0, 1 and 5 are outside of the context
    end = [[9.0, 9.0, 2.0, 4.0, 1.0, 9.0]]
    (answer,) = read_answers(output(start, end), [reference])
    assert (answer.text, answer.score, answer.no_answer_score) == ("ef", 6.0, 18.0)


def test_the_best_span_equals_trying_all_of_them() -> None:
    draw = torch.Generator().manual_seed(0)
    length = 50
    offsets = [place for i in range(length - 2) for place in (i, i + 1)]
    reference = window("x" * 48, 1, offsets)
    for _ in range(20):
        start, end = torch.randn(2, 1, length, generator=draw)
        (answer,) = read_answers(SimpleNamespace(start_logits=start, end_logits=end), [reference])
        spans = [(s, e) for s in range(1, 49) for e in range(s, min(s + MAX_ANSWER_TOKENS, 49))]
        best = max(spans, key=lambda span: float(start[0, span[0]] + end[0, span[1]]))
        assert (answer.begin, answer.end) == (best[0] - 1, best[1])


def test_a_window_without_context_says_nothing() -> None:
    (answer,) = read_answers(output([[1.0, 2.0]], [[1.0, 2.0]]), [window("\u200b", 0, [])])
    assert (answer.text, answer.score) == ("", 2.0)
