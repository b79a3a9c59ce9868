"""Runs that learn several labels a text, or numbers: from data to a folder that evaluates, predicts and resumes."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.conftest import one_thread  # noqa: F401
from tests.unit.runtime.training.small_runs import BAD, GOOD, PLAIN, request_of, run, same_weights, weights
from transformers import AutoConfig, AutoModelForSequenceClassification
from typer.testing import CliRunner

from vramfit.cli.main import make_app
from vramfit.errors import DataError, VramfitError, WorkloadError
from vramfit.models.resolve import SavedHead, saved_head
from vramfit.runtime.trained import open_model
from vramfit.runtime.training.events import Event, Note, Started, Stepped
from vramfit.runtime.training.train import train
from vramfit.tasks.parts.heads import MULTI_LABEL, REGRESSION, SINGLE

USUAL: dict[str, Any] = {"epochs": 16, "lr": 2e-3}
NUM_ROWS = 160


def phrase(draw: random.Random, *telling: str) -> str:
    words = [*telling, *(draw.choice(PLAIN[:6]) for _ in range(draw.randint(1, 4)))]
    draw.shuffle(words)
    return " ".join(words)


def write(path: Path, header: list[str], rows: list[list[Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def several(path: Path, *, seed: int = 0) -> str:
    """A text is warm, dull, both or neither, as its words say."""
    draw, rows = random.Random(seed), []
    for n in range(NUM_ROWS):
        words = [*([draw.choice(GOOD[:3])] if n % 2 else []), *([draw.choice(BAD[:3])] if n % 4 > 1 else [])]
        rows.append([phrase(draw, *words), "|".join(["warm"] * (n % 2) + ["dull"] * (n % 4 > 1))])
    return write(path, ["text", "label"], rows)


def numbers(path: Path, *, seed: int = 0) -> str:
    """What good words there are, and what bad ones."""
    draw, rows = random.Random(seed), []
    for _ in range(NUM_ROWS):
        good, bad = draw.randint(0, 2), draw.randint(0, 2)
        text = phrase(draw, *draw.sample(GOOD[:3], good), *draw.sample(BAD[:3], bad))
        rows.append([text, good - bad + draw.random() / 50, bad])
    return write(path, ["text", "score", "dullness"], rows)


def cli(*words: str) -> Any:
    """What a verb says."""
    return CliRunner().invoke(make_app([words[0]]), list(words))


def test_several_labels_are_learned_saved_evaluated_and_predicted(tmp_path: Path) -> None:
    data, dev = several(tmp_path / "several.csv"), several(tmp_path / "dev.csv", seed=1)
    seen: list[Event] = []
    record = train(request_of(tmp_path, data=data, eval_data=dev, **USUAL), on_event=seen.append)
    assert any("40 of 160 rows have several labels" in e.text for e in seen if isinstance(e, Note))
    assert any("problem multi-label" in e.settings for e in seen if isinstance(e, Started))
    assert (record.best_metric, record.settings["problem"]) == ("micro_f1", MULTI_LABEL)
    assert record.evaluations[0].metrics["micro_f1"] < 0.95 < (record.best_value or 0)
    best = next(e.metrics for e in record.evaluations if e.step == record.best_step)
    out = tmp_path / "out"
    config = AutoConfig.from_pretrained(out)
    assert config.problem_type == "multi_label_classification"
    assert config.id2label == {0: "dull", 1: "warm"}
    assert config.thresholds == [best["thresholds"]["dull"], best["thresholds"]["warm"]]

    assert "f1 of warm" in cli("evaluate", str(out), dev).stdout
    evaluated = json.loads(cli("evaluate", str(out), dev, "--json").stdout)
    assert evaluated["micro_f1"] == pytest.approx(record.best_value)
    assert evaluated["thresholds"] == best["thresholds"]
    assert set(evaluated["label_f1"]) == {"dull", "warm"}
    assert evaluated["exact_match"] > 0.9

    texts = write(tmp_path / "texts.csv", ["text"], [["the film was great"], ["great and dull"], ["the film was"]])
    rows = [json.loads(line) for line in cli("predict", str(out), texts, "--all-scores").stdout.splitlines()]
    assert [{one["label"] for one in row["labels"]} for row in rows] == [{"warm"}, {"warm", "dull"}, set()]
    assert [len(row["scores"]) for row in rows] == [2, 2, 2]
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    batch = open_model(str(out)).tokenizer("great and dull", return_tensors="pt")
    with torch.no_grad():
        theirs = model(**batch).logits.sigmoid()[0]
    for one in rows[1]["scores"]:
        assert one["probability"] == pytest.approx(float(theirs[config.label2id[one["label"]]]), abs=1e-5)


def test_numbers_are_learned_saved_evaluated_and_predicted(tmp_path: Path) -> None:
    data, dev = numbers(tmp_path / "numbers.csv"), numbers(tmp_path / "dev.csv", seed=1)
    record = run(tmp_path, data=data, eval_data=dev, **USUAL)
    assert "predicted as numbers (regression)" in record.notes[0]
    assert (record.best_metric, record.label_names) == ("mse", ("score",))
    first = record.evaluations[0].metrics
    assert set(first) == {"mse", "mae", "pearson", "spearman", "loss"}
    assert (record.best_value or 9) < first["mse"] / 2
    out = tmp_path / "out"
    config = AutoConfig.from_pretrained(out)
    assert (config.problem_type, config.num_labels) == ("regression", 1)
    evaluated = json.loads(cli("evaluate", str(out), dev, "--json").stdout)
    assert evaluated["mse"] == pytest.approx(record.best_value)
    assert evaluated["pearson"] > 0.7
    texts = write(tmp_path / "texts.csv", ["text"], [["great fine film"], ["dull awful film"]])
    good, bad = (json.loads(line) for line in cli("predict", str(out), texts).stdout.splitlines())
    assert set(good) == {"row", "index", "value"}
    assert good["value"] > 0 > bad["value"]
    refused = cli("predict", str(out), texts, "--top-k", "1")
    assert refused.exit_code
    assert "predicts numbers" in str(refused.exception)


def test_several_numbers_a_row_have_names(tmp_path: Path) -> None:
    data = numbers(tmp_path / "numbers.csv")
    record = run(tmp_path, data=data, eval_data=data, label_column="score,dullness", epochs=2)
    assert record.label_names == ("score", "dullness")
    assert set(record.evaluations[0].metrics["values"]) == {"score", "dullness"}
    out = tmp_path / "out"
    assert json.loads(cli("evaluate", str(out), data, "--json").stdout)["mse"] == pytest.approx(record.best_value)
    row = json.loads(cli("predict", str(out), data, "--max-rows", "1").stdout)
    assert set(row["values"]) == {"score", "dullness"}


@pytest.mark.parametrize("make", [several, numbers])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path, make: Any) -> None:
    data = make(tmp_path / "data.csv")
    whole = {"data": data, "eval_data": data, "epochs": 2, "save_every": 3}
    run(tmp_path, **whole, output=str(tmp_path / "one"))

    class Stop(Exception):
        pass

    def stop(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 5:
            raise Stop

    with pytest.raises(Stop):
        train(request_of(tmp_path, **whole), on_event=stop)
    with pytest.raises(VramfitError, match=r"problem is '.*', and was None"):
        run(tmp_path, **whole, resume=True, problem=MULTI_LABEL)
    run(tmp_path, **whole, resume=True)
    assert same_weights(tmp_path / "one", tmp_path / "out")
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()


def test_adapters_are_saved_with_what_the_head_learned(tmp_path: Path) -> None:
    data = several(tmp_path / "several.csv")
    run(tmp_path, data=data, eval_data=data, lora=2, epochs=1)
    opened = open_model(str(tmp_path / "out"))
    assert (opened.problem, len(opened.thresholds)) == (MULTI_LABEL, 2)


def test_a_model_learns_something_else_than_before(tmp_path: Path) -> None:
    """What the source's configuration says of its old head is gone."""
    data = several(tmp_path / "several.csv")
    run(tmp_path, data=data, eval_data=data, max_steps=1)
    request = request_of(tmp_path, output=str(tmp_path / "next"), max_steps=1)
    train(type(request)(**(request.as_data() | {"model": str(tmp_path / "out")})))
    opened = open_model(str(tmp_path / "next"))
    assert (opened.problem, opened.thresholds, opened.label_names) == (SINGLE, (), ("bad", "good"))
    numbers_data = numbers(tmp_path / "numbers.csv")
    run(tmp_path, data=numbers_data, output=str(tmp_path / "last"), max_steps=1)
    assert open_model(str(tmp_path / "last")).problem == REGRESSION
    assert weights(tmp_path / "last")["classifier.weight"].shape == (1, 32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"label_smoothing": 0.1}, "label_smoothing is for one class a row"),
        ({"label_smoothing": 0.1, "problem": REGRESSION}, "label_smoothing is for one class a row"),
        ({"problem": "ranking"}, "problem 'ranking' is not one of"),
        ({"problem": REGRESSION, "task": "masked-lm"}, "problem regression is not for masked-lm"),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        run(tmp_path, data=several(tmp_path / "several.csv"), **changes)


def test_data_without_any_label_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "none.csv", ["text", "label"], [["fine", ""], ["dull", ""]])
    with pytest.raises(DataError, match="no row has a label"):
        run(tmp_path, data=data, problem=MULTI_LABEL)


@pytest.mark.parametrize(("make", "problem", "num_labels"), [(several, MULTI_LABEL, 2), (numbers, REGRESSION, 1)])
def test_an_emulated_run_is_planned_for_its_head_and_holds(
    tmp_path: Path, make: Any, problem: str, num_labels: int
) -> None:
    record = run(tmp_path, data=make(tmp_path / "data.csv"), device="emulated", memory="64MiB", max_steps=2)
    assert (record.measured_reserved_bytes or 0) <= (record.budget_bytes or 0)
    planned = json.loads((tmp_path / "out" / "plan.json").read_text())["workload"]
    assert (planned["problem"], planned["num_labels"]) == (problem, num_labels)


def test_a_reranker_that_learns_numbers_is_none_any_more(tmp_path: Path) -> None:
    data = numbers(tmp_path / "numbers.csv")
    request = request_of(tmp_path, data=data, max_steps=1)
    path = tmp_path / "source" / "config.json"
    marks = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | marks))
    train(request)
    opened = open_model(str(tmp_path / "out"))
    assert (opened.task, opened.problem) == ("sequence-classification", REGRESSION)
    assert saved_head(tmp_path / "out") == SavedHead(task=opened.task, label_names=("score",), problem=REGRESSION)
    saved = tmp_path / "out" / "config.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | marks))
    assert saved_head(tmp_path / "out") == SavedHead(task="reranking", label_names=())


def test_a_reranker_that_was_saved_for_logits_gives_scores_once_it_has_learned(tmp_path: Path) -> None:
    data = write(
        tmp_path / "pairs.csv", ["query", "positive", "score"], [["good", "fine", 0.5], ["bad", "poor", 1]] * 4
    )
    request = request_of(tmp_path, data=data, max_steps=1, task="reranking")
    path = tmp_path / "source" / "config.json"
    logits = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | logits))
    train(request)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["sentence_transformers"]["activation_fn"].endswith(".Sigmoid")
