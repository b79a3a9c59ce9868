"""Saved models, opened to evaluate and predict with."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.training.small_runs import request_of, run, write_classes, write_model, write_questions

from vramfit.errors import CheckpointError, DataError, NoPlanFits, WorkloadError
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.device import RunDevice
from vramfit.runtime.trained import open_model
from vramfit.runtime.training.events import Event, Interrupted, Stepped
from vramfit.runtime.training.train import train


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_model_knows_its_task_and_its_labels(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    trained = open_model(str(tmp_path / "out"))
    assert (trained.task, trained.label_names) == ("sequence-classification", ("bad", "good"))
    data = str(write_questions(tmp_path / "qa.jsonl"))
    run(tmp_path, task="question-answering", data=data, output=str(tmp_path / "qa"), epochs=1)
    assert open_model(str(tmp_path / "qa")).task == "question-answering"


def test_an_encoder_has_no_answers(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    with pytest.raises(WorkloadError, match="has no head"):
        open_model(str(tmp_path / "m"))
    trained = open_model(str(tmp_path / "m"), task="sequence-classification")
    with pytest.raises(CheckpointError, match="no trained head for sequence-classification: classifier"):
        trained.check_head()
    data = write_classes(tmp_path / "d.csv")
    samples = trained.read(DataSource(path=str(data), task="sequence-classification", needs_labels=False))
    with pytest.raises(CheckpointError, match="no trained head"):
        trained.load(RunDevice("cpu"), samples)


def test_an_unfinished_run_is_named_with_what_finishes_it(tmp_path: Path) -> None:
    output = tmp_path / "out"
    checkpoint = output / "checkpoints" / "step-00000005"

    def stop(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(request_of(tmp_path), on_event=stop)
    for folder, what in ((output, "holds"), (checkpoint, f"is a checkpoint of {output},")):
        with pytest.raises(CheckpointError, match=f"^{folder} {what} an unfinished run.*of step 5") as caught:
            open_model(str(folder))
        assert f"vramfit train … --output {output} --resume" in str(caught.value.hint)
    run(tmp_path, resume=True, keep=9)
    with pytest.raises(CheckpointError, match="is a checkpoint, which only a run can go on from") as caught:
        open_model(str(checkpoint))
    assert str(caught.value.hint) == f"name the folder that the model is in: {output}"


def test_a_folder_of_no_run_and_a_finished_run_with_a_damaged_configuration_are_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_model(str(tmp_path))
    run(tmp_path, max_steps=1)
    (tmp_path / "out" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_model(str(tmp_path / "out"))


@pytest.mark.parametrize("task", ["token-classification", "question-answering", "masked-lm"])
def test_the_head_of_another_task_is_refused_though_its_weights_have_the_same_names(tmp_path: Path, task: str) -> None:
    run(tmp_path, max_steps=1)
    said = f"no trained head for {task}: it was saved as BertForSequenceClassification"
    with pytest.raises(CheckpointError, match=said) as caught:
        open_model(str(tmp_path / "out"), task=task)
    assert caught.value.hint == "leave --task out: its head is for sequence-classification"


@pytest.mark.parametrize("architectures", [None, ["BertModel"], ["BertForMaskedLM"], ["SomeoneElsesModel"]])
def test_a_head_that_the_configuration_does_not_name_is_found_in_the_weights(
    tmp_path: Path, architectures: list[str] | None
) -> None:
    run(tmp_path, max_steps=1)
    change_config(tmp_path / "out", architectures=architectures)
    trained = open_model(str(tmp_path / "out"), task="sequence-classification")
    trained.check_head()
    samples = trained.read(DataSource(path=str(tmp_path / "train.csv"), task="sequence-classification"))
    assert trained.load(RunDevice("cpu"), samples).max_tokens > 0


def test_a_batch_is_chosen_that_fits(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    trained = open_model(str(tmp_path / "out"))
    samples = trained.read(DataSource(path=str(tmp_path / "train.csv"), task="sequence-classification"))
    longest = max(samples.lengths)
    run_device = RunDevice("emulated", memory="64MiB")
    assert trained.load(run_device, samples, memory="64MiB").max_tokens == 256 * longest
    with pytest.raises(NoPlanFits, match="not even one sample"):
        trained.load(RunDevice("emulated", memory="1MiB"), samples, memory="1MiB")


def test_data_of_another_task_is_not_to_be_read_by_that_task(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1)
    trained = open_model(str(tmp_path / "out"))
    (tmp_path / "x.conll").write_text("anna B-person\nlives O\n")
    source = DataSource(path=str(tmp_path / "x.conll"), task=trained.task)
    for read in (trained.read, lambda source: next(trained.read_ahead(source))):
        with pytest.raises(DataError, match="looks like the text") as caught:
            read(source)
        assert "the model does sequence-classification" in str(caught.value.hint)
        assert "--task" not in str(caught.value.hint)


def test_single_texts_for_a_model_of_pairs_are_noted(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("text1,text2,label\nfine,great,same\nfine,poor,other\n")
    record = run(tmp_path, data=str(tmp_path / "pairs.csv"), max_steps=1)
    assert record.num_texts == 2
    trained = open_model(str(tmp_path / "out"))
    (tmp_path / "single.txt").write_text("fine great\n")
    single, pairs = (
        trained.read(DataSource(path=str(tmp_path / name), task=trained.task, needs_labels=False))
        for name in ("single.txt", "pairs.csv")
    )
    (note,) = trained.notes_on(single)
    assert note.startswith("the model learned from pairs of texts, and rows here have one")
    assert trained.notes_on(pairs) == ()
    (tmp_path / "out" / "run.json").write_text("{")
    assert open_model(str(tmp_path / "out")).notes_on(single) == ()
