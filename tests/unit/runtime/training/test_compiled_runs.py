"""Runs with compiled layers: as long as it works, and as they were where it does not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.small_runs import request_of, run, same_weights, write_model

from vramfit.runtime.training.events import Note
from vramfit.runtime.training.train import train
from vramfit.techniques import compiling


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_run_learns_the_same_and_says_what_compiling_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "apply", partial(compiling.apply, backend="eager"))
    write_model(tmp_path / "source")
    notes: list[str] = []
    settings: dict[str, Any] = {"epochs": 1}
    plain = run(tmp_path, output=str(tmp_path / "plain"), **settings)
    request = request_of(tmp_path, compile=True, **settings)
    compiled = train(request, on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
    assert compiled.train_loss == pytest.approx(plain.train_loss, rel=1e-4)
    assert any("Layers are compiled" in note for note in notes)
    assert compiled.settings["compile"] is True
    assert 0 < compiled.compile_s < compiled.time_s
    assert plain.compile_s == 0
    assert "compile" not in plain.settings


def test_where_compiling_fails_the_run_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compiling, "apply", partial(compiling.apply, backend=broken))
    run(tmp_path, output=str(tmp_path / "plain"), epochs=1)
    record = run(tmp_path, epochs=1, compile=True)
    assert any("not compiled" in note and "no such instruction" in note for note in record.notes)
    assert record.compile_s == 0
    assert same_weights(tmp_path / "plain", tmp_path / "out")


def test_without_a_compiler_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    record = run(tmp_path, epochs=1, compile=True)
    assert record.notes == ("layers are not compiled: there is no C++ compiler here",)
