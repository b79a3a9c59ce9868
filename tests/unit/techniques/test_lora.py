"""LoRA on the meta device and on a real model: where adapters go, what learns, and that gradients reach it."""

import sys
from itertools import product
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from vramfit.errors import MissingExtra, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.models.anatomy import encoder_layers
from vramfit.models.build import build_meta
from vramfit.models.resolve import resolve
from vramfit.runtime.stepper import Stepper
from vramfit.settings import freeze as freezing
from vramfit.techniques import application, lora, optimizers
from vramfit.workload import Workload

peft = pytest.importorskip("peft", reason='LoRA: pip install "vramfit[train]"')

SIZES = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.arange(24).view(2, 12)


def small(kind: Any = BertForSequenceClassification) -> Any:
    torch.manual_seed(0)
    config = BertConfig(**SIZES, intermediate_size=128, max_position_embeddings=32)  # type: ignore[arg-type]
    return kind(config)


def learned(model: torch.nn.Module) -> dict[str, int]:
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("name", "adapted", "per_layer"),
    [
        ("bert-base-uncased", {"query", "value"}, 2),
        ("roberta-base", {"query", "value"}, 2),
        ("xlm-roberta-base", {"query", "value"}, 2),
        ("distilbert-base-uncased", {"q_lin", "v_lin"}, 2),
        ("electra-small-discriminator", {"query", "value"}, 2),
        ("albert-base-v2", {"query", "value"}, 2),
        ("deberta-v3-xsmall", {"query_proj", "value_proj"}, 2),
        ("mpnet-base", {"q", "v"}, 2),
        ("modernbert-base", {"Wqkv"}, 1),
        ("camembert-base", {"query", "value"}, 2),
    ],
)
def test_each_family_is_adapted_where_it_makes_queries_and_values(name: str, adapted: set[str], per_layer: int) -> None:
    model = build_meta(resolve(name, task="sequence-classification"))
    found = lora.targets(model)
    assert {target.rsplit(".", 1)[-1] for target in found} == adapted
    assert len(found) == per_layer * len(encoder_layers(model))
    lora.apply(model, 8)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    adapters = [n for n in learned(model) if "lora_" in n]
    assert len(adapters) == 2 * len(found)


FAMILIES = (
    "albert-base-v2",
    "bert-tiny",
    "deberta-v3-xsmall",
    "distilbert-base-uncased",
    "electra-small-discriminator",
    "modernbert-base",
    "mpnet-base",
    "nomic-embed-text-v1.5",
    "roberta-base",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_predicted_with_adapters_beside_int8(name: str) -> None:
    model: Any = build_meta(resolve(name, task="features")) if name.startswith("nomic") else name
    keywords: dict[str, Any] = {"batch": 2, "seq": 16, "precision": "amp-bf16", "gpu": "h200"}
    full = estimate(model, **keywords)
    adapted = estimate(model, **keywords, lora=8, quantize="int8")
    assert adapted.peak_allocated_bytes < full.peak_allocated_bytes
    assert adapted.breakdown["weights"] < full.breakdown["weights"]


HEADS = ("masked-lm", "pretraining", "token-classification", "question-answering")


@pytest.mark.parametrize(("task", "loop"), product(HEADS, ("plain", "stepper")))
def test_every_task_is_predicted(task: str, loop: str) -> None:
    made = estimate("bert-tiny", task=task, batch=2, seq=16, lora=8, loop=loop, gpu="h200")
    assert made.breakdown["optimizer"] < made.breakdown["weights"] / 2


def test_a_module_without_a_head_is_predicted() -> None:
    model = build_meta(resolve("bert-tiny", task="features"))
    made = estimate(model, batch=2, seq=16, lora=8, gpu="h200")
    assert made.breakdown["optimizer"] < made.breakdown["weights"] / 2


def test_the_stepper_moves_adapters_and_head_alone() -> None:
    model = small()
    application.apply(model, Workload(model="m", lora=4, quantize="int8"))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if type(p) is torch.nn.Parameter}
    stepper = Stepper(model, optimizers.make("adamw", model.parameters(), lr=0.1), micro_batch=1)
    for _ in range(2):  # one half of an adapter starts at zero and hides the other in the first step
        stepper.step({"input_ids": IDS, "labels": torch.tensor([0, 1])})
    moved = {name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])}
    assert moved == set(learned(model))


def test_what_learns_is_what_peft_makes_learn() -> None:
    """peft itself, with the head saved: the same adapters of the same sizes, and the same head."""
    ours, theirs = small(), small()
    lora.apply(ours, 4)
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    wrapped = peft.get_peft_model(theirs, config)
    names = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): size
        for name, size in learned(wrapped).items()
    }
    assert learned(ours) == names
    assert sum(learned(ours).values()) == 2 * 2 * (4 * 64 + 64 * 4) + 2 * 64 + 2


def test_it_computes_what_peft_computes() -> None:
    ours, theirs = small().eval(), small().eval()
    lora.apply(ours, 4)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"])
    peft.inject_adapter_in_model(config, theirs)
    torch.manual_seed(1)
    with torch.no_grad():
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if "lora_" in name:
                p.copy_(torch.randn_like(p))
            q.copy_(p)
    assert torch.equal(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_meta_model_and_a_real_one_end_alike(dtype: torch.dtype) -> None:
    real = small().to(dtype)
    with torch.device("meta"):
        meta = small().to(dtype)
    for model in (real, meta):
        lora.apply(model, 4)
    described = [[(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (real, meta)]
    assert described[0] == described[1]
    assert [n for n, _ in real.named_buffers()] == [n for n, _ in meta.named_buffers()]


@pytest.mark.parametrize("checkpointing", [None, "full", 1])
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16"])
def test_gradients_reach_every_adapter_and_the_head(checkpointing: Any, quantize: Any, precision: Any) -> None:
    model = small()
    workload = Workload(
        model="m", lora=4, checkpointing=checkpointing, quantize=quantize, precision=precision, dropout=False
    )
    application.apply(model, workload)
    if checkpointing is not None:
        model.train()  # transformers checkpoints in training mode only; the small model drops nothing that matters
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # starts at zero, which hides the gradient of the other half
                p.copy_(torch.randn_like(p))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "amp-bf16"):
        loss = model(input_ids=IDS, labels=torch.tensor([0, 1])).loss
    loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name
        if p.requires_grad:
            assert p.grad.abs().max() > 0, name


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (None, "full"):
        model = small()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        model.config.attention_probs_dropout_prob = 0.0
        torch.manual_seed(1)
        application.apply(model, Workload(model="m", lora=4, checkpointing=checkpointing))  # type: ignore[arg-type]
        model.config._attn_implementation = "eager"
        model(input_ids=IDS, labels=torch.tensor([0, 1])).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == 2 * 2 * 2 + 2
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_decoder_tied_to_the_word_embedding_stays_tied_and_frozen() -> None:
    model = small(BertForMaskedLM)
    lora.apply(model, 4)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert not model.cls.predictions.decoder.weight.requires_grad
    assert model.cls.predictions.transform.dense.weight.requires_grad


def test_frozen_embeddings_say_nothing_new() -> None:
    model, plain = small(), small()
    application.apply(model, Workload(model="m", lora=4, freeze="embeddings"))
    lora.apply(plain, 4)
    assert learned(model) == learned(plain)


@pytest.mark.parametrize("freeze", ["encoder", "backbone", 1])
def test_a_layer_frozen_out_cannot_be_adapted(freeze: Any) -> None:
    with pytest.raises(WorkloadError, match=r"lora 8 adapts layers that freeze .* takes out of training"):
        Workload(model="m", lora=8, freeze=freeze)
    model = small()
    freezing.apply(model, freeze)
    with pytest.raises(WorkloadError, match=r"lora 8 adapts \d of 4 projections in layers that freeze takes out"):
        lora.apply(model, 8)


def test_a_pattern_that_freezes_a_layer_out_is_told_too() -> None:
    with pytest.raises(WorkloadError, match=r"2 of 4 projections .*bert\.encoder\.layer\.0\.attention\.self\.query"):
        application.apply(small(), Workload(model="m", lora=8, freeze="bert.encoder.layer.0.*"))


def test_a_rank_beyond_the_projections_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="lora 65 is beyond the 64"):
        lora.apply(small(), 65)


def test_a_model_without_known_projections_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="Sequential have no attention projection"):
        lora.apply(torch.nn.Sequential(torch.nn.Linear(4, 4)), 2)


def test_without_peft_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lora._peft.cache_clear()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match="lora needs the package peft") as caught:
        lora.apply(small(), 4)
    assert caught.value.hint == 'pip install "vramfit[train]"'


def test_no_rank_changes_nothing() -> None:
    model = small()
    before = [name for name, _ in model.named_parameters()]
    lora.apply(model, None)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == before


def tiny(model_type: str = "llama") -> Any:
    from benchmarks.tiny_families import tiny_config

    return build_meta(resolve(tiny_config(model_type), task="sequence-classification"))


@pytest.mark.parametrize(
    ("model_type", "asked", "names"),
    [
        ("llama", None, {"q_proj", "v_proj"}),
        ("llama", ("all-linear",), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("llama", ("q_proj", "mlp.down_proj"), {"q_proj", "down_proj"}),
        ("gpt2", None, {"c_attn"}),
        ("gpt2", ("all-linear",), {"c_attn", "c_proj", "c_fc"}),
        ("gpt_neox", None, {"query_key_value"}),
        ("bert", ("all-linear",), {"query", "key", "value", "dense"}),
    ],
)
def test_adapters_go_where_they_are_asked_for(model_type: str, asked: Any, names: set[str]) -> None:
    model = tiny(model_type)
    lora.apply(model, 4, asked)
    adapted = {n for n, m in model.named_modules() if hasattr(m, "lora_A")}
    assert {name.rsplit(".", 1)[-1] for name in adapted} == names
    assert not any(name.startswith(("score", "classifier")) for name in adapted)


def test_both_stacks_of_an_encoder_decoder_are_adapted() -> None:
    found = lora.targets(tiny("bart"), ("all-linear",))
    assert {name.split(".")[1] for name in found} == {"encoder", "decoder"}


def test_an_unknown_layer_is_refused_with_those_there_are() -> None:
    with pytest.raises(WorkloadError, match=r"lora_targets nope: no linear layer .* it has q_proj, k_proj"):
        lora.apply(tiny(), 4, ("q_proj", "nope"))


def test_adapters_of_gpt2_learn_and_gradients_reach_them() -> None:
    from benchmarks.tiny_families import tiny_config
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(tiny_config("gpt2"))
    lora.apply(model, 4, ("all-linear",))
    model(input_ids=IDS + 10, labels=torch.tensor([0, 1])).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


@pytest.mark.parametrize(
    "wrong", [{"lora_targets": "q_proj"}, {"lora": 4, "lora_targets": 7}, {"lora": 4, "lora_targets": ""}]
)
def test_targets_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="lora_targets"):
        Workload.from_keywords(model="m", mode="train", **wrong)
