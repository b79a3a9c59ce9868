"""What may be packed: batches and Trainers, each reason by the gradient that it guards."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.unit.integrations.packed_trainers import MEMORY, SPLIT, STILL, counted, packed_plan, packed_trainer
from tests.unit.integrations.small_trainers import difference, gradients_of, make_trainer, rows_of, whole_gradient
from tests.unit.integrations.test_gradients import BATCH
from tests.unit.runtime.small_models import COMMON, FAMILIES, flat_gradient, make_batch, make_model
from transformers import CONFIG_MAPPING, AutoConfig, Trainer

import vramfit
from vramfit.integrations.trainer import fit_trainer
from vramfit.integrations.trainer.rows import why_padded
from vramfit.models.configuration import PACKED_ENCODERS, class_for_task
from vramfit.step.plain import Batch
from vramfit.tasks.parts.losses import head_loss, model_inputs
from vramfit.techniques import packing


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


def with_padding_inside(batch: Batch, padding: int = 1) -> Batch:
    ids = batch["input_ids"].clone()
    ids[0, 2] = padding
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


@pytest.mark.parametrize("family", [name for name in PACKED_ENCODERS if name in CONFIG_MAPPING])
def test_of_every_family_what_is_packed_has_the_padded_gradient(family: str) -> None:
    """And a padding token inside a text is padded just where it takes no position."""
    task, gradients = "token-classification", []
    names = {"n_layer": 2, "n_head": 2, "n_embd": 32, "head_dim": 16, "d_model": 32, "num_key_value_heads": 2}
    silent = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0}
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **names, **silent})
    for change in (lambda batch: with_padding_inside(batch, config.pad_token_id), whole_rows):
        batch = change(make_batch(task, 6))
        for packs in (False, True):
            torch.manual_seed(0)
            model = class_for_task(config, task)(config).eval()
            why = why_padded(batch, model, task)
            if packs:
                packing.apply(model, "token-classification")
            inputs = packing.pack(batch, model) if packs else batch
            head_loss(model, batch).sums(model(**model_inputs(inputs)), inputs)[0].backward()
            gradients.append(flat_gradient(model))
        assert (difference(gradients.pop(), gradients.pop()) <= 1e-5) == (why is None)
    assert why is None  # the last one, of whole rows


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


def with_other_head() -> Any:
    model: Any = make_model("bert", "token-classification")
    width, num_labels = model.config.hidden_size, model.config.num_labels
    model.classifier = torch.nn.Sequential(torch.nn.Linear(width, num_labels))
    return model


def with_other_forward() -> Any:
    model: Any = make_model("bert", "sequence-classification")
    layer, forward = model.bert.encoder.layer[0].output, model.bert.encoder.layer[0].output.forward
    layer.forward = lambda *given, **more: forward(*given, **more)
    return model


def configured(**settings: Any) -> Any:
    return make_model("bert", "sequence-classification", **settings)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"model": with_other_head(), "task": "token-classification"},
            "BertForTokenClassification has other parts than",
        ),
        ({"model": with_other_forward()}, "BertForSequenceClassification has other parts than"),
        ({"model": configured(is_decoder=True)}, "BertForSequenceClassification is a decoder"),
        ({"model": configured(chunk_size_feed_forward=8)}, "chunk_size_feed_forward cuts rows"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha makes noise"),
        ({"accelerator_config": {"dispatch_batches": True}}, "Trainer brings batches to the device"),
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
