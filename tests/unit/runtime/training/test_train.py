"""Fine-tuning end to end on the CPU: every task, every technique, and whatever may come between."""

import errno
import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.small_runs import (
    request_of,
    run,
    same_weights,
    weights,
    write_classes,
    write_model,
    write_questions,
    write_tags,
    write_texts,
)
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from vramfit.errors import BudgetExceeded, CheckpointError, DataError, VramfitError, WorkloadError
from vramfit.loader.load import load
from vramfit.monitor.sources import Reading
from vramfit.records.codec import from_json, to_json
from vramfit.records.plan import Plan
from vramfit.records.run import RunRecord
from vramfit.runtime.device import RunDevice
from vramfit.runtime.training import checkpoints
from vramfit.runtime.training.events import (
    Evaluated,
    Event,
    Interrupted,
    Loading,
    Note,
    Saved,
    Started,
    Stepped,
    Terminated,
)
from vramfit.runtime.training.progress import Diverged
from vramfit.runtime.training.train import train


@pytest.fixture
def dev(tmp_path: Path) -> str:
    return str(write_classes(tmp_path / "dev.csv", num_rows=20, seed=5))


def test_sentences_are_learned_and_the_record_says_how(tmp_path: Path, dev: str) -> None:
    write_classes(tmp_path / "train.csv", num_rows=160)
    record = run(tmp_path, eval_data=dev, epochs=8, lr=3e-3)
    assert record.status == "completed"
    assert record.best_metric == "accuracy"
    assert record.best_value is not None
    assert record.best_value >= 0.9
    assert record.num_steps == 160
    assert record.label_names == ("bad", "good")
    assert from_json(RunRecord, to_json(record)) == record
    assert from_json(RunRecord, (tmp_path / "out" / "run.json").read_text()) == record


@pytest.mark.parametrize(
    ("task", "write", "metric", "least"),
    [
        ("token-classification", write_tags, "f1", 0.8),
        ("question-answering", write_questions, "exact_match", 60.0),
        ("masked-lm", write_texts, "loss", None),
    ],
)
def test_every_task_runs_end_to_end(tmp_path: Path, task: str, write: Any, metric: str, least: float | None) -> None:
    data = str(write(tmp_path / ("d.txt" if task == "masked-lm" else "d.jsonl")))
    record = run(tmp_path, task=task, data=data, eval_data=data, epochs=8, lr=3e-3)
    first, last = (record.evaluations[i].metrics[metric] for i in (0, -1))
    assert last >= least if least is not None else last < first
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"][0].startswith("BertFor")


@pytest.mark.parametrize(
    ("task", "write", "metric"),
    [
        ("sequence-classification", write_classes, "accuracy"),
        ("token-classification", write_tags, "f1"),
        ("question-answering", write_questions, "exact_match"),
        ("masked-lm", write_texts, "loss"),
    ],
)
def test_packed_runs_learn_what_padded_ones_learn(tmp_path: Path, task: str, write: Any, metric: str) -> None:
    """Without dropout the losses are the same but for rounding; in texts with answers, padding counts no more.

    All samples are one batch: those of packed runs are drawn otherwise, since like lengths need not meet.
    """
    names = {"sequence-classification": "d.csv", "masked-lm": "d.txt"}
    data = str(write(tmp_path / names.get(task, "d.jsonl")))
    write_model(tmp_path / "source", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    settings = {"task": task, "data": data, "eval_data": data, "micro_batch": 4, "batch": 64, "epochs": 4}
    padded, packed = (
        run(tmp_path, output=str(tmp_path / str(attention)), attention=attention, **settings)
        for attention in (None, "packed")
    )
    within = 0.2 if task == "question-answering" else 1e-3
    assert packed.settings["attention"] == "packed"
    for one, other in zip(padded.evaluations, packed.evaluations, strict=True):
        assert other.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=within)
        assert metric in other.metrics
    assert "packed" not in (tmp_path / "packed" / "config.json").read_text()


def test_a_run_with_8bit_moments_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.techniques.adamw_8bit.LEAST_QUANTIZED", 256)  # the model is small
    run(tmp_path, output=str(tmp_path / "whole"), optimizer="adamw-8bit")
    request = request_of(tmp_path, resume=True, optimizer="adamw-8bit")
    with pytest.raises(Interrupted):
        train(request, on_event=stopped_at(5))
    train(request)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_the_saved_folder_is_a_transformers_folder(tmp_path: Path) -> None:
    run(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "bad", 1: "good"}
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("the film was fine", return_tensors="pt")
    assert model(**tokens).logits.shape == (1, 2)


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["tokenizer.json"]


def test_a_loss_that_is_read_late_is_told_all_the_same(
    tmp_path: Path, dev: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the next step is sent before the loss of this one is read."""

    def told(name: str) -> list[Any]:
        seen: list[Any] = []
        request = request_of(tmp_path, output=str(tmp_path / name), eval_data=dev, save_every=4, eval_every=3)
        train(request, on_event=seen.append)
        steps = [(e.step, e.epoch, e.loss, e.lr) for e in seen if isinstance(e, Stepped)]
        return [*steps, [(type(e), e.result.step) for e in seen if isinstance(e, Evaluated)]]

    at_once = told("at once")
    monkeypatch.setattr(RunDevice, "computes_apart", property(lambda self: True))
    assert told("late") == at_once
    assert same_weights(tmp_path / "at once", tmp_path / "late")
    kept = [checkpoints.CheckpointStore(tmp_path / name / "checkpoints").newest() for name in ("at once", "late")]
    progress = [found.state()["progress"] for found in kept if found is not None]
    assert [p["losses"] for p in progress] == [progress[0]["losses"]] * 2
    assert len(progress[0]["losses"]) == progress[0]["step"]


def test_a_run_that_was_short_of_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = train(request_of(tmp_path, device="emulated", memory="1GiB", output=str(tmp_path / "plenty")))
    assert plenty.num_retries == 0
    assert not any("memory was short" in note for note in plenty.notes)
    monkeypatch.setattr(RunDevice, "num_retries", property(lambda self: 7000))
    short = train(request_of(tmp_path, device="emulated", memory="1GiB", output=str(tmp_path / "short")))
    assert short.num_retries == 7000
    assert any("gave back all that it had cached 7,000 times" in note for note in short.notes)


def test_other_libraries_say_nothing_while_a_model_is_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    request = request_of(tmp_path, max_steps=1)
    capfd.readouterr()
    train(request)
    assert capfd.readouterr() == ("", "")


def test_what_was_given_back_before_a_run_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([5, 12])
    monkeypatch.setattr("vramfit.runtime.device.find_device", lambda name, *more: torch.device(name or "cuda"))
    memory = SimpleNamespace(read=lambda: Reading(num_retries=next(counts)))
    monkeypatch.setattr("vramfit.runtime.device.CudaMemory", lambda index: memory)
    assert RunDevice("cuda").num_retries == 7
    assert RunDevice("cpu").num_retries is None


def stopped_at(step: int, number: int = signal.SIGINT) -> Any:
    def on_event(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == step:
            os.kill(os.getpid(), number)

    return on_event


@pytest.mark.parametrize(
    "changes",
    [
        {"save_every": 4, "eval_every": 3},
        {"optimizer": "adamw", "schedule": "cosine", "label_smoothing": 0.1},
        {"precision": "amp-fp16", "micro_batch": 2},
        {"lora": 4},
        {"offload": "optimizer", "precision": "bf16", "micro_batch": 2},
        {"offload": "weights", "micro_batch": 2},
        {"quantize": "int8", "freeze": "encoder"},
        {"seed": 3, "freeze": ("classifier.*",)},  # a new head that does not learn is drawn again, the same
    ],
    ids=lambda changes: "-".join(changes),
)
def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path: Path, dev: str, changes: dict[str, Any]) -> None:
    settings = {"eval_data": dev, **changes}
    whole = run(tmp_path, output=str(tmp_path / "whole"), **settings)
    request = request_of(tmp_path, resume=True, **settings)
    for step in (1, 5, 9):
        with pytest.raises(Interrupted, match=f"after step {step}; its checkpoint is saved"):
            train(request, on_event=stopped_at(step))
    record = train(request)
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    assert record.num_sessions == 4
    assert [e.metrics for e in record.evaluations] == [e.metrics for e in whole.evaluations]
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_signal_does_not_wait_for_an_evaluation_which_is_made_up_for(tmp_path: Path, dev: str) -> None:
    whole = run(tmp_path, output=str(tmp_path / "whole"), eval_data=dev)
    request = request_of(tmp_path, resume=True, eval_data=dev)
    seen: list[Event] = []

    def stop(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 6:  # the last of an epoch: an evaluation comes next
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(event)

    with pytest.raises(Terminated, match="after step 6; its checkpoint is saved"):
        train(request, on_event=stop)
    assert not any(isinstance(event, Evaluated) for event in seen)
    record = train(request)
    assert [e.metrics for e in record.evaluations] == [e.metrics for e in whole.evaluations]
    assert record.best_step == whole.best_step
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_a_new_head_follows_the_seed(tmp_path: Path) -> None:
    heads = {}
    notes: list[Event] = []
    train(request_of(tmp_path, seed=5, max_steps=1), on_event=notes.append)
    assert any(isinstance(note, Note) and "classifier" in note.text and "seed 5" in note.text for note in notes)
    for name, seed in {"zero": 0, "one": 1, "again": 1}.items():
        run(tmp_path, output=str(tmp_path / name), seed=seed, max_steps=1, lr=1e-12)
        heads[name] = weights(tmp_path / name)["classifier.weight"]
    assert torch.equal(heads["one"], heads["again"])
    assert (heads["zero"] - heads["one"]).abs().mean() > 0.01
    loaded, _ = load(str(tmp_path / "source"), device="cpu", num_labels=2, seed=1)
    assert torch.allclose(loaded.classifier.weight, heads["one"], atol=1e-6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", [Note, Loading])
def test_a_signal_before_the_first_step_ends_the_run_at_once(
    tmp_path: Path, moment: type[Event], number: signal.Signals
) -> None:
    seen: list[Event] = []

    def on_event(event: Event) -> None:
        seen.append(event)
        if isinstance(event, moment):
            os.kill(os.getpid(), number)

    usual = signal.getsignal(number)
    settings = {"device": "emulated", "memory": "64MiB", "epochs": 1}
    with pytest.raises(
        Terminated if number == signal.SIGTERM else Interrupted, match="nothing was trained yet"
    ) as info:
        train(request_of(tmp_path, **settings), on_event=on_event)
    assert info.value.exit_code == 128 + number
    assert info.value.hint is None
    assert not any(isinstance(event, Started) for event in seen)
    assert signal.getsignal(number) is usual
    run(tmp_path, resume=True, **settings)
    run(tmp_path, output=str(tmp_path / "whole"), **settings)
    assert same_weights(tmp_path / "out", tmp_path / "whole")


def test_a_signal_before_a_resumed_run_goes_on_leaves_it_as_it_was(tmp_path: Path) -> None:
    run(tmp_path, output=str(tmp_path / "whole"))
    with pytest.raises(Interrupted, match="after step 5"):
        train(request_of(tmp_path), on_event=stopped_at(5))

    def on_event(event: Event) -> None:
        if isinstance(event, Loading):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="nothing new was trained") as info:
        train(request_of(tmp_path, resume=True), on_event=on_event)
    assert "--resume" in str(info.value.hint)
    run(tmp_path, resume=True)
    assert same_weights(tmp_path / "out", tmp_path / "whole")


def test_a_signal_that_a_library_swallows_still_ends_the_run(tmp_path: Path) -> None:
    def on_event(event: Event) -> None:
        if isinstance(event, Loading):
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert not isinstance(event, Started)

    with pytest.raises(Interrupted, match="nothing was trained yet"):
        train(request_of(tmp_path), on_event=on_event)


def test_a_polite_kill_leaves_a_checkpoint_too(tmp_path: Path) -> None:
    with pytest.raises(Terminated) as caught:
        train(request_of(tmp_path), on_event=stopped_at(3, signal.SIGTERM))
    assert (caught.value.exit_code, Interrupted.exit_code) == (143, 130)
    assert (tmp_path / "out" / "checkpoints" / "step-00000003").is_dir()


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run(tmp_path, output=str(tmp_path / "whole"), save_every=2)
    request = request_of(tmp_path, save_every=2, resume=True)
    with pytest.raises(Interrupted):
        train(request, on_event=stopped_at(7))
    newest = tmp_path / "out" / "checkpoints" / "step-00000007" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    said: list[Event] = []
    train(request, on_event=said.append)
    notes = [event.text for event in said if isinstance(event, Note)]
    assert any("step-00000007 is damaged" in text and "step 6" in text for text in notes)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_where_every_checkpoint_is_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    request = request_of(tmp_path, save_every=2, resume=True)
    with pytest.raises(Interrupted):
        train(request, on_event=stopped_at(5))
    folder = tmp_path / "out" / "checkpoints"
    names = sorted((path.name for path in folder.iterdir()), reverse=True)
    for name in names:
        (folder / name / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint to go on from") as error:
        train(request)
    assert str(error.value).endswith(f": damaged or incomplete: {', '.join(names)}")
    assert "another --output, without --resume" in str(error.value.hint)
    assert sorted((path.name for path in folder.iterdir()), reverse=True) == names
    shutil.rmtree(folder)
    assert train(request).status == "completed"


def test_a_full_disk_ends_the_run_and_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, output=str(tmp_path / "whole"), save_every=3)
    request = request_of(tmp_path, save_every=3, resume=True)
    write = checkpoints.write_tensors

    def full(path: Path, tensors: Any) -> None:
        if "00000009" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_tensors", full)
        with pytest.raises(VramfitError, match=r"disk is full.*step 9.*step 6 is whole"):
            train(request)
    train(request)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_a_disk_that_is_full_at_the_very_end_costs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, output=str(tmp_path / "whole"))
    request = request_of(tmp_path, resume=True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        with pytest.raises(VramfitError, match=r"disk is full: the model was not saved.*last checkpoint is whole"):
            train(request)
    said: list[Event] = []
    train(request, on_event=said.append)
    assert not any(isinstance(event, Stepped) for event in said)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_other_data_and_other_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(request_of(tmp_path), on_event=stopped_at(2))
    write_classes(tmp_path / "train.csv", seed=9)
    with pytest.raises(VramfitError, match=r"lr is 0.5, and was 0.001.*training data .* has changed"):
        run(tmp_path, lr=0.5, resume=True)


def test_a_folder_with_a_run_is_not_overwritten_and_a_finished_one_not_done_again(tmp_path: Path) -> None:
    record = run(tmp_path)
    with pytest.raises(VramfitError, match="holds a run already"):
        run(tmp_path)
    assert run(tmp_path, resume=True) == record


def test_a_model_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    source = Path(request_of(tmp_path).model)
    before = weights(source)
    for resume in (False, True):
        with pytest.raises(VramfitError, match="holds a model already"):
            run(tmp_path, output=str(source), resume=resume)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(source).items())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(VramfitError, match="is a file"):
        run(tmp_path, output=str(tmp_path / "file"))


def test_resuming_where_nothing_is_begins_and_says_so(tmp_path: Path) -> None:
    notes: list[Event] = []
    train(request_of(tmp_path, resume=True, epochs=1), on_event=notes.append)
    assert any(isinstance(note, Note) and "no run in" in note.text for note in notes)


@pytest.mark.parametrize("place", [{}, {"device": "emulated", "memory": "64MiB"}], ids=["cpu", "emulated"])
def test_a_batch_is_no_larger_than_the_data(tmp_path: Path, place: dict[str, Any]) -> None:
    notes: list[Event] = []
    request = request_of(tmp_path, batch=10**6, micro_batch=90, epochs=1, **place)
    record = train(request, on_event=notes.append)
    assert (record.num_steps, record.settings["batch"], record.settings["micro_batch"]) == (1, 48, 48)
    assert any(isinstance(note, Note) and "all 48 samples" in note.text for note in notes)


def test_labels_that_are_all_the_same_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("text,label\nthe film,good\nthe music,good\n")
    with pytest.raises(DataError, match="nothing to tell apart"):
        run(tmp_path, data=str(tmp_path / "one.csv"))


def test_a_plan_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("text,label\n")
    with pytest.raises(VramfitError, match=r"plan\.json: not JSON"):
        run(tmp_path, plan=str(tmp_path / "plan.json"))


def test_early_stopping_keeps_the_best_model(tmp_path: Path, dev: str) -> None:
    saved: list[Event] = []
    request = request_of(tmp_path, eval_data=dev, epochs=30, lr=3e-3, patience=2, keep=1)
    record = train(request, on_event=saved.append)
    assert record.status == "stopped early"
    assert record.best_step == record.evaluations[-3].step
    assert record.num_epochs < 30
    best = tmp_path / "out" / "checkpoints" / f"step-{record.best_step:08d}"
    assert best.is_dir()
    assert isinstance(saved[-1], Saved)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    from safetensors.torch import load_file

    learned = load_file(best / "weights.safetensors")
    assert all(torch.equal(parameter, learned[name]) for name, parameter in model.named_parameters())


def test_memory_that_runs_out_on_an_emulated_gpu_changes_nothing(tmp_path: Path, dev: str) -> None:
    settings = {"eval_data": dev, "micro_batch": 4}
    run(tmp_path, output=str(tmp_path / "cpu"), **settings)
    emulated = {"device": "emulated", "memory": "64MiB", "optimizer": "adamw-fused"}
    record = run(tmp_path, **settings, **emulated, fail_at=(900, 2500, 4000))
    assert record.num_recoveries >= 2
    assert record.budget_bytes == 64 * 2**20
    assert record.measured_reserved_bytes is not None
    assert record.predicted_reserved_bytes is not None
    assert same_weights(tmp_path / "cpu", tmp_path / "out")


def test_what_is_predicted_of_a_run_is_that_of_its_evaluations_too(tmp_path: Path, dev: str) -> None:
    write_model(tmp_path / "source", intermediate_size=8192)
    same = {"batch": 32, "micro_batch": 1, "max_steps": 1, "device": "emulated", "memory": "1GiB"}
    without = run(tmp_path, output=str(tmp_path / "without"), **same)
    record = run(tmp_path, eval_data=dev, **same)
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert plan.evaluation.safe_reserved_bytes > plan.estimate.safe_reserved_bytes
    assert record.predicted_reserved_bytes == plan.evaluation.safe_reserved_bytes
    assert without.predicted_reserved_bytes == plan.estimate.safe_reserved_bytes


@pytest.mark.parametrize("offload", ["optimizer", "weights"])
def test_offloaded_runs_learn_what_others_learn(tmp_path: Path, dev: str, offload: str) -> None:
    """On an emulated GPU, planned, with failures on the way, and evaluated in between."""
    same = {"eval_data": dev, "device": "emulated", "memory": "600MiB", "checkpointing": "full", "max_steps": 6}
    run(tmp_path, output=str(tmp_path / "whole"), **same)
    record = run(tmp_path, offload=offload, fail_at=(700, 1500), **same)
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    assert record.settings["offload"] == offload
    assert record.num_recoveries >= 1
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert plan.estimate.host_bytes > 0


def test_more_than_the_host_may_hold_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(BudgetExceeded, match=r"of the host's memory, and it may take 10\.00 KiB"):
        run(tmp_path, offload="optimizer", host_memory="10KiB")


def test_a_resumed_run_keeps_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"device": "emulated", "memory": "64MiB"}
    said: list[Event] = []
    record = train(request_of(tmp_path, output=str(tmp_path / "whole"), **settings), on_event=said.append)
    assert any(isinstance(e, Note) and "those that are quick there are taken" in e.text for e in said)
    assert (record.settings["optimizer"], record.settings["precision"]) == ("adamw-fused", "fp32")
    request = request_of(tmp_path, resume=True, **settings)
    with pytest.raises(Interrupted):
        train(request, on_event=stopped_at(5))

    def planned(*_: Any, **__: Any) -> None:
        raise AssertionError("it was planned anew")

    monkeypatch.setattr("vramfit.runtime.training.train.make_plan", planned)
    train(request)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("place", [{"device": "cpu"}, {"device": "emulated", "memory": "64MiB"}], ids=["cpu", "gpu"])
def test_a_resumed_run_takes_the_micro_batch_that_it_is_given(tmp_path: Path, place: dict[str, Any]) -> None:
    with pytest.raises(Interrupted):
        train(request_of(tmp_path, **place), on_event=stopped_at(5))
    seen: list[Event] = []
    record = train(request_of(tmp_path, resume=True, micro_batch=3, **place), on_event=seen.append)
    assert {e.micro_batch for e in seen if isinstance(e, Stepped)} == {record.settings["micro_batch"]} == {3}


def test_a_saved_plan_is_followed(tmp_path: Path) -> None:
    first = run(tmp_path, device="emulated", memory="64MiB", micro_batch=2, output=str(tmp_path / "first"))
    plan = str(tmp_path / "first" / "plan.json")
    record = run(tmp_path, device="emulated", plan=plan, batch=None)
    assert record.settings == first.settings
    with pytest.raises(WorkloadError, match=r"for batch 8, not 4.*task sequence|task sequence.*for batch 8, not 4"):
        run(tmp_path, plan=plan, batch=4, task="masked-lm", output=str(tmp_path / "never"))


@pytest.mark.parametrize("changes", [{"lora": 4}, {"quantize": "int8", "freeze": "encoder"}], ids=["lora", "int8"])
def test_adapters_are_merged_and_frozen_weights_are_the_sources(tmp_path: Path, changes: dict[str, Any]) -> None:
    record = run(tmp_path, epochs=4, lr=5e-3, **changes)
    assert any("saved as the source has them" in note for note in record.notes) == ("quantize" in changes)
    source, saved = weights(tmp_path / "source"), weights(tmp_path / "out")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert not any("lora" in name or "base_layer" in name for name in saved)
    same = {name for name in source if torch.equal(source[name], saved[f"bert.{name}"])}
    adapted = {name for name in source if ".query.weight" in name or ".value.weight" in name}
    learned = adapted if "lora" in changes else {"pooler.dense.weight", "pooler.dense.bias"}
    assert same >= set(source) - learned - {"pooler.dense.weight", "pooler.dense.bias"}
    assert not same & learned


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_run_that_diverges_stops_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    from vramfit.runtime.stepper import Stepper

    advance = Stepper.advance

    def overflowing(self: Stepper, batch: Any) -> torch.Tensor:
        loss = advance(self, batch)
        return loss if self.num_steps < 4 else loss * float("nan")

    monkeypatch.setattr(Stepper, "advance", overflowing)
    monkeypatch.setattr(RunDevice, "computes_apart", property(lambda self: runs_ahead))
    with pytest.raises(Diverged, match="loss of step 4 is nan") as caught:
        run(tmp_path, save_every=3)
    assert "lower learning rate" in str(caught.value.hint)
    assert (tmp_path / "out" / "checkpoints" / "step-00000003").is_dir()


def test_bad_data_is_an_error_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "bad.csv"
    data.write_text("text,label\nfine film,good\n,bad\ndull film,bad\n", encoding="utf-8")

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("vramfit.runtime.training.session.load_model", loaded)
    with pytest.raises(DataError, match="row 3"):
        run(tmp_path, data=str(data))
    monkeypatch.undo()
    record = run(tmp_path, data=str(data), skip_bad_rows=True, epochs=1)
    assert (record.num_samples, record.num_bad_rows) == (2, 1)


def test_long_samples_are_cut_and_that_is_said(tmp_path: Path) -> None:
    data = tmp_path / "long.csv"
    rows = [f"{'film was ' * 40}{word},{label}" for word, label in (("fine", "good"), ("dull", "bad"))]
    data.write_text("text,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    said: list[Event] = []
    record = train(request_of(tmp_path, data=str(data), epochs=1, seq=24), on_event=said.append)
    assert record.num_truncated == 2
    assert record.longest_before_truncation == 83
    assert any(
        "longer than 24 tokens and cut; the longest has 83" in event.text for event in said if isinstance(event, Note)
    )


def test_what_is_strange_about_labels_is_said_first_and_kept(tmp_path: Path) -> None:
    rows = [f"the film was fine,{n % 8 / 2}\n" for n in range(64)]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(rows))
    seen: list[Event] = []
    record = train(request_of(tmp_path, max_steps=1), on_event=seen.append)
    assert isinstance(seen[0], Note)
    assert seen[0].warns
    assert "8 labels in 64 rows, decimals" in seen[0].text
    assert "8 labels in 64 rows, decimals" in record.notes[0]


def test_numbers_of_the_evaluation_data_are_said_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "dev.csv").write_text("text,label\nthe film was fine,1\n")
    record = run(tmp_path, eval_data=str(tmp_path / "dev.csv"), max_steps=1)
    assert record.notes == ("labels are numbers: 0 is bad, 1 is good",)


def test_one_row_that_is_left_out_or_cut_is_said_as_one(tmp_path: Path) -> None:
    rows = ["fine,good", ",bad", "dull,bad", "the film was fine and the music was great,good"]
    (tmp_path / "train.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    seen: list[Event] = []
    train(request_of(tmp_path, max_steps=1, skip_bad_rows=True, seq=6), on_event=seen.append)
    said = [event.text for event in seen if isinstance(event, Note)]
    assert said[0].startswith("1 row of the training data is left out; the first is row 3")
    assert said[1].startswith("1 row of the training data is longer than 6 tokens and cut")
