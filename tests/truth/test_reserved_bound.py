"""What is promised as the most that a run reserves, against runs on a real GPU that once reserved more."""

from typing import Any

import pytest
from transformers import AutoConfig

import vramfit

CASES: list[tuple[str, dict[str, Any], int, int]] = [
    # model, keywords, allocated and reserved peaks: NVIDIA H200, torch 2.11.0, transformers 5.17.0, 2026-11-17
    (
        "all-MiniLM-L6-v2",
        {"batch": 6, "seq": 100, "precision": "fp32", "optimizer": "adamw-single", "mask": "padded"},
        527282688,
        648019968,
    ),
    ("squeezebert", {"batch": 16, "seq": 96, "precision": "amp-bf16"}, 1554406400, 1826619392),
    ("convbert", {"batch": 13, "seq": 128, "precision": "bf16"}, 1560675840, 1803550720),
    ("rembert", {"batch": 13, "seq": 96, "precision": "bf16"}, 5851290112, 6721372160),
]


@pytest.mark.parametrize(("model", "keywords", "allocated", "reserved"), CASES, ids=[case[0] for case in CASES])
def test_a_run_reserves_no_more_than_was_promised(
    model: str, keywords: dict[str, Any], allocated: int, reserved: int
) -> None:
    named = model if "-" in model else AutoConfig.for_model(model)
    found = vramfit.estimate(
        named, task="sequence-classification", mode="train", gpu="h200", torch_version="2.11.0", **keywords
    )
    assert reserved <= found.safe_reserved_bytes <= 1.05 * reserved
    assert found.peak_allocated_bytes == pytest.approx(allocated, rel=0.0005)
