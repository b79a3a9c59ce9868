"""Decoders are made ready for batches: padding, no cache, full precision, and whole texts where asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.tiny_families import tiny_config

from vramfit.loader.load import load
from vramfit.models import build_meta, resolve
from vramfit.models.configuration import is_causal, pad_as_configured, pools_last_token

IDS = torch.arange(10, 42).view(4, 8)


def built(model_type: str = "llama", task: str = "sequence-classification", **changes: Any) -> Any:
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    model, _ = load(config, task=task, random_weights=True, device="cpu")
    return model


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_batch_goes_through_a_head_whose_model_names_no_padding(model_type: str) -> None:
    model = built(model_type, pad_token_id=None)
    assert model.config.pad_token_id == 2  # the token that ends a text
    ids = IDS.clone()
    ids[1:, 5:] = 2
    mask = torch.ones_like(ids)
    mask[1:, 5:] = 0
    alone = model(input_ids=ids[1:2, :5], attention_mask=mask[1:2, :5]).logits
    assert torch.allclose(model(input_ids=ids, attention_mask=mask).logits[1:2], alone, atol=1e-6)


def test_an_encoder_keeps_its_configuration() -> None:
    before, after = tiny_config("bert").to_dict(), built("bert").config.to_dict()
    assert {name for name in before if before[name] != after[name]} <= {"architectures", "dtype", "_name_or_path"}


def test_no_keys_and_values_are_kept() -> None:
    assert built("qwen3")(input_ids=IDS).past_key_values is None


def test_weights_are_in_full_precision_whatever_the_configuration_names() -> None:
    config = tiny_config("llama")
    config.dtype = torch.bfloat16
    model = build_meta(resolve(config, task="sequence-classification"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("model_type", "reads_last"), [("llama", True), ("gpt2", True), ("bert", False), ("t5", False)]
)
def test_heads_that_read_the_last_token_are_told_from_others(model_type: str, reads_last: bool) -> None:
    assert pools_last_token(type(built(model_type))) == reads_last


@pytest.mark.parametrize("sees_all", [True, False])
def test_a_decoder_sees_whole_texts_where_its_configuration_says_so(sees_all: bool) -> None:
    """With padding and without: transformers alone follows the configuration only where it makes a mask."""
    model = built("llama", task="features", is_causal=not sees_all)
    assert is_causal(model) != sees_all
    other = IDS.clone()
    other[:, -1] = 50
    for mask in (None, torch.ones_like(IDS), torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)):
        first, second = (model(input_ids=ids, attention_mask=mask).last_hidden_state for ids in (IDS, other))
        assert torch.equal(first[:, 1:-1], second[:, 1:-1]) != sees_all


class Tokenizer:
    def __init__(self, pad_token_id: int | None) -> None:
        self.pad_token_id, self.pad_token = pad_token_id, None

    def convert_ids_to_tokens(self, number: int) -> str:
        return f"<{number}>"


@pytest.mark.parametrize(
    ("own", "configured", "ends", "token"),
    [(None, None, 7, "<7>"), (None, 5, 7, "<5>"), (3, None, [7, 8], "<7>"), (3, 5, 7, None), (None, None, None, "<0>")],
)
def test_a_tokenizer_pads_with_what_the_model_takes_for_padding(
    own: int | None, configured: int | None, ends: Any, token: str | None
) -> None:
    tokenizer = Tokenizer(own)
    pad_as_configured(tokenizer, SimpleNamespace(pad_token_id=configured, eos_token_id=ends))
    assert tokenizer.pad_token == token


def test_weights_that_a_family_draws_only_as_it_makes_modules_are_drawn_too() -> None:
    """Those of the first GPT were whatever memory held."""
    first, second = built("openai-gpt"), built("openai-gpt")
    weight = first.transformer.h[0].attn.c_attn.weight
    assert 0.015 < float(weight.std()) < 0.025
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
