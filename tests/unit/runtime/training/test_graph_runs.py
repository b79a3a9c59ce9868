"""Runs with recorded passes, with calls kept in place of CUDA graphs: evaluated, interrupted, resumed."""

from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.test_graphs import Calls
from tests.unit.runtime.training.small_runs import request_of, run, same_weights, weights, write_classes, write_model

from vramfit.runtime import graphs
from vramfit.runtime.training.events import Interrupted, Stepped
from vramfit.runtime.training.session import Session
from vramfit.runtime.training.train import train

SETTINGS: dict[str, Any] = {"attention": "packed", "micro_batch": 4, "save_every": 2}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """As on a GPU: what is replayed is called again."""
    calls, rehearse = Calls(), Session.rehearse
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: calls)

    def ready(session: Session, checkpoint: Any) -> None:
        session.stepper._graph_use.is_on = True
        rehearse(session, checkpoint)

    monkeypatch.setattr(Session, "rehearse", ready)
    return calls


def test_a_recorded_run_learns_what_another_learns(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    dev = str(write_classes(tmp_path / "dev.csv", num_rows=16, seed=1))
    quiet: dict[str, Any] = SETTINGS | {"eval_data": dev}
    write_model(tmp_path / "source", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    plain = run(tmp_path, output=str(tmp_path / "plain"), **quiet)
    calls: Calls = request.getfixturevalue("recorded")
    made = run(tmp_path, **quiet)
    assert calls.num_forgotten > 2  # evaluations were given the memory
    assert made.train_loss == pytest.approx(plain.train_loss, rel=1e-4)
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "out")
    for name in one:
        if not name.endswith("key.bias"):  # its gradient is nothing but rounding, which AdamW makes large
            assert (one[name] - other[name]).norm() <= 1e-2 * one[name].norm() + 1e-3, name


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path: Path, recorded: Calls) -> None:
    run(tmp_path, output=str(tmp_path / "whole"), **SETTINGS)

    def stop(event: Any) -> None:
        if isinstance(event, Stepped) and event.step == 5:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        train(request_of(tmp_path, **SETTINGS), on_event=stop)
    run(tmp_path, resume=True, **SETTINGS)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_without_a_gpu_it_is_said(tmp_path: Path) -> None:
    record = run(tmp_path, epochs=1, graphs=True)
    assert any("passes are not captured" in note for note in record.notes)
