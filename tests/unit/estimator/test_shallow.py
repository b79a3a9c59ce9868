"""Two layers never ask for more than all of them, and say so in a tenth of the time."""

from typing import Any

import pytest
import torch

from vramfit.estimator.peaks import peaks_of_parts
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.traced import TracedWorkload, collection_paused, least_peaks, with_few_layers

JOB = {"batch": 4, "accumulate": 2, "seq": 64, "gpu": "a100-40gb", "loop": "stepper", "optimizer": "adamw-fused"}
IN_HOST_MEMORY = {"offload": "weights", "checkpointing": "full"}


def traced_of(model: Any, **keywords: Any) -> TracedWorkload:
    return resolve_workload(model, {**JOB, **keywords})[0]


@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        ("bert-base-uncased", {}),
        ("bert-base-uncased", {"precision": "amp-bf16", "checkpointing": "full", "max_grad_norm": 1.0}),
        ("bert-base-uncased", {"optimizer": "adamw"}),
        ("bert-base-uncased", {"optimizer": "adafactor", "freeze": "embeddings"}),
        ("bert-base-uncased", {"lora": 16, "precision": "amp-bf16"}),
        ("bert-base-uncased", {"lora": 16, "quantize": "int8"}),
        ("bert-base-uncased", {"freeze": 6, "checkpointing": "full"}),
        ("bert-base-uncased", {"freeze": "encoder"}),
        ("bert-base-uncased", {"offload": "optimizer", "precision": "bf16"}),
        ("bert-base-uncased", {**IN_HOST_MEMORY, "precision": "amp-bf16"}),
        ("bert-base-uncased", {**IN_HOST_MEMORY, "freeze": 6}),
        ("bert-base-uncased", {"compile": True, "precision": "amp-bf16"}),
        ("roberta-base", {"task": "masked-lm", "precision": "amp-bf16"}),
        ("deberta-v3-base", {"checkpointing": "full"}),
        ("albert-base-v2", {}),  # one layer's weights, many times
        ("modernbert-base", {"precision": "amp-bf16"}),
    ],
)
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_no_part_of_a_run_takes_less(model: str, keywords: dict[str, Any], micro_batch: int) -> None:
    with collection_paused():
        traced = traced_of(model, **keywords)
        least = least_peaks(traced, micro_batch, micro_batch)
        whole = peaks_of_parts(traced.stream(micro_batch, num_steady=1))
    assert set(least) <= set(whole)
    assert all(least[part] <= whole[part] for part in least)


def test_where_layers_wait_in_host_memory_two_say_it_all() -> None:
    with collection_paused():
        traced = traced_of("bert-base-uncased", **IN_HOST_MEMORY)
        assert least_peaks(traced, 1, 1) == peaks_of_parts(traced.stream(1, num_steady=1))


@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        ("distilbert-base-uncased", {}),  # few layers already
        ("bert-base-uncased", {"checkpointing": 3}),
        ("bert-base-uncased", {"freeze": ("encoder.layer.0.*",)}),
        ("bert-base-uncased", {"num_gpus": 2, "parallel": "ddp"}),
    ],
)
def test_where_they_say_little_nothing_is_traced(model: str, keywords: dict[str, Any]) -> None:
    assert least_peaks(traced_of(model, **keywords), 2, 2) == {}


def test_a_module_has_the_layers_it_has() -> None:
    class Own(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    traced = traced_of(Own(), task="features", mask="none", mode="infer", accumulate=1, loop="plain")
    assert least_peaks(traced, 2, 2) == {}


def test_the_model_that_was_given_keeps_its_layers() -> None:
    traced = traced_of("bert-base-uncased")
    assert with_few_layers(traced, 2).resolved.config.num_hidden_layers == 2
    assert traced.resolved.config.num_hidden_layers == 12
