"""What a prediction is for: an architecture, a torch release, a capacity."""

from importlib.metadata import version
from typing import Any

import pytest

from vramfit.devices.catalogue import all_gpus, find_gpu
from vramfit.errors import UnknownGPU, WorkloadError
from vramfit.estimator.resolve import Target, target_of
from vramfit.workload import CHOICES, Workload


def target(**keywords: Any) -> Target:
    return target_of(Workload(model="m", **keywords))


@pytest.mark.parametrize("gpu", [g.name for g in all_gpus()])
def test_every_gpu_of_the_catalogue_can_be_predicted_for(gpu: str) -> None:
    found, entry = target(gpu=gpu), find_gpu(gpu)
    assert found.gpu == entry
    assert found.profile.compute_capability == entry.compute_capability
    assert found.profile.num_multiprocessors == entry.num_multiprocessors
    assert found.capacity_bytes is not None
    assert 0 < found.capacity_bytes < entry.total_memory_bytes


def test_without_a_gpu_the_largest_of_the_default_architecture_stands_in() -> None:
    profile = target(memory="8GiB").profile
    assert profile.compute_capability == (8, 0)
    assert profile.num_multiprocessors == max(
        g.num_multiprocessors for g in all_gpus() if g.compute_capability == (8, 0)
    )


def test_memory_is_the_capacity_whatever_the_gpu() -> None:
    assert target(memory="8GiB").capacity_bytes == target(memory="8GiB", gpu="t4").capacity_bytes == 8 * 2**30
    assert target().capacity_bytes is None


@pytest.mark.parametrize(
    ("text", "release"), [("2.11", (2, 11)), ("2.11.0+cu130", (2, 11)), ("2.10.1", (2, 10)), ("3.0rc1", (3, 0))]
)
def test_a_release_is_read_from_a_version(text: str, release: tuple[int, int]) -> None:
    assert target(torch_version=text).profile.torch_version == release
    assert target(torch_version=text).torch_version == text


def test_the_installed_torch_is_the_default() -> None:
    assert target().torch_version == version("torch")


@pytest.mark.parametrize("text", ["two", "v2.11", "2"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match="is not a version such as"):
        target(torch_version=text)


@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"gpu": "t4", "torch_version": "1.13.1"}, "torch 1.13 is older than 2.0"),
        ({"torch_version": "0.4", "memory": "8GiB"}, "torch 0.4 is older than 2.0"),
        ({"gpu": "k80", "torch_version": "2.11"}, "this GPU has run with torch 1.x only"),
        ({"gpu": "h200", "torch_version": "1.13"}, "torch 1.13 is older than 2.0"),
    ],
)
def test_what_nothing_is_promised_for_is_predicted_and_says_so(keywords: dict[str, Any], why: str) -> None:
    found = target(**keywords)
    assert found.basis == "outside"
    assert any(note.startswith("outside what is promised") and why in note for note in found.notes)


@pytest.mark.parametrize("text", ["2.0.1", "2.4", "2.9.1"])
def test_torch_2_is_predicted_for_before_the_releases_that_vramfit_runs_with(text: str) -> None:
    found = target(gpu="rtx-4090", torch_version=text)
    assert found.basis == "derived"
    assert not any("outside" in note for note in found.notes)


@pytest.mark.parametrize(
    ("gpu", "context", "basis"),
    [
        ("h200", 758, "measured"),  # by this project
        ("h100", 758, "bounded"),  # as much as the GPU of its architecture that was measured
        ("rtx-4090", 466, "reported"),
        ("l4", 550, "bounded"),  # its architecture has a figure, which is below the bound
        ("a10g", 618, "bounded"),
        ("rtx-3090", 618, "bounded"),
        ("t4", 550, "bounded"),
    ],
)
def test_a_context_is_the_gpus_own_or_bounded_from_above(gpu: str, context: int, basis: str) -> None:
    found = target(gpu=gpu)
    assert (found.context_bytes, found.context_basis) == (context * 2**20, basis)
    assert found.capacity_bytes == find_gpu(gpu).total_memory_bytes - context * 2**20


def test_a_gpu_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(UnknownGPU):
        target(gpu="h2000")


@pytest.mark.parametrize("precision", CHOICES["precision"])
def test_what_a_gpu_cannot_do_is_the_techniques_to_say(precision: str) -> None:
    found = target(gpu="v100", precision=precision, mode="infer")
    assert not any("bfloat16" in note or "tf32" in note for note in found.notes)
