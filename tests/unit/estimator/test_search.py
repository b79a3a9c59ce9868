"""The largest batch: it fits, the next does not, and what stops it is said."""

from typing import Any

import pytest
from tests.unit.estimator.counting import count_work

from vramfit.errors import UnknownGPU, WorkloadError
from vramfit.estimator.peaks import peak_requested
from vramfit.estimator.predict import estimate
from vramfit.estimator.search import MAX_MICRO_BATCH, max_batch
from vramfit.records.codec import from_json, to_json
from vramfit.records.estimate import MaxBatch
from vramfit.records.stream import Stream
from vramfit.units import GIB


def tiny(**keywords: Any) -> MaxBatch:
    return max_batch("bert-tiny", **({"seq": 128} | keywords))


@pytest.mark.parametrize(
    "keywords",
    [
        {"memory": "200MiB"},
        {"memory": "400MiB", "precision": "amp-bf16"},
        {"memory": "150MiB", "mode": "infer"},
        {"memory": "300MiB", "allocator": "expandable"},
        {"memory": "250MiB", "checkpointing": "full", "gpu": "h200"},
    ],
    ids=str,
)
def test_the_batch_found_fits_and_the_next_does_not(keywords: dict[str, Any]) -> None:
    found = tiny(**keywords)
    assert found.batch == found.estimate.workload.batch > 1
    assert found.estimate.fits is True
    assert found.estimate.safe_reserved_bytes <= found.estimate.capacity_bytes
    assert found.cold_batch <= found.batch
    if found.batch < 100:
        assert estimate("bert-tiny", **({"seq": 128, "batch": found.batch + 1} | keywords)).fits is False


def test_batches_below_the_answer_that_do_not_fit_are_named() -> None:
    for mib in (200, 235, 312):
        found = tiny(memory=f"{mib}MiB")
        verdicts = {
            b: estimate("bert-tiny", seq=128, memory=f"{mib}MiB", batch=b).fits
            for b in range(max(1, found.batch - 4), found.batch)
        }
        assert found.not_fitting == tuple(b for b, fits in verdicts.items() if not fits)


def test_what_stops_the_next_batch_is_said_with_numbers() -> None:
    found = tiny(memory="200MiB")
    assert found.limited_by.startswith(f"{found.batch + 1} samples a forward pass run out in ")
    assert "of 200.00 MiB in use" in found.limited_by


def test_more_memory_never_means_a_smaller_batch_by_more_than_fragmentation() -> None:
    found = [tiny(memory=f"{mib}MiB").batch for mib in (120, 200, 400)]
    assert found == sorted(set(found))


@pytest.mark.parametrize("memory", ["1MiB", "60MiB", 1])
def test_nothing_that_fits_is_zero_with_the_estimate_of_one_sample(memory: Any) -> None:
    found = tiny(memory=memory)
    assert (found.batch, found.cold_batch, found.not_fitting) == (0, 0, ())
    assert found.estimate.workload.batch == 1
    assert found.estimate.fits is False
    assert found.limited_by.startswith("1 sample a forward pass runs out")


def test_accumulation_multiplies_the_batch_of_a_forward_pass() -> None:
    found = tiny(memory="300MiB", accumulate=3)
    assert found.batch % 3 == 0
    assert found.estimate.workload.accumulate == 3
    assert found.estimate.workload.micro_batch == found.batch // 3
    assert estimate("bert-tiny", seq=128, memory="300MiB", batch=found.batch, accumulate=3).fits
    assert found.batch > tiny(memory="300MiB").batch


def test_accumulation_that_does_not_fit_once_is_zero() -> None:
    found = tiny(memory="60MiB", accumulate=4)
    assert found.batch == 0
    assert found.estimate.workload.batch == 4


def test_a_batch_that_is_given_is_not_used() -> None:
    assert tiny(memory="200MiB", batch=7, micro_batch=7) == tiny(memory="200MiB")


def test_a_gpu_gives_the_capacity() -> None:
    found = max_batch("bert-mini", seq=512, gpu="k80")
    assert found.estimate.capacity_bytes == found.estimate.total_memory_bytes - found.estimate.context_bytes
    assert found.batch > max_batch("bert-mini", seq=512, gpu="k80", memory=5 * GIB).batch > 0


def test_without_a_capacity_there_is_nothing_to_fit_into() -> None:
    with pytest.raises(WorkloadError, match="needs a gpu or a memory size"):
        tiny()


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"gpu": "t5"}, UnknownGPU),
        ({"memory": "1GiB", "seq": 513}, WorkloadError),
        ({"memory": "1GiB", "accumulate": 0}, WorkloadError),
        ({"memory": "1GiB", "accumulate": "two"}, WorkloadError),
        ({"memory": "lots"}, WorkloadError),
    ],
    ids=str,
)
def test_bad_input_is_what_estimate_says_of_it(keywords: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        tiny(**keywords)


def test_all_the_memory_in_the_world_ends_the_search_at_its_bound_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    work = count_work(monkeypatch)
    found = tiny(memory=2**63 - 1)
    assert len(work.depths) == 2  # of one sample, and of any other number
    assert len(work.events) < 100  # streams looked at: a few for each time that a million can be halved
    assert found.batch == MAX_MICRO_BATCH
    assert found.limited_by == "nothing up to 1,048,576 samples"


def test_an_answer_is_written_and_read_back() -> None:
    found = tiny(memory="200MiB")
    assert from_json(MaxBatch, to_json(found)) == found


def test_the_most_that_is_asked_for_at_once() -> None:
    stream = Stream(events=[100, 50, 0, 70, -1, 10, -2], request_origins=[0] * 4, origins=[], marks=[], parts=[])
    assert peak_requested(stream) == 150
