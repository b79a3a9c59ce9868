"""Advice is arithmetic: what is said to be saved is what another estimate says."""

from typing import Any

import pytest
from tests.unit.report.samples import drawn
from transformers import ModernBertConfig

from vramfit.errors import WorkloadError
from vramfit.estimator.predict import MIN_SAVED_SHARE, advise, estimate
from vramfit.models import resolve
from vramfit.records.estimate import Advice
from vramfit.report.estimate import render_advice

WORKLOAD: dict[str, Any] = {"batch": 128, "seq": 128, "attention": "eager", "gpu": "t4"}


def changes(**keywords: Any) -> dict[str, Advice]:
    return {a.change: a for a in advise("bert-tiny", **(WORKLOAD | keywords))}


def changed(advice: Advice) -> dict[str, Any]:
    keyword, value = advice.change.split(" ", 1)
    return {keyword: int(value) if value.isdigit() else value}


@pytest.mark.parametrize("keywords", [{}, {"gpu": "a100", "mode": "forward"}, {"accumulate": 2}])
def test_what_a_change_saves_is_the_difference_of_two_estimates(keywords: dict[str, Any]) -> None:
    now = estimate("bert-tiny", **(WORKLOAD | keywords))
    found = changes(**keywords)
    assert found
    for advice in found.values():
        then = estimate("bert-tiny", **(WORKLOAD | keywords | changed(advice)))
        assert advice.saved_bytes == now.peak_allocated_bytes - then.peak_allocated_bytes
        assert advice.peak_allocated_bytes == then.peak_allocated_bytes
        assert advice.fits is then.fits
        assert advice.saved_bytes >= MIN_SAVED_SHARE * now.peak_allocated_bytes


def test_packed_attention_is_advised_where_masks_take_much() -> None:
    config = ModernBertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    job: dict[str, Any] = {"batch": 2, "seq": 4096, "gpu": "a10g"}
    now = estimate(config, **job)
    assert now.has_large_mask
    packed = next(a for a in advise(config, **job) if a.change == "attention packed, precision amp-bf16")
    then = estimate(config, **job, attention="packed", precision="amp-bf16", loop="stepper")
    assert (packed.kind, packed.peak_allocated_bytes, then.mask_bytes) == ("numeric", then.peak_allocated_bytes, 0)
    shown = drawn(render_advice([packed], now))
    assert "Packed attention has no mask, which takes" in shown
    assert not any("packed" in change for change in changes(attention="sdpa"))  # masks of 128 tokens are small
    assert not any("packed" in a.change for a in advise(config, **(job | {"gpu": "t4"})))  # it has no such kernel


def test_the_largest_saving_comes_first() -> None:
    saved = [a.saved_bytes for a in changes().values()]
    assert saved == sorted(saved, reverse=True)
    assert len(saved) >= 4


def test_every_change_says_what_kind_it_is() -> None:
    kinds = {change: a.kind for change, a in changes(precision="fp32", batch=512).items()}
    assert kinds["attention sdpa"] == kinds["checkpointing full"] == kinds["accumulate 2"] == "free"
    assert kinds["precision amp-fp16"] == "numeric"


def test_a_change_that_frees_weights_from_learning_is_another_training() -> None:
    assert changes(batch=8)["freeze embeddings"].kind == "different training"


def test_what_is_done_already_is_not_advised() -> None:
    found = changes(attention="sdpa", checkpointing="full", optimizer="sgd", precision="amp-fp16", freeze="encoder")
    assert set(found) <= {"accumulate 2"}


def test_the_lower_precision_is_one_that_the_gpu_has() -> None:
    assert "precision amp-fp16" in changes(gpu="t4")
    assert "precision amp-bf16" in changes(gpu="a100")
    assert "precision bf16" in changes(gpu="a100", mode="infer")


def test_inference_is_not_told_to_train_differently() -> None:
    assert set(changes(mode="infer")) <= {"attention sdpa", "precision fp16"}


def test_an_odd_batch_is_not_halved() -> None:
    assert not any(change.startswith("accumulate") for change in changes(batch=513))


def test_a_kernel_that_the_family_lacks_is_not_advised() -> None:
    config = resolve("deberta-v3-xsmall").config
    config.num_hidden_layers = 1
    found = advise(config, batch=4, seq=64, gpu="t4")
    assert found
    assert not any(a.change.startswith("attention") for a in found)


def test_a_workload_that_is_wrong_in_itself_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="beyond the 512 positions"):
        advise("bert-tiny", seq=513)
