"""What one GPU of several takes: DDP's buckets, FSDP2's shards, gathered layers and scattered gradients."""

from typing import Any

import pytest

from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.records.estimate import Estimate
from vramfit.units import MIB

MODEL = "bert-mini"


def rank(num_gpus: int, parallel: str | None = None, *, passes: int = 1, **keywords: Any) -> Estimate:
    """One GPU of so many, each of which passes eight samples at a time."""
    shape = {"batch": 8 * passes * num_gpus, "micro_batch": 8, "seq": 64, "loop": "stepper", "gpu": "h200"}
    return estimate(MODEL, num_gpus=num_gpus, parallel=parallel, optimizer="adamw-fused", **shape, **keywords)


def weights_of(found: Estimate) -> int:
    return found.phases["load"].peak_allocated_bytes


def test_a_replica_takes_what_one_gpu_takes_with_its_gradients_held_all_the_time() -> None:
    alone, replica = rank(1, passes=2), rank(4, "ddp", passes=2)
    assert replica.peak_requested_bytes == pytest.approx(alone.peak_requested_bytes, rel=0.005)
    assert replica.breakdown["gradients"] == pytest.approx(weights_of(alone), rel=0.05)


def test_what_a_replica_takes_does_not_depend_on_how_many_there_are() -> None:
    assert rank(2, "ddp").peak_requested_bytes == rank(512, "ddp").peak_requested_bytes


def test_shards_keep_a_part_of_weights_moments_and_gradients() -> None:
    """Weights, moments and gradients of a step that passes once are cut; a gathered root stays."""
    found = [rank(n, "fsdp").peak_requested_bytes for n in (2, 4, 8, 64)]
    assert found == sorted(found, reverse=True)
    states = 4 * weights_of(rank(1))
    assert found[0] - found[1] == pytest.approx(states / 4 * 3 / 4, rel=0.35)


def test_gradients_of_several_passes_are_kept_whole_until_the_last() -> None:
    one, several = rank(8, "fsdp").peak_requested_bytes, rank(8, "fsdp", passes=3).peak_requested_bytes
    assert several - one > 0.6 * weights_of(rank(1))
    assert several == pytest.approx(rank(8, "fsdp", passes=7).peak_requested_bytes, abs=MIB)


def test_checkpointed_layers_are_gathered_once_for_backward() -> None:
    plain, checkpointed = rank(4, "fsdp"), rank(4, "fsdp", checkpointing="full")
    assert checkpointed.peak_requested_bytes < plain.peak_requested_bytes


def test_the_peak_of_shards_is_what_lives_then_and_no_phase_takes_more() -> None:
    found = rank(4, "fsdp")
    assert sum(found.breakdown.values()) == found.peak_allocated_bytes
    assert max(p.peak_allocated_bytes for p in found.phases.values()) == found.peak_allocated_bytes


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"num_gpus": 4, "batch": 2, "loop": "stepper"}, "more than the 2 samples"),
        ({"num_gpus": 2}, "loop 'stepper'"),
        ({"num_gpus": 2, "mode": "infer"}, "mode train"),
        ({"num_gpus": 2, "loop": "stepper", "offload": "optimizer"}, "for one GPU"),
        ({"num_gpus": 2, "loop": "stepper", "parallel": "fsdp", "optimizer": "adamw-8bit"}, "which fsdp has cut"),
        ({"num_gpus": 2, "loop": "stepper", "parallel": "zero3"}, "is not one of ddp, fsdp"),
        ({"num_gpus": 2, "loop": "stepper", "batch": 8, "micro_batch": 6}, "each of 2 GPUs has 4"),
    ],
)
def test_what_does_not_go_with_several_gpus_is_refused(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        estimate(MODEL, **keywords)
