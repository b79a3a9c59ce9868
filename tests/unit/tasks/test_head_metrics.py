"""Metrics of several labels and of numbers, beside plain counting; thresholds that no other one beats."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vramfit.tasks.parts.head_metrics import LabelMetrics, NumberMetrics, best_threshold
from vramfit.tasks.parts.heads import decide, problem_of, thresholds_of

SCORES = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]), st.booleans()), min_size=1)


def f1(probabilities: torch.Tensor, is_true: torch.Tensor, least: float) -> float:
    said = probabilities >= least
    both = int((said & is_true).sum())
    return 2 * both / max(int(said.sum() + is_true.sum()), 1)


def fed(metrics: Any, logits: torch.Tensor, labels: torch.Tensor, parts: int = 1) -> dict[str, Any]:
    """What comes of rows in some parts, the last ones from another process."""
    other = type(metrics)([f"label {n}" for n in range(labels.shape[1])])
    for number, (out, true) in enumerate(zip(logits.chunk(parts), labels.chunk(parts), strict=True)):
        (metrics if number == 0 else other).update(SimpleNamespace(logits=out), {"labels": true}, [])
    metrics.merge(other)
    result: dict[str, Any] = metrics.result()
    return result


@given(SCORES)
def test_no_threshold_gives_a_better_f1(rows: list[tuple[float, bool]]) -> None:
    probabilities = torch.tensor([score for score, _ in rows])
    is_true = torch.tensor([true for _, true in rows])
    chosen = best_threshold(probabilities, is_true)
    every = [*probabilities.tolist(), 0.5, 2.0]
    if is_true.any():
        assert f1(probabilities, is_true, chosen) == max(f1(probabilities, is_true, least) for least in every)
    else:
        assert chosen == 0.5


def test_a_half_is_kept_where_it_is_as_good() -> None:
    assert best_threshold(torch.tensor([0.01, 0.9]), torch.tensor([False, True])) == 0.5
    assert best_threshold(torch.tensor([0.01, 0.3]), torch.tensor([False, True])) == pytest.approx(0.155)


@pytest.mark.parametrize("parts", [1, 3])
def test_labels_are_counted_as_by_hand(parts: int) -> None:
    torch.manual_seed(0)
    names = [f"label {n}" for n in range(4)]
    logits, labels = torch.randn(30, 4), (torch.rand(30, 4) < 0.4).float()
    labels[:, 3], logits[:, 3] = 0, -9
    least = [0.3, 0.5, 0.7, 0.5]
    found = fed(LabelMetrics(names, least), logits, labels, parts)
    probabilities, is_true = logits.sigmoid(), labels.bool()
    each = {n: f1(probabilities[:, i], is_true[:, i], least[i]) for i, n in enumerate(names[:3])}
    assert found["label_f1"] == pytest.approx(each)  # nothing to say of a label that is nowhere
    assert found["macro_f1"] == pytest.approx(sum(each.values()) / 3)
    said = probabilities >= torch.tensor(least)
    assert found["micro_f1"] == pytest.approx(2 * int((said & is_true).sum()) / int(said.sum() + is_true.sum()))
    assert found["exact_match"] == pytest.approx(float((said == is_true).all(1).float().mean()))
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert found["loss"] == pytest.approx(float(bce), rel=1e-5)
    assert found["thresholds"] == dict(zip(names, least, strict=True))
    chosen = fed(LabelMetrics(names), logits, labels, parts)
    assert chosen["macro_f1"] >= found["macro_f1"]


def test_nothing_true_and_nothing_given_is_no_error() -> None:
    found = fed(LabelMetrics(["a", "b"]), torch.full((3, 2), -5.0), torch.zeros(3, 2))
    assert (found["micro_f1"], found["macro_f1"], found["exact_match"], found["label_f1"]) == (0, 0, 1, {})


def test_numbers_are_measured_each_and_together() -> None:
    true = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 50.0]])
    said = true + torch.tensor([[0.5, 0.0], [-0.5, 0.0], [0.5, 0.0], [-0.5, 0.0]])
    found = fed(NumberMetrics(["a", "b"]), said, true, 2)
    assert found["values"]["a"]["mse"] == pytest.approx(0.25)
    assert found["values"]["a"]["mae"] == pytest.approx(0.5)
    assert found["values"]["b"] == pytest.approx({"mse": 0.0, "mae": 0.0, "pearson": 1.0, "spearman": 1.0})
    assert found["mse"] == found["loss"] == pytest.approx(0.125)
    one = fed(NumberMetrics(["a"]), said[:, :1], true[:, :1])
    assert one["pearson"] == pytest.approx(float(torch.corrcoef(torch.stack([said[:, 0], true[:, 0]]))[0, 1]))
    assert "values" not in one


@pytest.mark.parametrize(
    ("config", "problem", "thresholds"),
    [
        ({"id2label": {0: "a", 1: "b"}}, "single", ()),
        ({"id2label": {0: "a"}}, "regression", ()),
        ({}, "single", ()),
        ({"problem_type": "regression", "id2label": {0: "a", 1: "b"}}, "regression", ()),
        ({"problem_type": "single_label_classification", "id2label": {0: "a"}}, "single", ()),
        (
            {"problem_type": "multi_label_classification", "id2label": {0: "a", 1: "b"}, "thresholds": [0.2, 1]},
            "multi-label",
            (0.2, 1.0),
        ),
        ({"id2label": {0: "a", 1: "b"}, "thresholds": [0.2]}, "single", ()),
        ({"id2label": {0: "a", 1: "b"}, "thresholds": ["x", None]}, "single", ()),
        ({"id2label": {0: "a", 1: "b"}, "thresholds": 3}, "single", ()),
    ],
)
def test_a_configuration_says_what_its_head_learned(
    config: dict[str, Any], problem: str, thresholds: tuple[float, ...]
) -> None:
    assert problem_of(config) == problem
    assert thresholds_of(config) == thresholds


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text("a|,;[]'\"0.1 ", max_size=6),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(st.lists(VALUES, max_size=6))
def test_any_labels_are_something(raw: list[Any]) -> None:
    assert decide(raw) in ("single", "multi-label", "regression")
