"""`vramfit predict` with scores of more than the best label."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.serve.small_servers import write_head

from vramfit.cli.main import main


def predict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, Any, str]:
    """Exit code, rows and what was said."""
    monkeypatch.setattr(sys, "argv", ["vramfit", "predict", *arguments, "--device", "cpu"])
    with pytest.raises(SystemExit) as left:
        main()
    told = capsys.readouterr()
    return left.value.code, [json.loads(line) for line in told.out.splitlines()], told.err  # type: ignore[return-value]


def test_all_scores_or_the_best_few_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = str(write_head(tmp_path / "model", "sequence-classification")), tmp_path / "data.txt"
    data.write_text("the film was great\nthe music was dull\n")
    _, plain, _ = predict(monkeypatch, capsys, model, str(data))
    assert [set(row) for row in plain] == [{"row", "index", "label", "probability"}] * 2
    _, every, _ = predict(monkeypatch, capsys, model, str(data), "--all-scores")
    assert [sorted(s["label"] for s in row["scores"]) for row in every] == [["bad", "good"]] * 2
    assert [{**row, "scores": []} for row in every] == [{**row, "scores": []} for row in plain]
    _, best, _ = predict(monkeypatch, capsys, model, str(data), "--top-k", "1")
    assert [row["scores"] for row in best] == [row["scores"][:1] for row in every]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--all-scores", "--top-k", "2"), "give one"),
        (
            ("--all-scores",),
            "--all-scores is for models with labels, and this one does masked-lm: take --top-k, up to 100",
        ),
        (("--top-k", "101"), "top_k 101 is more than the 100 scores that are given for masked-lm"),
    ],
)
def test_scores_that_cannot_be_given_are_refused(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, data = str(write_head(tmp_path / "model", "masked-lm")), tmp_path / "data.txt"
    data.write_text("the film was [MASK]\n")
    code, rows, told = predict(monkeypatch, capsys, model, str(data), *arguments)
    assert (code, rows) == (2, [])
    assert said in told
