"""Packed rows of decoders: gradients are those of padded rows, whatever attention sees and the head reads."""

from typing import Any

import pytest
import torch
from benchmarks.family_steps import difference
from benchmarks.tiny_families import tiny_config

from vramfit.cuda.kernels.attention import packed_backward
from vramfit.cuda.kernels.script import KernelCall, Script, TensorSpec
from vramfit.errors import WorkloadError
from vramfit.loader.load import load
from vramfit.models.configuration import supported_attention
from vramfit.runtime.stepper import Stepper
from vramfit.tasks.parts.losses import head_loss, mean_of, model_inputs
from vramfit.techniques import packing
from vramfit.techniques.packing.attention import attend

LENGTHS = (24, 17, 9, 3)


def make_model(model_type: str, task: str, **changes: Any) -> Any:
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    model, _ = load(config, task=task, random_weights=True, device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model


def make_batch(task: str, *, last: int = 50) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(10, 100, (len(LENGTHS), max(LENGTHS)))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        ids[row, length - 1], ids[row, length:], mask[row, length:] = last, 1, 0
    labels = torch.arange(len(LENGTHS)) % 3
    if task == "token-classification":
        labels = torch.where(mask.bool(), ids % 3, -100)
    return {"input_ids": ids, "attention_mask": mask} | ({} if task == "embedding" else {"labels": labels})


def gradients(model: Any, batch: dict[str, Any], task: str) -> dict[str, torch.Tensor]:
    output = model(**model_inputs(batch))
    if task == "embedding":
        loss = (output.embedding * torch.linspace(-1, 1, output.embedding.shape[1])).sum(1).square().sum()
    else:
        loss = mean_of(head_loss(model, batch, task), output, batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "embedding"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma", "mistral", "gpt2"])
def test_packed_gradients_are_those_of_padded_rows(model_type: str, task: str) -> None:
    """Grouped-query heads (all but GPT-2), a window (Mistral), learned positions that begin anew (GPT-2)."""
    model, batch = make_model(model_type, task), make_batch(task)
    right = gradients(model, batch, task)
    packing.apply(model, task)
    assert difference(gradients(model, batch, task), right) <= 1e-6  # padded batches go on as before
    assert difference(gradients(model, packing.pack(batch, model), task), right) <= 1e-5
    assert difference(gradients(model, batch, task), right) <= 1e-6
    packing.undo(model)
    assert difference(gradients(model, batch, task), right) == 0


def test_a_decoder_that_sees_whole_texts_is_packed_too() -> None:
    task = "sequence-classification"
    model, batch = make_model("llama", task, is_causal=False), make_batch(task)
    right = gradients(model, batch, task)
    packing.apply(model, task)
    assert difference(gradients(model, packing.pack(batch, model), task), right) <= 1e-5


def test_a_text_that_ends_with_the_padding_token_is_read_as_transformers_reads_it() -> None:
    task = "sequence-classification"
    model, batch = make_model("llama", task), make_batch(task, last=1)
    right = gradients(model, batch, task)
    packing.apply(model, task)
    assert difference(gradients(model, packing.pack(batch, model), task), right) <= 1e-5


def test_padding_on_the_left_gives_the_same_gradients() -> None:
    task = "sequence-classification"
    model, batch = make_model("llama", task), make_batch(task)
    right = gradients(model, batch, task)
    lengths = batch["attention_mask"].sum(1).tolist()
    rolled = {
        name: torch.stack([row.roll(max(LENGTHS) - n) for row, n in zip(value, lengths, strict=True)])
        for name, value in batch.items()
        if value.dim() > 1
    }
    rolled["labels"] = batch["labels"]
    assert difference(gradients(model, rolled, task), right) <= 1e-5
    packing.apply(model, task)
    assert difference(gradients(model, packing.pack(rolled, model), task), right) <= 1e-5


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    task = "sequence-classification"
    model, batch = make_model("llama", task), make_batch(task)
    right = gradients(model, batch, task)
    packing.apply(model, task)
    failing = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        gradients(model, packing.pack(batch, model), task)
    failing.remove()
    assert difference(gradients(model, batch, task), right) <= 1e-6


def test_a_stepper_learns_from_packed_rows_of_a_decoder() -> None:
    task = "sequence-classification"
    model, batch = make_model("qwen3", task), make_batch(task)
    right = gradients(model, batch, task)
    packing.apply(model, task)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2, seq=max(LENGTHS))
    stepper.gradients(batch)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert difference(found, right) <= 1e-5


def test_a_model_of_the_users_without_padding_is_told_what_to_set() -> None:
    from transformers import AutoModelForSequenceClassification

    config = tiny_config("llama")
    config.pad_token_id = None
    model = AutoModelForSequenceClassification.from_config(config)
    packing.apply(model, "sequence-classification")
    with pytest.raises(WorkloadError, match=r"pad_token_id is None") as caught:
        model(**model_inputs(packing.pack(make_batch("sequence-classification"), model)))
    assert "tokenizer's pad_token_id" in (caught.value.hint or "")


def test_scores_that_are_capped_are_refused_by_name() -> None:
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(WorkloadError, match="caps attention scores"):
        attend(torch.nn.Identity(), query, query, query, None, softcap=50.0)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "jamba", "minimax"])
def test_families_that_were_not_compared_are_not_packed(model_type: str) -> None:
    assert "packed" not in supported_attention(tiny_config(model_type))


@pytest.mark.parametrize(("key_heads", "num_temps"), [(16, 2), (8, 4)])
def test_gradients_of_shared_heads_are_made_for_every_head_first(key_heads: int, num_temps: int) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_varlen_bwd: dk_expanded and dv_expanded."""
    query, key = (TensorSpec((64, heads, 128), (heads * 128, 128, 1), "bfloat16", 2) for heads in (16, key_heads))
    arguments = (query, query, key, key, query, None, TensorSpec((5,), (1,), "int32", 4))
    script, name = Script(), "_flash_attention_backward"
    profile: Any = None
    packed_backward(KernelCall(name, arguments, {}, (query, key, key), profile), script)
    temps = [size for kind, _, size in script.steps if kind == "temp"]
    assert len(temps) == num_temps
    assert temps[2:] == [64 * 16 * 128 * 2] * (num_temps - 2)
