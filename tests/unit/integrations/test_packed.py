"""Fitted Trainers whose steps have no padding: the gradient is the whole batch's, and all else is as it was."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.unit.integrations.small_trainers import difference, gradients_of, make_trainer, rows_of, whole_gradient
from tests.unit.integrations.test_gradients import BATCH, SIZE, plan_for
from tests.unit.runtime.small_models import FAMILIES, HEADS, flat_gradient, flat_weights, make_batch, make_model
from transformers import Trainer, TrainerCallback

import vramfit
from vramfit.integrations.trainer import fit_trainer, job, rows
from vramfit.integrations.trainer.packable import why_padded
from vramfit.runtime.stepper import Stepper
from vramfit.step.inputs import Batch
from vramfit.techniques import packing

PACKED = [family for family in FAMILIES if family != "deberta-v2"]
TASKS = [task for task in HEADS if task != "question-answering"]
STILL = {"learning_rate": 0.0, "max_grad_norm": 0.0}
SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
MEMORY = "256MiB"


def packed_plan(task: str = "sequence-classification", num_passes: int = 4) -> vramfit.Plan:
    """In fp32, which only the CPU packs in: gradients can be compared to the last digits."""
    plan = plan_for(task, num_passes)
    return replace(plan, workload=replace(plan.workload, attention="packed"))


def packed_trainer(output: Path, family: str = "bert", task: str = "sequence-classification", **given: Any) -> Trainer:
    num_passes = given.pop("num_passes", 4)
    trainer = make_trainer(output, family, task, **{**SPLIT, **given})
    fit_trainer(trainer, plan=packed_plan(task, num_passes), show=False)
    return trainer


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows that are made, by how many sequences they have."""
    rows: list[int] = []
    pack = packing.pack

    def noting(batch: Batch, model: Any) -> dict[str, Any]:
        rows.append(len(batch["input_ids"]))
        return pack(batch, model)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "pack", noting)
        yield rows


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", PACKED)
def test_a_packed_step_is_that_of_the_whole_batch_however_it_is_split(
    family: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(task, SIZE)
    windows = [{n: v[:BATCH] for n, v in batch.items()}, {n: v[BATCH:] for n, v in batch.items()}]
    right = [whole_gradient(family, task, window) for window in windows]
    for num_passes in (2, 4, 8):
        trainer = packed_trainer(tmp_path, family, task, num_passes=num_passes, size=SIZE, **STILL)
        with counted(monkeypatch) as rows:
            found = gradients_of(trainer)
        assert len(rows) > 2
        assert sum(rows) >= SIZE - 2  # but for samples without a label
        assert trainer.vramfit.num_padded == 0
        for gradient, whole in zip(found, right, strict=True):
            assert difference(gradient, whole) <= 1e-5


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_label_smoothing_is_packed_too(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"label_smoothing_factor": 0.1, "size": BATCH, **STILL}
    whole = gradients_of(make_trainer(tmp_path, task=task, per_device_train_batch_size=BATCH, **settings))
    trainer = packed_trainer(tmp_path, task=task, **settings)
    with counted(monkeypatch) as rows:
        assert difference(gradients_of(trainer)[0], whole[0]) <= 1e-5
    assert rows


def test_labels_of_many_classes_and_of_amounts_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {"multi_label_classification": {}, "regression": {"num_labels": 1}}
    for problem, changes in problems.items():
        rows = rows_of("sequence-classification", BATCH)
        for i, row in enumerate(rows):
            amount, classes = torch.tensor(i / 7), torch.tensor([1.0, float(i % 2), 0.0])
            row["labels"] = classes if problem == "multi_label_classification" else amount

        def model(problem: str = problem, changes: dict[str, Any] = changes) -> Any:
            return make_model("bert", "sequence-classification", problem_type=problem, **changes)

        settings = {"rows": rows, **STILL}
        whole = gradients_of(make_trainer(tmp_path, model=model(), per_device_train_batch_size=BATCH, **settings))
        trainer = packed_trainer(tmp_path, model=model(), **settings)
        with counted(monkeypatch) as made:
            assert difference(gradients_of(trainer)[0], whole[0]) <= 1e-5
        assert made


def left_padded(batch: Batch) -> Batch:
    return {name: value.flip(1) if value.dim() > 1 else value for name, value in batch.items()}


def with_a_hole(batch: Batch) -> Batch:
    mask = batch["attention_mask"].clone()
    mask[0, 3] = 0
    labels = batch["labels"].clone()
    labels[0, 3] = -100
    return batch | {"attention_mask": mask, "labels": labels}


def with_an_empty_row(batch: Batch) -> Batch:
    mask, labels = batch["attention_mask"].clone(), batch["labels"].clone()
    mask[5], labels[5] = 0, -100
    return batch | {"attention_mask": mask, "labels": labels}


def without_mask(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "attention_mask"}


def with_places(batch: Batch) -> Batch:
    return batch | {"position_ids": torch.arange(16).flip(0).expand(len(batch["input_ids"]), -1).contiguous()}


def with_labels_on_padding(batch: Batch) -> Batch:
    return batch | {"labels": torch.where(batch["attention_mask"] == 0, 1, batch["labels"])}


def with_weights(batch: Batch) -> Batch:
    return batch | {"attention_mask": batch["attention_mask"].float()}


def with_a_square_mask(batch: Batch) -> Batch:
    mask = batch["attention_mask"].bool()
    return batch | {"attention_mask": mask[:, None, None, :].expand(-1, 1, 16, -1).contiguous()}


def with_twos(batch: Batch) -> Batch:
    return batch | {"attention_mask": batch["attention_mask"] * 2}


def with_types(batch: Batch) -> Batch:
    return batch | {"token_type_ids": (torch.arange(16) > 2).long().expand(len(batch["input_ids"]), -1).contiguous()}


def with_true_and_false(batch: Batch) -> Batch:
    return batch | {"attention_mask": batch["attention_mask"].bool()}


def with_padding_inside(batch: Batch) -> Batch:
    ids = batch["input_ids"].clone()
    ids[0, 2] = 1
    return batch | {"input_ids": ids}


def whole_rows(batch: Batch) -> Batch:
    return without_mask(batch) | {"input_ids": batch["input_ids"].clamp(min=5)}


CASES: list[tuple[str, Callable[[Batch], Batch], str | None]] = [
    ("bert", left_padded, "attention_mask is not ones"),
    ("bert", with_a_hole, "attention_mask is not ones"),
    ("bert", with_an_empty_row, "no token that is attended to"),
    ("bert", without_mask, "padding and no attention_mask"),
    ("bert", with_places, "position_ids may count on"),
    ("bert", with_labels_on_padding, "padding has labels"),
    ("bert", with_weights, "attention_mask of shape"),
    ("bert", with_a_square_mask, "attention_mask of shape"),
    ("bert", with_twos, "attention_mask is not ones"),
    ("roberta", with_padding_inside, "token 1, which takes no position"),
    ("bert", with_padding_inside, None),
    ("bert", with_types, None),
    ("bert", with_true_and_false, None),
    ("bert", whole_rows, None),
    ("roberta", whole_rows, None),
]


@pytest.mark.parametrize(("family", "change", "words"), CASES)
def test_a_batch_is_packed_only_where_the_gradient_stays(
    family: str, change: Callable[[Batch], Batch], words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step is as usual, the second is not; both have the gradient of their whole batch."""
    task = "token-classification"
    usual, odd = make_batch(task, BATCH), change(make_batch(task, BATCH, seed=2))
    batches = [usual, odd]

    class Given(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]

    trainer = packed_trainer(tmp_path, family, task, size=2 * BATCH, kind=Given, **STILL)
    with counted(monkeypatch) as rows, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = gradients_of(trainer)
    said = [str(w.message) for w in told if "is padded" in str(w.message)]
    right = [whole_gradient(family, task, batch) for batch in batches]
    assert [difference(f, r) <= 1e-5 for f, r in zip(found, right, strict=True)] == [True, True]
    assert trainer.vramfit.num_padded == len(said) == int(words is not None)
    assert all(f"step 2 is padded: {words}" in text or words in text for text in said)  # type: ignore[operator]
    assert (sum(rows) > BATCH) == (words is None)
    if words is not None:
        assert trainer.vramfit.padded.micro_batch == trainer.vramfit.stepper.micro_batch // 2


def test_labels_as_wide_as_the_text_are_not_taken_for_labels_of_tokens() -> None:
    model, batch = make_model("bert", "sequence-classification"), make_batch("sequence-classification", 4)
    assert why_padded(batch, model, "sequence-classification") is None
    wide = batch | {"labels": torch.zeros(4, 16, dtype=torch.long)}
    assert "labels of shape (4, 16)" in (why_padded(wide, model, "sequence-classification") or "")
    fractions = batch | {"labels": torch.zeros(4, 16)}
    assert why_padded(fractions, model, "sequence-classification") is None
    assert "labels of shape (4,)" in (why_padded(batch, model, "token-classification") or "")


def test_a_batch_on_the_device_is_not_looked_at() -> None:
    batch = {name: value.to("meta") for name, value in make_batch("token-classification", 4).items()}
    assert "on the device" in (
        why_padded(batch, make_model("bert", "token-classification"), "token-classification") or ""
    )


def test_whatever_padding_is_labelled_does_not_count_for_a_discriminator() -> None:
    import transformers

    config = transformers.ElectraConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.ElectraForPreTraining(config)
    batch = make_batch("token-classification", 4)
    batch["labels"] = torch.ones_like(batch["labels"])
    assert why_padded(batch, model, "pretraining") is None
    assert why_padded(batch, model, "masked-lm") is None


def test_batches_stay_on_the_host_until_a_pass_takes_them(tmp_path: Path) -> None:
    trainer = packed_trainer(tmp_path)
    assert trainer.get_train_dataloader().device is None
    assert trainer.accelerator.device_placement
    assert trainer.get_eval_dataloader().device is not None
    batches, count = trainer.get_batch_samples(
        iter([make_batch("sequence-classification", 4)]), 1, torch.device("meta")
    )
    assert [len(batch["labels"]) for batch in batches] == [4]
    assert count is None or count.device.type == "cpu"
    given = make_trainer(tmp_path, **SPLIT)
    loss = {"loss_fn": lambda output, batch: output.logits.sum(), "count_fn": lambda batch: 1}
    fit_trainer(given, memory=MEMORY, **loss, show=False)
    assert given.get_train_dataloader().device is not None  # its functions may count on it


def test_a_stepper_of_ones_own_packs_again_or_pads(tmp_path: Path) -> None:
    """The model of a fitted Trainer is as it was: nothing packs it that does not say so."""
    task = "token-classification"
    trainer = packed_trainer(tmp_path, task=task, **STILL)
    trainer.train()
    right = whole_gradient("bert", task, make_batch(task))
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    for packs in (False, True):
        assert packing.is_applied(trainer.model) == packs
        Stepper(trainer.model, optimizer, micro_batch=3, seq=16).gradients(make_batch(task))
        assert difference(flat_gradient(trainer.model), right) <= 1e-5
        packing.apply(trainer.model, "token-classification")
    assert len(trainer.model.bert._forward_hooks) == 1


def test_layers_that_are_computed_twice_are_packed_both_times(tmp_path: Path) -> None:
    task = "token-classification"
    plan = packed_plan(task)
    plan = replace(plan, workload=replace(plan.workload, checkpointing="full"))
    trainer = make_trainer(tmp_path, task=task, size=BATCH, **SPLIT, **STILL)
    fit_trainer(trainer, plan=plan, show=False)
    found = gradients_of(trainer)[0]
    assert trainer.model.is_gradient_checkpointing
    assert difference(found, whole_gradient("bert", task, make_batch(task, BATCH))) <= 1e-5


class Own(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss


class OwnMoves(Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


def own_function(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return torch.nn.functional.cross_entropy(output.logits, labels, reduction="sum") / num_items_in_batch


def adapted() -> Any:
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    return peft.get_peft_model(make_model("bert", "sequence-classification"), settings)


def eager() -> Any:
    model: Any = make_model("bert", "sequence-classification")
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": Own}, "Own computes a loss of its own, out of padded batches"),
        ({"compute_loss_func": own_function}, "a loss function of the script's own is given padded outputs"),
        ({"task": "question-answering"}, "the softmax over an answer's places runs over padding too"),
        ({"family": "deberta-v2"}, "of DebertaV2ForSequenceClassification, rows of several sequences"),
        ({"model": adapted()}, "PeftModelForSequenceClassification is not the model that transformers makes"),
        ({"model": eager()}, "attention eager was chosen"),
        ({"kind": OwnMoves}, "OwnMoves brings batches to the device in a way of its own"),
        ({"rows": rows_of("sequence-classification", 20), "left": True}, "attention_mask is not ones"),
    ],
)
def test_packed_is_refused_by_name_where_it_would_change_the_gradient(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    left, given = given.get("left"), {n: v for n, v in given.items() if n != "left"}
    if left:
        given["rows"] = [{n: v.flip(0) if v.dim() else v for n, v in row.items()} for row in given["rows"]]
    trainer = make_trainer(tmp_path, **SPLIT, bf16=True, **given)
    before = trainer.model.config._attn_implementation
    with pytest.raises(vramfit.WorkloadError, match="attention packed: " + words):
        fit_trainer(trainer, memory=MEMORY, attention="packed", show=False)
    assert not packing.is_applied(trainer.model)
    assert trainer.model.config._attn_implementation == before
    plan = packed_plan()
    if given.get("task") is None:
        plan = replace(plan, workload=replace(plan.workload, precision="amp-bf16", micro_batch=16, accumulate=1))
        with pytest.raises(vramfit.WorkloadError, match="the plan is for attention packed, and " + words):
            fit_trainer(trainer, plan=plan, show=False)


def test_a_loss_that_is_given_is_given_padded_outputs(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT, bf16=True)
    loss = {"loss_fn": lambda output, batch: output.logits.sum(), "count_fn": lambda batch: 1}
    with pytest.raises(vramfit.WorkloadError, match="given padded outputs"):
        fit_trainer(trainer, memory=MEMORY, attention="packed", **loss, show=False)
    with pytest.raises(vramfit.WorkloadError, match="the plan is for attention packed, and eager was asked for"):
        fit_trainer(trainer, plan=packed_plan(), attention="eager", show=False)
    with pytest.raises(vramfit.WorkloadError, match="'flash' is not one of sdpa, eager, packed"):
        fit_trainer(trainer, memory=MEMORY, attention="flash", show=False)


class Varied:
    """Rows of different lengths, padded to the longest of a batch."""

    def __init__(self, num_rows: int = 64, longest: int = 32) -> None:
        draw = np.random.default_rng(0)
        self.rows = [
            {"input_ids": draw.integers(5, 99, n).tolist(), "labels": i % 3}
            for i, n in enumerate(draw.integers(3, longest + 1, num_rows))
        ]

    @staticmethod
    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        ids = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
        mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
        labels = [row["labels"] for row in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


def large(output: Path, *, attention: str = "sdpa", **given: Any) -> Trainer:
    """Large enough for a GPU not to wait for the host: that is where padding counts."""
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512}
    samples = Varied(num_rows=128, longest=512)
    settings = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "bf16": True, **given}
    model = make_model("bert", "sequence-classification", **sizes, attn_implementation=attention)
    return make_trainer(output, rows=samples.rows, data_collator=Varied.collate, **{"model": model, **settings})


def varied_trainer(output: Path, **given: Any) -> Trainer:
    settings = {**SPLIT, "bf16": True, "data_collator": Varied.collate, **given}
    return make_trainer(output, rows=Varied().rows, **settings)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has the kernel."""
    monkeypatch.setattr(job, "has_packed_kernel", lambda device, precision: True)


@pytest.mark.usefixtures("with_kernel")
def test_packed_is_chosen_where_lengths_vary_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = large(tmp_path)
    fitting = fit_trainer(trainer, memory="2GiB", gpu="a100")
    w = fitting.plan.workload
    assert (w.attention, w.precision) == ("packed", "amp-bf16")
    assert fitting.plan.evaluation.workload.attention == "sdpa"
    assert "-attention=sdpa\n+attention=packed (no padding)\n" in fitting.diff()
    shown = " ".join(capsys.readouterr().err.split())
    assert "packed (no padding)" in shown
    assert f"in passes of up to {fitting.plan.micro_batch * w.seq:,} tokens, without padding" in shown
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "given",
    [
        {"attention": "sdpa"},
        {"attention": "eager"},
        {"bf16": False},
        {"kind": Own},
        {"compute_loss_func": own_function},
        {"chosen": "eager"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("with_kernel")
def test_padding_stays_where_it_was_asked_for_or_must(given: dict[str, Any], tmp_path: Path) -> None:
    asked, chosen = given.get("attention"), given.get("chosen", "sdpa")
    trainer = large(tmp_path, attention=chosen, **{n: v for n, v in given.items() if n not in ("attention", "chosen")})
    plan = fit_trainer(trainer, memory="8GiB", gpu="a100", attention=asked, show=False).plan
    assert plan.workload.attention == (asked or chosen)
    assert trainer.model.config._attn_implementation == (asked or chosen)


def test_without_the_kernel_nothing_is_packed_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert fit_trainer(varied_trainer(tmp_path), memory=MEMORY, show=False).plan.workload.attention == "sdpa"
    trainer = varied_trainer(tmp_path)
    assert fit_trainer(trainer, memory=MEMORY, attention="packed", show=False).plan.workload.attention == "packed"
    trainer.train()
    assert trainer.state.global_step == 4
    plain = make_trainer(tmp_path, **SPLIT)
    with pytest.raises(vramfit.WorkloadError, match="its kernel computes in 16 bits, not fp32"):
        fit_trainer(plain, memory=MEMORY, attention="packed", show=False)


@pytest.mark.parametrize("family", PACKED)
def test_evaluation_and_prediction_are_those_of_the_plain_trainer_to_the_bit(family: str, tmp_path: Path) -> None:
    task = "token-classification"
    trainer = packed_trainer(tmp_path, family, task, learning_rate=1e-3)
    trainer.train()
    assert trainer.model.config._attn_implementation == "sdpa"
    plain = make_trainer(tmp_path, family, task)
    plain.model.load_state_dict(trainer.model.state_dict())
    rows = rows_of(task, 9, seed=5)
    for one in (trainer, plain):
        one.args.per_device_eval_batch_size = 4
    found, expected = trainer.predict(rows), plain.predict(rows)
    assert np.array_equal(found.predictions, expected.predictions)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=0)


def test_several_evaluation_sets_metrics_and_the_best_model_are_kept(tmp_path: Path) -> None:
    def accuracy(p: Any) -> dict[str, float]:
        return {"accuracy": float((np.argmax(p.predictions, 1) == p.label_ids).mean())}

    seen: list[str] = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append(model.config._attn_implementation)

    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "eval_first_loss", "num_train_epochs": 2, "learning_rate": 1e-3}
    trainer = make_trainer(tmp_path, compute_metrics=accuracy, callbacks=[Look()], **SPLIT, **settings)
    task = "sequence-classification"
    trainer.eval_dataset = {"first": rows_of(task, 6, seed=3), "second": rows_of(task, 9, seed=4)}
    fit_trainer(trainer, plan=packed_plan(), show=False)
    trainer.train()
    metrics = trainer.state.log_history
    assert any("eval_first_accuracy" in entry for entry in metrics)
    assert any("eval_second_accuracy" in entry for entry in metrics)
    assert seen == ["sdpa"] * 4
    saved = json.loads((Path(str(trainer.state.best_model_checkpoint)) / "config.json").read_text())
    assert "vramfit" not in json.dumps(saved)
    trainer.save_model(str(tmp_path / "kept"))
    import transformers

    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "kept")
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(flat_weights(again), flat_weights(trainer.model))


def test_a_packed_run_is_resumed_as_it_would_have_gone_on(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3}
    through = packed_trainer(tmp_path / "a", **settings)
    through.train()
    resumed = packed_trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert resumed.state.global_step == through.state.global_step == 4
    assert torch.equal(flat_weights(resumed.model), flat_weights(through.model))


def test_a_packed_run_learns_what_the_plain_one_learns(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 2, "learning_rate": 1e-3, "size": SIZE}
    plain = make_trainer(tmp_path, per_device_train_batch_size=BATCH, **settings)
    packed = packed_trainer(tmp_path, **settings)
    plain.train()
    packed.train()
    assert difference(flat_weights(packed.model), flat_weights(plain.model)) < 1e-5


def test_a_model_made_by_the_trainer_itself_is_packed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = "sequence-classification"
    trainer = packed_trainer(tmp_path, model_init=lambda: make_model("bert", task), size=BATCH, **STILL)
    with counted(monkeypatch) as rows:
        found = gradients_of(trainer)[0]
    assert rows
    assert difference(found, whole_gradient("bert", task, make_batch(task, BATCH))) <= 1e-5


def test_memory_that_runs_out_in_packed_and_padded_steps_costs_nothing(tmp_path: Path) -> None:
    """The second step is padded; both are done again, and what is learned is what it would have been."""

    class Starts(TrainerCallback):
        gpu: Any = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            starts.append(self.gpu.num_allocations)

    found, starts, fail_at = [], list[int](), list[int]()
    for _ in range(2):
        rows = rows_of("sequence-classification", 2 * BATCH)
        rows[BATCH + 2]["attention_mask"] = rows[BATCH + 2]["attention_mask"].flip(0)
        noted = Starts()
        trainer = packed_trainer(tmp_path, rows=rows, learning_rate=1e-3, num_passes=2, callbacks=[noted])
        with vramfit.EmulatedGPU(memory="256MiB", fail_at=fail_at) as noted.gpu, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        assert trainer.vramfit.num_padded == 1
        found.append(trainer)
        fail_at = [starts[0] + 60, starts[1] + 250]  # the first one makes the second step begin later
    quiet, disturbed = found
    assert quiet.num_recoveries == 0
    assert [s.num_recoveries for s in (disturbed.vramfit.stepper, disturbed.vramfit.padded)] == [1, 1]
    assert disturbed.num_recoveries == 2
    assert disturbed.state.global_step == 2
    assert disturbed.model.config._attn_implementation == "sdpa"
    assert difference(flat_weights(disturbed.model), flat_weights(quiet.model)) < 1e-6


def test_rows_that_were_not_looked_at_may_be_as_long_as_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = fit_trainer(varied_trainer(tmp_path), memory=MEMORY, show=False).plan
    monkeypatch.setattr(rows, "MAX_ROWS", 20)
    trainer = varied_trainer(tmp_path)
    partly = fit_trainer(trainer, memory=MEMORY, attention="packed", show=False)
    assert complete.workload.seq == 32
    assert partly.plan.workload.seq == trainer.model.config.max_position_embeddings == 40
    assert any("as long as the model takes" in note for note in partly.notes)


def test_rows_that_are_padded_already_are_counted_by_their_masks(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT, bf16=True)
    plan = fit_trainer(trainer, memory=MEMORY, attention="packed", show=False).plan
    assert plan.workload.seq == 16
    assert plan.lengths is not None
    assert plan.lengths.mean == pytest.approx(
        float(make_batch("sequence-classification", 20)["attention_mask"].sum()) / 20
    )


def test_a_width_that_no_text_fills_is_planned_for(tmp_path: Path) -> None:
    """An evaluation is as wide as the collator makes it, and a padded pass may be."""

    def wide(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = Varied.collate(rows)
        room = 40 - batch["input_ids"].shape[1]
        return {n: torch.nn.functional.pad(v, (0, room)) if v.dim() > 1 else v for n, v in batch.items()}

    trainer = varied_trainer(tmp_path, data_collator=wide)
    plan = fit_trainer(trainer, memory=MEMORY, attention="packed", show=False).plan
    assert (plan.workload.seq, plan.evaluation.workload.seq) == (40, 40)
    assert plan.lengths is not None
    assert plan.lengths.mean < 32
    bare = varied_trainer(tmp_path, data_collator=lambda rows: {n: v for n, v in wide(rows).items() if "mask" not in n})
    fitting = fit_trainer(bare, memory=MEMORY, show=False)
    assert (fitting.plan.workload.seq, fitting.plan.lengths) == (40, None)


def test_every_evaluation_set_is_looked_at(tmp_path: Path) -> None:
    trainer = varied_trainer(tmp_path)
    long = Varied(num_rows=4, longest=8).rows
    long[0]["input_ids"] = [7] * 39
    trainer.eval_dataset = {"usual": trainer.eval_dataset, "long": long}
    looked_at = rows.rows_of(trainer, trainer.eval_dataset)
    assert (len(looked_at.lengths), max(looked_at.lengths), looked_at.num_samples) == (68, 39, 64)
    assert fit_trainer(trainer, memory=MEMORY, show=False).plan.workload.seq == 39


def test_training_may_have_longer_texts_than_an_evaluation_that_says_how_long_they_are(tmp_path: Path) -> None:
    batch = rows_of("sequence-classification", 8)

    def collate(given: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([batch[row.get("text", 0)][name] for row in given]) for name in batch[0]}

    trainer = make_trainer(tmp_path, rows=[{"text": i} for i in range(8)], data_collator=collate, **SPLIT)
    trainer.eval_dataset = [{"input_ids": [5, 6, 7]}]
    plan = fit_trainer(trainer, memory=MEMORY, show=False).plan
    assert (plan.workload.seq, plan.lengths) == (40, None)


def test_an_evaluation_that_was_planned_packed_is_half_as_large_padded(tmp_path: Path) -> None:
    sizes = []
    for attention in ("sdpa", "packed"):
        plan = packed_plan()
        evaluation = replace(plan.evaluation, workload=replace(plan.evaluation.workload, attention=attention))
        trainer = make_trainer(tmp_path, **SPLIT)
        fit_trainer(trainer, plan=replace(plan, evaluation=evaluation), show=False)
        sizes.append(trainer.args.per_device_eval_batch_size)
    assert sizes[0] == 2 * sizes[1]


def test_only_the_first_padded_step_is_spoken_of(tmp_path: Path) -> None:
    rows = rows_of("sequence-classification", 2 * BATCH)
    for row in (rows[0], rows[BATCH]):
        row["attention_mask"] = row["attention_mask"].clone()
        row["attention_mask"][1] = 0
    trainer = packed_trainer(tmp_path, size=2 * BATCH)
    trainer.train_dataset = rows
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    assert trainer.vramfit.num_padded == 2
    assert [str(w.message)[:16] for w in told if "is padded" in str(w.message)] == ["step 1 is padded"]
