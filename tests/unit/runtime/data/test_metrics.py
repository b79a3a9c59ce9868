"""Metrics by hand, and the same however the batches are split."""

import json
import pickle
from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramfit.errors import WorkloadError
from vramfit.runtime.data.samples import Samples, make_metrics
from vramfit.tasks.parts.results import ClassCounts, RunningMetrics
from vramfit.tasks.sequence_classification import ClassMetrics

QUESTIONS = [
    {"question": "where is anna", "context": "a b c d e f good bad film very berlin a b", "answers": ["very berlin"]},
    {"question": "where is", "context": "good film", "answers": ["film", "good film"]},
    {"question": "where", "context": "bad film in berlin", "answers": ["berlin"]},
]


def made(read: Any, write: Any, task: str) -> Samples:
    content = {
        "sequence-classification": "\n".join(
            json.dumps({"text": "a b " * (i % 5), "label": i % 3}) for i in range(1, 13)
        ),
        "token-classification": "\n".join(
            json.dumps(
                {"tokens": ["anna", "is", "in", "berlinx"][: i % 4 + 1], "tags": ["B-p", "O", "O", "B-l"][: i % 4 + 1]}
            )
            for i in range(12)
        ),
        "question-answering": "\n".join(json.dumps(q) for q in QUESTIONS),
        "masked-lm": "\n".join(json.dumps({"text": "a b c d e f good film " * (i % 3 + 1)}) for i in range(12)),
    }[task]
    content = content.replace('"text": ""', '"text": "a"')
    samples: Samples = read(write("a.jsonl", content), task, max_length=12, stride=2)
    return samples


def answer_of(samples: Samples, batch: dict[str, torch.Tensor], indices: list[int]) -> Any:
    """Random logits that depend on the sample alone, not on its batch."""
    width = batch["input_ids"].shape[1]
    classes = {"sequence-classification": 3, "token-classification": 3, "masked-lm": 90, "question-answering": 2}
    rows = [torch.randn(12, classes[samples.task], generator=torch.Generator().manual_seed(i)) for i in indices]
    logits = torch.stack(rows)[:, :width]
    if samples.task == "sequence-classification":
        return SimpleNamespace(logits=logits[:, 0])
    if samples.task == "question-answering":
        hidden = logits.masked_fill(batch["attention_mask"][..., None] == 0, -1e4)
        return SimpleNamespace(start_logits=hidden[..., 0], end_logits=hidden[..., 1])
    return SimpleNamespace(logits=logits)


def measured(samples: Samples, batches: list[list[int]], num_parts: int = 1) -> dict[str, float]:
    """What is found over batches that are dealt out to several metrics, which are merged."""
    parts: list[RunningMetrics] = [make_metrics(samples) for _ in range(num_parts)]
    for number, indices in enumerate(batches):
        batch = samples.collate(indices)
        references = [samples.references[i] for i in indices]
        parts[number % num_parts].update(answer_of(samples, batch, indices), batch, references)
    metrics, *others = pickle.loads(pickle.dumps(parts))  # they come from other processes
    for other in others:
        metrics.merge(other)
    result: dict[str, float] = metrics.result()
    assert metrics.best_metric in result
    return result


TASKS = ["sequence-classification", "token-classification", "question-answering", "masked-lm"]


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_the_result_is_the_same_however_batches_are_split_and_shared_out(
    read: Any, write: Any, task: str, data: st.DataObject
) -> None:
    samples = made(read, write, task)
    whole = measured(samples, [list(range(len(samples)))])
    order = data.draw(st.permutations(range(len(samples))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(samples) - 1))))
    batches = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(samples)], strict=True)]
    assert measured(samples, batches) == pytest.approx(whole, rel=1e-6)
    assert measured(samples, batches, num_parts=3) == pytest.approx(whole, rel=1e-6)


def test_two_classes_by_hand() -> None:
    counts = ClassCounts(2)
    counts.add([1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 1, 0])
    scores = counts.scores()
    # true yes 2, true no 4, false yes 1, false no 1
    assert scores["accuracy"] == 6 / 8
    assert scores["f1"] == pytest.approx(2 / 3)
    assert scores["macro_f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert scores["mcc"] == pytest.approx((2 * 4 - 1 * 1) / (3 * 3 * 5 * 5) ** 0.5)


def test_macro_f1_is_over_classes_that_occur() -> None:
    counts = ClassCounts(5)
    counts.add([0, 0, 1, 2], [0, 1, 1, 1])
    assert counts.scores() == {"accuracy": 0.5, "macro_f1": pytest.approx((2 / 3 + 1 / 2 + 0) / 3)}


def test_one_class_only_has_no_correlation() -> None:
    counts = ClassCounts(2)
    counts.add([0, 0], [0, 0])
    assert counts.scores() == {"accuracy": 1.0, "macro_f1": 1.0, "f1": 0.0, "mcc": 0.0}


def test_the_loss_is_the_mean_over_samples() -> None:
    metrics = ClassMetrics(2)
    logits = torch.tensor([[0.0, 0.0], [0.0, log(3)]])
    metrics.update(SimpleNamespace(logits=logits), {"labels": torch.tensor([0, 1])}, [{}, {}])
    assert metrics.result()["loss"] == pytest.approx((log(2) + log(4 / 3)) / 2)


def perfect(batch: dict[str, torch.Tensor], name: str, width: int) -> torch.Tensor:
    return 20.0 * torch.nn.functional.one_hot(batch[name].clamp(min=0), width).float()


def test_tags_that_are_all_right_and_words_that_were_cut(read: Any, write: Any) -> None:
    row = {"tokens": ["anna", "is", "in", "berlin"], "tags": ["B-p", "O", "O", "B-l"]}
    for max_length, expected in ((8, (1.0, 1.0, 1.0)), (5, (1.0, 0.5, 0.75))):
        samples = read(write("a.jsonl", json.dumps(row)), "token-classification", max_length=max_length)
        metrics, batch = make_metrics(samples), samples.collate([0])
        metrics.update(SimpleNamespace(logits=perfect(batch, "labels", 3)), batch, samples.references)
        result = metrics.result()
        assert (result["precision"], result["recall"], result["accuracy"]) == expected


def test_windows_of_a_context_are_merged_by_the_best_score(read: Any, write: Any) -> None:
    samples = made(read, write, "question-answering")
    assert len(samples) > len(QUESTIONS)
    metrics, batch = make_metrics(samples), samples.collate(range(len(samples)))
    width = batch["input_ids"].shape[1]
    answered = (batch["start_positions"] > 0)[:, None]
    start, end = (perfect(batch, name, width) * answered for name in ("start_positions", "end_positions"))
    metrics.update(SimpleNamespace(start_logits=start, end_logits=end), batch, samples.references)
    result = metrics.result()
    assert (result["exact_match"], result["f1"]) == (100.0, 100.0)


def test_silence_is_an_answer_only_where_some_questions_have_none(read: Any, write: Any) -> None:
    rows = [QUESTIONS[1] | {"answers": []}, QUESTIONS[2]]
    for questions, exact in ((rows, 50.0), (QUESTIONS[1:], 0.0)):
        samples = read(write("a.jsonl", "\n".join(map(json.dumps, questions))), "question-answering")
        metrics, batch = make_metrics(samples), samples.collate(range(2))
        silent = torch.zeros_like(batch["input_ids"], dtype=torch.float)
        silent[:, 0] = 9
        metrics.update(SimpleNamespace(start_logits=silent, end_logits=silent), batch, samples.references)
        assert metrics.result()["exact_match"] == exact


def test_perplexity_of_knowing_nothing_is_the_vocabulary(read: Any, write: Any) -> None:
    samples = made(read, write, "masked-lm")
    metrics, batch = make_metrics(samples), samples.collate(range(4))
    assert not metrics.higher_is_better
    logits = torch.zeros(*batch["input_ids"].shape, 90)
    metrics.update(SimpleNamespace(logits=logits), batch, samples.references[:4])
    assert metrics.result()["loss"] == pytest.approx(log(90), rel=1e-6)
    assert metrics.result()["perplexity"] == pytest.approx(exp(log(90)), rel=1e-5)


def test_samples_without_labels_cannot_be_measured(read: Any, write: Any) -> None:
    samples = read(write("a.csv", "text\ngood\n"), needs_labels=False)
    with pytest.raises(WorkloadError, match="no labels"):
        make_metrics(samples)
