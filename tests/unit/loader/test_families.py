"""Families whose buffers are computed, not saved: after a load they are what transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.loader.checkpoints import logits, tiny_batch
from transformers import AutoConfig, AutoModelForMaskedLM

from vramfit.loader.load import load

SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "roberta": SIZES,
    "xlm-roberta": SIZES,
    "camembert": SIZES,
    "electra": SIZES | {"embedding_size": 32},
    "albert": SIZES | {"embedding_size": 32},
    "mpnet": SIZES,
    "deberta-v2": SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    "modernbert": SIZES
    | {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    "distilbert": {"vocab_size": 200, "dim": 64, "n_layers": 3, "n_heads": 2, "hidden_dim": 128},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_family_loads_as_transformers_loads_it(family: str, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    ours, report = load(tmp_path, task="masked-lm", precision=precision, device="cpu")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=dtype)
    assert report.fresh == ()
    for name, buffer in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
        assert ours.get_buffer(name).dtype is buffer.dtype, name
    assert torch.equal(logits(ours, tiny_batch()), logits(theirs, tiny_batch()))
