"""For each technique: weights, gradients and optimizer state as predicted are those of a real model, to the byte."""

from typing import Any

import pytest
from tests.unit.techniques.live_bytes import predicted, real

pytest.importorskip("torchao", reason='pip install "vramfit[train]"')
pytest.importorskip("peft", reason='pip install "vramfit[train]"')

TECHNIQUES: list[dict[str, Any]] = [
    {},
    {"lora": 4},
    {"lora": 4, "precision": "bf16"},
    {"lora": 4, "checkpointing": "full"},
    {"lora": 4, "quantize": "int8"},
    {"lora": 4, "quantize": "int8", "precision": "bf16", "optimizer": "adafactor"},
    {"freeze": "backbone", "quantize": "int8"},
    {"freeze": "encoder", "quantize": "int8"},
    {"optimizer": "sgd"},
    {"optimizer": "adamw-8bit", "lora": 32},
    {"optimizer": "adafactor"},
    {"optimizer": "adamw-single", "freeze": "embeddings"},
]


@pytest.mark.parametrize("keywords", TECHNIQUES, ids=str)
def test_what_stays_is_predicted_to_the_byte(keywords: dict[str, Any]) -> None:
    assert predicted(**keywords) == real(**keywords)
