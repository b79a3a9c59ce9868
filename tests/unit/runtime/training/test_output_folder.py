"""The output folder: one run at a time, however the last one ended, and nothing left where nothing came of it."""

import errno
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.unit.runtime.training.small_runs import request_of, run, same_weights, write_model
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from vramfit.errors import NoPlanFits, VramfitError
from vramfit.loader.load import load
from vramfit.runtime.training.checkpoints import LOCK, PLAN, held
from vramfit.runtime.training.events import Event, Interrupted, Loading, Stepped
from vramfit.runtime.training.train import train


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_into_the_same_folder_is_refused_and_changes_nothing(tmp_path: Path, resume: bool) -> None:
    tried: list[int] = []

    def second(event: Event) -> None:
        if not isinstance(event, Stepped) or event.step not in (2, 7):  # with no checkpoint yet, and with one
            return
        before = content(tmp_path / "out")
        with pytest.raises(VramfitError, match=f"another process trains into {tmp_path / 'out'}") as caught:
            run(tmp_path, resume=resume)
        assert "choose another --output" in str(caught.value.hint)
        assert content(tmp_path / "out") == before
        tried.append(event.step)

    train(request_of(tmp_path), on_event=second)
    run(tmp_path, output=str(tmp_path / "alone"))
    assert tried == [2, 7]
    assert same_weights(tmp_path / "alone", tmp_path / "out")
    assert not (tmp_path / "out" / LOCK).exists()


def killed_at_step_3(folder: Path) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)  # as in the process that goes on
    train(request_of(folder, save_every=2), on_event=kill)


def test_the_lock_of_a_killed_run_goes_with_it_and_its_file_is_no_obstacle(tmp_path: Path) -> None:
    request = request_of(tmp_path)  # the model is written here, once
    code = (
        f"from pathlib import Path; from {__name__} import killed_at_step_3; killed_at_step_3(Path({str(tmp_path)!r}))"
    )
    assert warm.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert (tmp_path / "out" / LOCK).exists()
    run(tmp_path, save_every=2, resume=True)
    run(tmp_path, save_every=2, output=str(tmp_path / "whole"))
    assert same_weights(tmp_path / "whole", request.output)


def test_a_folder_with_a_lock_file_is_a_transformers_folder(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1)
    with held(tmp_path / "out"):
        assert (tmp_path / "out" / LOCK).exists()
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "bad", 1: "good"}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_where_there_are_no_locks_runs_go_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path / "out"), held(tmp_path / "out"):
        (tmp_path / "out" / "run.json").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]


def test_a_lock_file_that_its_holder_removes_meanwhile_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would hold two files of the same name."""
    lock = fcntl.flock
    seen: list[int] = []

    def removed_first(handle: int, how: int) -> None:
        if not seen:
            (tmp_path / "out" / LOCK).unlink()
        seen.append(handle)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with held(tmp_path / "out"):
        assert len(seen) == 2
        with pytest.raises(VramfitError, match="another process"), held(tmp_path / "out"):
            pass


def test_a_refused_run_leaves_no_folder_behind(tmp_path: Path) -> None:
    output = tmp_path / "new" / "deep"
    with pytest.raises(NoPlanFits):
        run(tmp_path, output=str(output), device="emulated", memory="1MiB")
    assert not output.parent.exists()

    def interrupt(event: Event) -> None:
        if isinstance(event, Loading):
            assert (output / "plan.json").exists()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="nothing was trained yet"):
        train(request_of(tmp_path, output=str(output), device="emulated", memory="64MiB"), on_event=interrupt)
    assert not output.parent.exists()


def test_a_folder_that_was_there_or_holds_more_than_a_plan_stays(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(NoPlanFits):
        run(tmp_path, output=str(mine), device="emulated", memory="1MiB")
    assert list(mine.iterdir()) == []
    with held(tmp_path / "out"):
        for name in (PLAN, "notes.txt"):
            (tmp_path / "out" / name).touch()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["notes.txt", "plan.json"]


def test_weights_that_transformers_would_join_are_saved_as_the_model_has_them(tmp_path: Path) -> None:
    """Nomic's queries, keys and values are one tensor in its published form, which is not loaded."""
    folder = write_model(tmp_path / "source")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    nomic = AutoModel.from_config(AutoConfig.for_model("nomic_bert", vocab_size=64, **sizes))
    nomic.save_pretrained(folder, save_original_format=False)
    run(tmp_path, max_steps=1)
    model, _ = load(str(tmp_path / "out"), device="cpu")
    expected = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
