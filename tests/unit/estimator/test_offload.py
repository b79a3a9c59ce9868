"""Offloaded layers: as many stay on the device as the prediction says there is room for."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from vramfit.errors import WorkloadError
from vramfit.estimator.peaks import predict_peaks
from vramfit.estimator.predict import estimate
from vramfit.estimator.resolve import OffloadedWorkload, _most, resolve_workload
from vramfit.estimator.search import max_batch
from vramfit.estimator.traced import TracedWorkload
from vramfit.loader.budget import resident_layers
from vramfit.loader.load import make_request
from vramfit.models.build import build_meta
from vramfit.models.resolve import resolve

LARGE: dict[str, Any] = {"mode": "infer", "offload": "weights", "seq": 512}


def settled(model: str, **keywords: Any) -> OffloadedWorkload:
    traced, _ = resolve_workload(model, keywords)
    assert isinstance(traced, OffloadedWorkload)
    return traced


def fits(traced: OffloadedWorkload, num_resident: int, batch: int) -> bool:
    stream = TracedWorkload(traced.workload, traced.resolved, traced.profile, num_resident).stream(batch)
    outcome = predict_peaks(stream, traced.options, traced.capacity_bytes)
    return bool(outcome.fits) and not outcome.num_retries


@pytest.mark.parametrize(
    "keywords",
    [
        {"batch": 8, "memory": "1GiB"},
        {"batch": 8, "memory": "900MiB"},
        {"batch": 1, "memory": "512MiB", "precision": "bf16"},
    ],
    ids=str,
)
def test_feasible_jobs_are_not_refused_and_fill_the_memory(keywords: dict[str, Any]) -> None:
    predicted = estimate("bert-large-uncased", **LARGE, **keywords)
    assert predicted.fits
    assert predicted.capacity_bytes is not None
    assert predicted.safe_reserved_bytes <= predicted.capacity_bytes
    traced = settled("bert-large-uncased", **LARGE, **keywords)
    num_resident = traced.resident_layers(keywords["batch"])
    assert 0 < num_resident < 24
    assert not any(fits(traced, num_resident + more, keywords["batch"]) for more in (1, 2))


def test_a_model_that_fits_keeps_all_its_layers() -> None:
    assert settled("bert-mini", **LARGE, batch=2, memory="1GiB").resident_layers(2) == 4
    whole = estimate("bert-mini", mode="infer", batch=2, seq=512, memory="1GiB")
    assert estimate("bert-mini", **LARGE, batch=2, memory="1GiB").breakdown == whole.breakdown


def test_without_a_capacity_every_layer_is_offloaded() -> None:
    assert (
        estimate("bert-mini", **LARGE, batch=2).breakdown["weights"]
        < estimate("bert-mini", mode="infer", batch=2, seq=512).breakdown["weights"]
    )


def test_what_cannot_fit_is_an_estimate_that_says_so() -> None:
    predicted = estimate("bert-large-uncased", **LARGE, batch=8, memory="300MiB")
    assert predicted.fits is False
    assert predicted.safe_reserved_bytes > 300 * 2**20


def test_a_larger_batch_leaves_fewer_layers() -> None:
    traced = settled("bert-base-uncased", **LARGE, batch=1, memory="400MiB")
    numbers = [traced.resident_layers(batch) for batch in (1, 4, 8)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]


def test_the_largest_batch_gives_its_layers_up() -> None:
    keywords = LARGE | {"memory": "400MiB"}
    found = max_batch("bert-base-uncased", **keywords)
    assert found.estimate.fits
    assert found.batch > 4
    assert not estimate("bert-base-uncased", **keywords, batch=found.batch + 1).fits


def test_another_workload_settles_anew() -> None:
    traced = settled("bert-base-uncased", **LARGE, batch=1, memory="400MiB")
    assert traced.resident_layers(1) > 0
    assert replace(traced, capacity_bytes=1).resident_layers(1) == 0


@pytest.mark.parametrize("candidates", [[], [1], [1, 2], [1, 2, 3, 4, 5, 9], [*range(1, 22), 24]])
def test_the_most_that_fits_is_found_with_few_tries(candidates: list[int]) -> None:
    for most in (0, *candidates):
        tried: list[int] = []

        def asked(number: int, most: int = most, tried: list[int] = tried) -> bool:
            tried.append(number)
            return number <= most

        assert _most(candidates, asked) == most
        assert len(tried) <= 7


def test_a_load_with_the_weights_share_keeps_the_layers_that_were_predicted() -> None:
    for memory in ("250MiB", "330MiB", "400MiB"):
        keywords: dict[str, Any] = LARGE | {"batch": 2, "memory": memory}
        predicted = estimate("bert-base-uncased", **keywords)
        assert predicted.fits
        request = make_request("bert-base-uncased", memory=predicted.breakdown["weights"], offload="weights")
        loaded = resident_layers(request, build_meta(resolve("bert-base-uncased")), torch.device("cpu"))
        assert loaded == settled("bert-base-uncased", **keywords).resident_layers(2)


def test_a_forward_pass_that_keeps_its_weights_is_refused() -> None:
    with pytest.raises(WorkloadError, match="offload weights is for mode train or infer, not forward"):
        estimate("bert-tiny", mode="forward", offload="weights", memory="1GiB")
