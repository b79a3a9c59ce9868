"""A stream against a capacity: freely, inside it, or not at all."""

from typing import Any

import pytest

from vramfit.allocator.options import AllocatorOptions
from vramfit.estimator.peaks import Asked, fails, peaks_of_parts, predict_peaks, restart_bytes
from vramfit.estimator.resolve import resolve_workload
from vramfit.records.stream import Origin, Stream, StreamMark
from vramfit.units import MIB

OPTIONS = AllocatorOptions()


def stream(events: list[int]) -> Stream:
    num_requests = sum(1 for e in events if e > 0)
    return Stream(
        events=events,
        request_origins=[0] * num_requests,
        origins=[Origin("mm", "", "forward")],
        marks=[StreamMark(0, "phase", "load")],
        parts=[],
    )


GREEDY = stream([30 * MIB, 0, 40 * MIB])  # the first segment is cached, and must go for the second to come


def test_without_a_capacity_only_figures_are_given() -> None:
    outcome = predict_peaks(GREEDY, OPTIONS, None)
    assert (outcome.fits, outcome.fits_cold, outcome.num_retries) == (None, None, 0)
    assert outcome.safe_reserved_bytes == outcome.likely.peak_reserved_bytes == 70 * MIB


@pytest.mark.parametrize(
    ("capacity", "fits", "reserved", "retries"),
    [(70, True, 70, 0), (69, True, 40, 1), (40, True, 40, 1), (39, False, 70, 0)],
)
def test_a_cached_segment_is_given_up_only_where_the_capacity_asks_for_it(
    capacity: int, fits: bool, reserved: int, retries: int
) -> None:
    outcome = predict_peaks(GREEDY, OPTIONS, capacity * MIB)
    assert (outcome.fits, outcome.fits_cold) == (fits, fits)
    assert outcome.likely.peak_reserved_bytes == reserved * MIB
    assert outcome.num_retries == retries


def test_what_fits_is_never_said_to_take_more_than_the_capacity() -> None:
    for capacity in range(40, 80):
        outcome = predict_peaks(GREEDY, OPTIONS, capacity * MIB)
        assert outcome.fits
        assert outcome.likely.peak_reserved_bytes <= outcome.safe_reserved_bytes <= capacity * MIB


def test_the_request_that_fails_is_named() -> None:
    failure = fails(GREEDY, OPTIONS, 39 * MIB)
    assert failure is not None
    assert (failure.index, failure.requested_bytes) == (2, 40 * MIB)
    assert fails(GREEDY, OPTIONS, 40 * MIB) is None


def test_expandable_segments_are_weighed_too() -> None:
    outcome = predict_peaks(GREEDY, AllocatorOptions(expandable_segments=True), 45 * MIB)
    assert outcome.fits
    assert outcome.likely.peak_reserved_bytes <= 45 * MIB


def test_to_do_a_step_again_takes_what_stays_and_its_largest_request_at_once() -> None:
    """30 MiB stay, in two pages; 45 MiB need room for 46, though 10 of them are there: 86, and 80 are reserved."""
    steps = stream([30 * MIB, 45 * MIB, -1, 45 * MIB, -2])
    steps.marks.append(StreamMark(3, "phase", "steady_step"))
    grows = AllocatorOptions(expandable_segments=True)
    assert predict_peaks(steps, grows, None).safe_reserved_bytes == 80 * MIB
    assert restart_bytes(steps, grows) == (40 + 46) * MIB


def test_only_requests_of_the_last_step_are_made_again() -> None:
    steps = stream([30 * MIB, 45 * MIB, -1, 4 * MIB, -2])
    steps.marks.append(StreamMark(3, "phase", "steady_step"))
    assert restart_bytes(steps, OPTIONS) == (30 + 20) * MIB


@pytest.mark.parametrize(
    "keywords",
    [
        {"gpu": "t4", "precision": "amp-fp16", "optimizer": "adamw-8bit"},
        {"gpu": "t4", "task": "embedding", "checkpointing": "full"},
        {"gpu": "h200", "precision": "amp-bf16", "attention": "packed", "fused": True, "optimizer": "adamw-fused"},
        {"gpu": "a10g", "num_gpus": 2, "parallel": "fsdp"},
    ],
)
def test_what_is_summed_once_for_all_batches_is_what_streams_ask_for(keywords: dict[str, Any]) -> None:
    job = {"batch": 16, "micro_batch": 4, "seq": 64, "loop": "stepper"}
    traced, _ = resolve_workload("bert-tiny", job | keywords)
    template, order = traced.template(4), traced.order(num_steady=1)
    asked = Asked(template, order)
    for batch in (2, 3, 33, 1000, 123_457):
        assert asked.peaks(batch) == peaks_of_parts(template.instantiate(batch, order))
