"""Which mask a prediction is for where none was asked for: the one whose batches take most."""

from typing import Any

import pytest
from transformers import AutoConfig

import vramfit
from vramfit.estimator.predict import estimate

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
JOB: dict[str, Any] = {"gpu": "h200", "batch": 16, "seq": 128, "loop": "stepper"}
NOTE = "predicted for batches without padding"


def decoder(num_groups: int) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": num_groups, "head_dim": 16}
    return AutoConfig.for_model("qwen3", **SIZES, **heads, pad_token_id=0)


@pytest.mark.parametrize(
    ("num_groups", "gpu", "precision", "mask"),
    [
        (2, "h200", "fp32", "ones"),
        (2, "h200", "amp-bf16", "padded"),
        (2, "t4", "amp-fp16", "ones"),  # no kernel of 16 bits for shared keys either
        (4, "h200", "fp32", "padded"),
    ],
)
def test_heads_that_share_keys_take_more_where_no_token_is_hidden(
    num_groups: int, gpu: str, precision: str, mask: str
) -> None:
    job = JOB | {"gpu": gpu, "precision": precision}
    peaks = {m: estimate(decoder(num_groups), mask=m, **job).peak_requested_bytes for m in ("ones", "padded")}
    found = estimate(decoder(num_groups), **job)
    assert found.workload.mask == mask
    assert found.peak_requested_bytes == max(peaks.values())
    assert any(NOTE in note for note in found.notes) == (mask == "ones")


def test_a_mask_that_was_asked_for_is_left_alone() -> None:
    found = estimate(decoder(2), mask="padded", **JOB)
    assert found.workload.mask == "padded"
    assert not any(NOTE in note for note in found.notes)


def test_a_plan_in_32_bits_holds_for_texts_of_one_length() -> None:
    job = {"gpu": "h200", "memory": "96MiB", "batch": 64, "seq": 128, "precision": "fp32"}
    plan = vramfit.plan(decoder(2), **job)
    split = {name: getattr(plan.workload, name) for name in ("batch", "micro_batch", "seq", "precision", "allocator")}
    kept = {
        name: getattr(plan.workload, name) for name in ("optimizer", "checkpointing", "attention", "offload", "gpu")
    }
    for mask in ("ones", "padded"):
        taken = estimate(decoder(2), mask=mask, loop="stepper", **split, **kept)
        assert taken.safe_reserved_bytes <= plan.estimate.safe_reserved_bytes


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("seq", [8, 32, 128])
@pytest.mark.parametrize("intermediate_size", [96, 4096])
def test_the_larger_of_both_masks_is_taken_wherever_the_peak_is(mode: str, seq: int, intermediate_size: int) -> None:
    config = decoder(2)
    config.intermediate_size = intermediate_size
    job = {"gpu": "h200", "batch": 16, "seq": seq, "mode": mode}
    peaks = {m: estimate(config, mask=m, **job).peak_requested_bytes for m in ("ones", "padded")}
    assert estimate(config, **job).peak_requested_bytes == max(peaks.values())
