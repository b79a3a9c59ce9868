"""Runs that learn vectors of texts, from every form of data, on the CPU."""

import csv
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import warm
from tests.unit.runtime.training.small_runs import BAD, GOOD, PLAIN, request_of, run, same_weights

from vramfit.errors import DataError, WorkloadError
from vramfit.runtime.training.events import Event, Interrupted, Note, Stepped
from vramfit.runtime.training.train import train

USUAL = {"task": "embedding", "batch": 12, "lr": 3e-3}


def write(path: Path, header: list[str], rows: list[list[Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def phrase(draw: random.Random, *telling: str) -> str:
    """Telling words among others, in any order."""
    words = [*telling, *(draw.choice(PLAIN[:6]) for _ in range(draw.randint(1, 4)))]
    draw.shuffle(words)
    return " ".join(words)


def pairs(path: Path, *, seed: int = 0, num_rows: int = 60, negatives: int = 0) -> str:
    """Two phrases of the same two telling words, and phrases of others."""
    draw, rows = random.Random(seed), []
    for _ in range(num_rows):
        kind, *others = draw.sample([(g, b) for g in GOOD for b in BAD], 1 + negatives)
        rows.append([phrase(draw, *kind), phrase(draw, *kind), *(phrase(draw, *other) for other in others)])
    return write(path, ["anchor", "positive", *(f"negative_{n}" for n in range(negatives))], rows)


def scored(path: Path, *, seed: int = 0) -> str:
    draw, rows = random.Random(seed), []
    for _ in range(60):
        one, other = draw.sample(GOOD, 2), draw.sample(GOOD, 2)
        rows.append([phrase(draw, *one), phrase(draw, *other), len({*one} & {*other})])
    return write(path, ["sentence1", "sentence2", "score"], rows)


def classes(path: Path, *, seed: int = 0) -> str:
    draw = random.Random(seed)
    return write(path, ["text", "label"], [[phrase(draw, word), word] for word in GOOD for _ in range(8)])


def killed_at(step: int) -> Callable[[Event], None]:
    def kill(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def stopped_at(step: int) -> Callable[[Event], None]:
    def stop(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return stop


def test_a_run_on_pairs_finds_more_positives_than_before(tmp_path: Path) -> None:
    data, dev = pairs(tmp_path / "pairs.csv"), pairs(tmp_path / "dev.csv", seed=1, num_rows=40)
    notes: list[str] = []
    request = request_of(tmp_path, data=data, eval_data=dev, epochs=12, **USUAL)
    record = train(request, on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
    assert record.best_metric == "mrr_at_10"
    first, best = record.evaluations[0].metrics, max(e.metrics["mrr_at_10"] for e in record.evaluations)
    assert best > first["mrr_at_10"] + 0.1
    assert set(first) == {"mrr_at_10", "recall_at_1", "recall_at_10"}
    assert record.num_samples == 60
    assert record.num_steps == 60
    assert any("read as pairs (anchor, positive), which loss in-batch learns from" in note for note in notes)


@pytest.mark.parametrize(
    ("make", "changes", "metric"),
    [
        (classes, {}, "accuracy_at_1"),
        (scored, {}, "spearman"),
        (pairs, {"micro_batch": 3}, "mrr_at_10"),
    ],
    ids=["classes", "scored", "pairs"],
)
def test_an_interrupted_run_goes_on_to_the_same_weights(
    tmp_path: Path, make: Callable[..., str], changes: dict[str, Any], metric: str
) -> None:
    settings = USUAL | {"data": make(tmp_path / "data.csv"), "eval_data": make(tmp_path / "dev.csv", seed=1), **changes}
    whole = run(tmp_path, output=str(tmp_path / "whole"), **settings)
    request = request_of(tmp_path, resume=True, **settings)
    for step in (2, 6):
        with pytest.raises(Interrupted, match=f"after step {step}; its checkpoint is saved"):
            train(request, on_event=stopped_at(step))
    record = train(request)
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    assert record.best_metric == metric
    assert [e.metrics for e in record.evaluations] == [e.metrics for e in whole.evaluations]


def test_a_run_that_was_killed_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    data = pairs(tmp_path / "pairs.csv")
    with Path(data).open("a", encoding="utf-8") as file:
        file.writelines(f"{word} film,the same text\n" for word in GOOD)  # of which no two meet
    settings = USUAL | {"data": data, "save_every": 3}
    run(tmp_path, output=str(tmp_path / "whole"), **settings)
    code = (
        "import sys; from tests.unit.runtime.training.test_embedding_runs import *; "
        f"train(request_of(Path(sys.argv[1]), **{settings!r}), on_event=killed_at(8))"
    )
    child = warm.run([sys.executable, "-c", code, str(tmp_path)])
    assert child.returncode == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())[-1] == "step-00000006"
    record = run(tmp_path, resume=True, **settings)
    assert record.num_sessions == 2
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def with_labels(path: Path, value: Callable[[int], Any], **more: Any) -> str:
    """Pairs, with negatives or without, and a number for each row."""
    with Path(pairs(path, **more)).open(encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return write(path, [*header, "label"], [[*row, value(number)] for number, row in enumerate(rows)])


@pytest.mark.parametrize(
    ("loss", "value", "negatives"),
    [
        ("in-batch", None, 1),
        ("in-batch-symmetric", None, 0),
        ("triplet", None, 1),
        ("contrastive", lambda n: n % 2, 0),
        ("cosent", lambda n: n / 7, 0),
        ("angle", lambda n: n / 7, 0),
        ("margin-mse", lambda n: n / 7, 1),
        ("margin-mse", lambda n: [n / 7, 0.5], 2),
    ],
)
def test_every_loss_learns_from_the_data_it_is_for(
    tmp_path: Path, loss: str, value: Callable[[int], Any] | None, negatives: int
) -> None:
    path = tmp_path / "data.csv"
    data = pairs(path, negatives=negatives) if value is None else with_labels(path, value, negatives=negatives)
    losses: list[float] = []
    request = request_of(tmp_path, data=data, loss=loss, matryoshka=(32, 8), **USUAL | {"epochs": 8})
    train(request, on_event=lambda e: losses.append(e.loss) if isinstance(e, Stepped) else None)
    assert len(losses) == 40
    assert sum(losses[-5:]) < sum(losses[:5])


def test_negatives_of_a_row_are_learned_from_and_compared(tmp_path: Path) -> None:
    data = pairs(tmp_path / "data.csv", negatives=2)
    record = run(tmp_path, data=data, eval_data=pairs(tmp_path / "dev.csv", seed=1, negatives=2), **USUAL)
    assert {"mrr_at_10", "accuracy"} < set(record.evaluations[0].metrics)


def test_scored_pairs_may_be_what_pairs_are_evaluated_on(tmp_path: Path) -> None:
    dev = scored(tmp_path / "dev.csv")
    record = run(tmp_path, data=pairs(tmp_path / "data.csv"), eval_data=dev, loss="in-batch", epochs=1, **USUAL)
    assert record.best_metric == "spearman"


def test_a_batch_is_counted_in_samples_not_in_texts(tmp_path: Path) -> None:
    notes: list[str] = []
    request = request_of(tmp_path, data=pairs(tmp_path / "d.csv", num_rows=9), epochs=1, **USUAL | {"batch": 64})
    record = train(request, on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
    assert "A batch of 64 is more than there is: each step sees all 9 samples." in notes
    assert record.num_steps == 1


def test_what_the_data_contradicts_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    data = pairs(tmp_path / "data.csv")
    with pytest.raises(WorkloadError, match="texts 3 was asked for, and the data asks for 2"):
        run(tmp_path, data=data, texts=3, **USUAL)
    with pytest.raises(DataError, match="loss triplet learns from pairs with negatives"):
        run(tmp_path, data=data, loss="triplet", **USUAL)
    assert not (tmp_path / "out" / "model.safetensors").exists()
