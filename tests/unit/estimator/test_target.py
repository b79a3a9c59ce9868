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


def test_torch_releases_before_the_rules_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"older than 2\.10"):
        target(torch_version="2.9.1")


def test_a_gpu_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(UnknownGPU):
        target(gpu="h2000")


@pytest.mark.parametrize("precision", CHOICES["precision"])
def test_what_a_gpu_cannot_do_is_the_techniques_to_say(precision: str) -> None:
    found = target(gpu="v100", precision=precision, mode="infer")
    assert not any("bfloat16" in note or "tf32" in note for note in found.notes)
