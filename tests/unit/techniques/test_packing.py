"""Packed batches: what padded ones give, sample by sample, and no sample sees another."""

from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import COMMON, FAMILIES, HEADS, flat_gradient, flat_weights, make_batch, make_model
from transformers import AutoConfig
from transformers.utils import ModelOutput

from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.models.configuration import PACKED_ENCODERS, class_for_task, supported_attention
from vramfit.runtime.stepper import Stepper
from vramfit.step.plain import Batch
from vramfit.step.splitting import Rows, split
from vramfit.tasks.parts.losses import head_loss, model_inputs
from vramfit.techniques import packing

PACKED = [name for name in FAMILIES if name != "deberta-v2"]


def packed_model(family: str, task: str, **changes: object) -> torch.nn.Module:
    model = make_model(family, task, **changes)
    packing.apply(model, task)  # type: ignore[arg-type]
    return model


def with_pads(family: str, batch: Batch) -> Batch:
    """Padding as the family's tokenizer writes it."""
    pad = FAMILIES[family].get("pad_token_id", 0)
    return batch | {"input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], pad)}


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Of the tokens or sequences that count, in order."""
    inputs = model_inputs(batch)
    output = model(**inputs)
    if "start_positions" in batch:
        made = torch.stack([output.start_logits, output.end_logits], -1)
        if "cu_seq_lens_q" in batch:
            places = torch.arange(made.shape[1], device=made.device)
            return made[places < batch["cu_seq_lens_q"].diff()[:, None]]
    else:
        made = output.logits
    per_token = made.dim() == 3
    if per_token and "cu_seq_lens_q" in batch:
        return made[0]
    return made[batch["attention_mask"].bool()] if per_token else made


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("family", PACKED)
def test_logits_are_those_of_the_padded_batch(family: str, task: str) -> None:
    batch = with_pads(family, make_batch(task))
    with torch.no_grad():
        expected = logits_of(make_model(family, task).eval(), batch)
        model = packed_model(family, task).eval()
        made = logits_of(model, packing.pack(batch, model))
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("task", [task for task in HEADS if task != "question-answering"])
@pytest.mark.parametrize("family", PACKED)
def test_gradients_are_those_of_the_padded_batch(family: str, task: str) -> None:
    """But for answers in a text: there the padded softmax runs over padding too."""
    batch = with_pads(family, make_batch(task))
    gradients = []
    for model in (make_model(family, task), packed_model(family, task)):
        given = packing.pack(batch, model) if gradients else batch
        loss = head_loss(model, batch)
        sums = loss.sums(model(**model_inputs(given)), given)
        sum(s / n for s, n in zip(sums, loss.counts(batch), strict=True)).backward()  # type: ignore[union-attr]
        gradients.append(flat_gradient(model))
    assert (gradients[1] - gradients[0]).norm() < 1e-5 * gradients[0].norm()


@pytest.mark.parametrize("family", PACKED)
def test_no_sample_sees_another(family: str) -> None:
    task = "token-classification"
    batch = with_pads(family, make_batch(task))
    other = {name: value.clone() for name, value in batch.items()}
    other["input_ids"][4, :3] = 50
    model = packed_model(family, task).eval()
    with torch.no_grad():
        before, after = (logits_of(model, packing.pack(b, model)) for b in (batch, other))
    rows = torch.arange(12).repeat_interleave(batch["attention_mask"].sum(1))
    assert torch.equal(before[rows != 4], after[rows != 4])
    assert not torch.equal(before[rows == 4], after[rows == 4])


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_gradients_of_a_sample_do_not_depend_on_the_others(family: str) -> None:
    task = "token-classification"
    batch = make_batch(task)
    only_first = batch["labels"].clone()
    only_first[1:] = -100
    gradients = []
    for changed in (False, True):
        given = batch | {"labels": only_first, "input_ids": batch["input_ids"].clone()}
        if changed:
            given["input_ids"][5, :3] = 50
        model = packed_model(family, task)
        packed = packing.pack(given, model)
        loss = head_loss(model, given)
        loss.sums(model(**model_inputs(packed)), packed)[0].backward()
        gradients.append(flat_gradient(model))
    table = 99 * 32  # the word embedding comes first, and its rows of other samples get zeros
    assert torch.equal(gradients[0][table:], gradients[1][table:])


def test_windows_of_local_layers_end_with_the_sequence() -> None:
    """ModernBERT's local layers, with a window shorter than the sequences."""
    changes = {"local_attention": 4, "global_attn_every_n_layers": 2}
    batch = make_batch("token-classification")
    with torch.no_grad():
        expected = logits_of(make_model("modernbert", "token-classification", **changes).eval(), batch)
        model = packed_model("modernbert", "token-classification", **changes).eval()
        made = logits_of(model, packing.pack(batch, model))
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_both_ways_of_pooling(pooling: str) -> None:
    changes = {"classifier_pooling": pooling}
    batch = make_batch("sequence-classification")
    with torch.no_grad():
        expected = logits_of(make_model("modernbert", "sequence-classification", **changes).eval(), batch)
        model = packed_model("modernbert", "sequence-classification", **changes).eval()
        made = logits_of(model, packing.pack(batch, model))
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)


def test_a_packed_model_still_takes_padded_batches() -> None:
    batch = make_batch("sequence-classification")
    with torch.no_grad():
        expected = logits_of(make_model("bert", "sequence-classification").eval(), batch)
        made = logits_of(packed_model("bert", "sequence-classification").eval(), batch)
    torch.testing.assert_close(made, expected)


def test_padding_on_the_left_is_left_out_too() -> None:
    batch = make_batch("token-classification")
    flipped = {name: value.flip(1) for name, value in batch.items()}
    model = packed_model("bert", "token-classification").eval()
    packed = packing.pack(flipped, model)
    assert packed["input_ids"].shape == (1, int(batch["attention_mask"].sum()))
    assert torch.equal(packed["position_ids"], packing.pack(batch, model)["position_ids"])


def test_attention_of_its_own_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"attention packed: DebertaV2.* computes attention in code of its own"):
        packing.apply(make_model("deberta-v2", "sequence-classification"), "sequence-classification")


def test_checkpointed_layers_know_where_sequences_begin() -> None:
    batch = make_batch("sequence-classification")
    gradients = []
    for full in (False, True):
        model = packed_model("bert", "sequence-classification")
        if full:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        packed = packing.pack(batch, model)
        head_loss(model, batch).sums(model(**model_inputs(packed)), packed)[0].backward()
        gradients.append(flat_gradient(model))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
@pytest.mark.parametrize("micro_batch", [12, 3, 1])
def test_a_stepper_packs_by_real_tokens_and_keeps_the_gradient(task: str, micro_batch: int) -> None:
    batch = make_batch(task)
    plain = make_model("bert", task)
    plain(**batch).loss.backward()
    model = packed_model("bert", task)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"].shape[1]), with_kwargs=True)
    before = flat_weights(model)
    Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=micro_batch, seq=16).step(batch)
    expected = flat_gradient(plain)
    assert (before - flat_weights(model) - expected).norm() < 1e-5 * expected.norm()
    assert max(seen) <= 16 * micro_batch
    assert sum(seen) <= int(batch["attention_mask"].sum())  # a micro-batch without labels is left out


def test_packed_micro_batches_are_fewer_than_padded_ones() -> None:
    batch = make_batch("sequence-classification")
    padded, packed = (split(batch, 48, rows=rows) for rows in (None, Rows()))
    assert len(packed) < len(padded)
    assert sorted(int(n) for b in packed for n in b["labels"]) == sorted(batch["labels"].tolist())
    assert all(int(b["attention_mask"].sum()) <= 48 for b in packed)


PREDICTED: dict[str, Any] = {"precision": "amp-bf16", "loop": "stepper", "gpu": "h200", "optimizer": "adamw-fused"}


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("model", ["bert-tiny", "modernbert-base"])
def test_packed_training_is_predicted(model: str, task: Any) -> None:
    made = estimate(model, task=task, batch=8, seq=64, attention="packed", torch_version="2.11", **PREDICTED)
    assert made.basis == "verified"
    assert made.step_time_s is not None


def test_memory_follows_the_real_tokens() -> None:
    keywords = {"batch": 32, "seq": 512, "attention": "packed", **PREDICTED}
    full, same, fewer = (
        estimate("bert-mini", **keywords, lengths=lengths).peak_allocated_bytes
        for lengths in (None, (512,) * 32, (512, *(100,) * 31))
    )
    assert full == same
    assert fewer < 0.6 * full


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"precision": "fp32"}, "its kernel computes in 16 bits, not fp32"),
        ({"gpu": "t4", "precision": "amp-fp16"}, "too old for torch's flash kernel"),
        ({"loop": "plain"}, "is for loop 'stepper'"),
        ({"lengths": (8, 8), "batch": 4, "seq": 8}, "lengths names 2 sequences but batch is 4"),
        ({"model": "deberta-v3-base"}, "attention 'packed'|code of its own"),
    ],
    ids=str,
)
def test_what_cannot_be_packed_is_said(keywords: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": "bert-tiny", "batch": 4, "seq": 32, "attention": "packed", **PREDICTED}
    given |= keywords
    with pytest.raises(WorkloadError, match=words):
        estimate(given.pop("model"), **given)


@pytest.mark.parametrize("more", [0, 3])
def test_token_logits_get_their_rows_back(more: int) -> None:
    """Also where the batch is wider than its longest sequence."""
    batch = {n: torch.nn.functional.pad(v, (0, more)) for n, v in make_batch("token-classification").items()}
    model = packed_model("bert", "token-classification").eval()
    with torch.no_grad():
        expected = model(**model_inputs(batch)).logits
        packed = packing.pack(batch, model)
        made = packing.unpack(model(**model_inputs(packed)), batch["attention_mask"]).logits
    inside = batch["attention_mask"].bool()
    torch.testing.assert_close(made[inside], expected[inside], atol=2e-6, rtol=1e-5)
    assert not made[~inside].any()


def test_logits_of_a_lone_sequence_stay_though_it_has_as_many_tokens_as_there_are_labels() -> None:
    output = ModelOutput(logits=torch.rand(1, 5))
    assert packing.unpack(output, torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])).logits.shape == (1, 5)


def test_labels_of_samples_are_no_labels_of_tokens_though_they_are_as_many() -> None:
    """Sixteen yes-or-no questions, asked of sequences of sixteen tokens."""
    model = packed_model("bert", "sequence-classification", num_labels=16)
    batch = make_batch("sequence-classification") | {"labels": torch.rand(12, 16)}
    assert packing.pack(batch, model)["labels"].shape == (12, 16)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3, seq=16)
    padded = make_model("bert", "sequence-classification", num_labels=16)
    plain = Stepper(padded, torch.optim.SGD(padded.parameters(), lr=0.1), micro_batch=3, seq=16)
    assert stepper.step(batch) == pytest.approx(plain.step(batch), rel=1e-5)


SEEN: list[int] = []
"""Widths of passes; global, since a rehearsal puts back what hooks hold."""


def test_a_rehearsal_of_packed_windows_is_full() -> None:
    model = packed_model("bert", "sequence-classification")
    SEEN.clear()
    model.register_forward_pre_hook(lambda m, a, k: SEEN.append(k["input_ids"].shape[1]), with_kwargs=True)
    Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3, seq=16).rehearse(
        make_batch("sequence-classification")
    )
    assert max(SEEN) == 48


@pytest.mark.parametrize("task", ["token-classification", "question-answering"])
def test_labels_that_point_to_padding_do_not_count(task: str) -> None:
    """A tokenizer's padding may carry labels, and an answer may have been cut off."""
    batch = make_batch(task)
    clean = {name: value.clone() for name, value in batch.items()}
    if task == "token-classification":
        batch["labels"][batch["attention_mask"] == 0] = 1
        clean["labels"][batch["attention_mask"] == 0] = -100
    else:
        short = int(batch["attention_mask"].sum(1).argmin())
        batch["start_positions"][short] = batch["end_positions"][short] = 14
        clean["start_positions"][short] = clean["end_positions"][short] = 500
    losses = []
    for given in (clean, batch):
        model = packed_model("bert", task)
        losses.append(Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3, seq=16).step(given))
    assert losses[0] == losses[1] < 10


def test_a_sequence_without_tokens_is_refused() -> None:
    batch = make_batch("sequence-classification")
    batch["attention_mask"][11] = 0
    model = packed_model("bert", "sequence-classification")
    with pytest.raises(WorkloadError, match="no token that is attended to"):
        packing.pack(batch, model)


def test_to_apply_it_twice_is_to_apply_it_once() -> None:
    batch = make_batch("question-answering")
    model = packed_model("bert", "question-answering").eval()
    packing.apply(model, "question-answering")
    assert model(**model_inputs(packing.pack(batch, model))).start_logits.shape == (12, 16)


def test_a_model_that_shares_the_configuration_is_not_taken_for_packed() -> None:
    model = make_model("bert", "sequence-classification")
    other = type(model)(model.config)
    packing.apply(model, "sequence-classification")
    assert packing.is_applied(model)
    assert not packing.is_applied(other)


def test_local_layers_keep_their_window_without_a_mask() -> None:
    changes = {"local_attention": 4, "global_attn_every_n_layers": 2}
    ids = torch.randint(5, 99, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = make_model("modernbert", "token-classification", **changes).eval()(input_ids=ids).logits
        made = packed_model("modernbert", "token-classification", **changes).eval()(input_ids=ids).logits
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)


def test_adapters_may_be_there_before() -> None:
    peft = pytest.importorskip("peft", reason='pip install "vramfit[train]"')
    batch = make_batch("sequence-classification")
    model = make_model("bert", "sequence-classification").eval()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])).eval()
    with torch.no_grad():
        expected = logits_of(wrapped, batch)
        packing.apply(wrapped, "sequence-classification")
        made = logits_of(wrapped, packing.pack(batch, wrapped))
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)


def test_rotary_positions_in_full_precision_are_predicted_too() -> None:
    assert estimate("nomic-embed-text-v1.5", batch=4, seq=32, attention="packed", **PREDICTED).fits is not None


def test_padding_on_the_left_loses_no_token_when_a_window_is_split() -> None:
    batch = make_batch("token-classification")
    lengths = batch["attention_mask"].sum(1)
    rolled = {
        name: torch.stack([row.roll(16 - int(n)) for row, n in zip(value, lengths, strict=True)])
        for name, value in batch.items()
    }
    losses = []
    for given in (batch, rolled):
        model = packed_model("bert", "token-classification")
        losses.append(Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3, seq=16).step(given))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "masked-lm"])
@pytest.mark.parametrize("family", PACKED_ENCODERS)
def test_every_family_that_may_be_packed_gives_the_gradients_of_padded_rows(family: str, task: str) -> None:
    names = {"n_layer": 2, "n_head": 2, "n_embd": 32, "head_dim": 16, "d_model": 32, "num_key_value_heads": 2}
    silent = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0}
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **names, **silent})
    batch, gradients = make_batch(task, 6), []
    for packs in (False, True):
        torch.manual_seed(0)
        model = class_for_task(config, task)(config).eval()
        if packs:
            packing.apply(model, task)
        inputs = packing.pack(packing.without_padding(batch), model) if packs else batch
        loss = head_loss(model, batch)
        (loss.sums(model(**model_inputs(inputs)), inputs)[0] / loss.counts(batch)[0]).backward()
        gradients.append(flat_gradient(model))
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-5


@pytest.mark.parametrize("family", ["eurobert", "esm", "mobilebert", "doge", "nemotron"])
def test_families_that_look_along_a_row_are_not_packed(family: str) -> None:
    assert "packed" not in supported_attention(AutoConfig.for_model(family))


def test_packed_steps_of_a_model_that_was_not_prepared_are_refused() -> None:
    """Its sequences would see each other, and where labels are of tokens nothing else would show it."""
    task = "token-classification"
    model = make_model("bert", task)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3, seq=16, attention="packed")
    with pytest.raises(WorkloadError, match="attention packed: BertForTokenClassification is not prepared"):
        stepper.step(make_batch(task))
