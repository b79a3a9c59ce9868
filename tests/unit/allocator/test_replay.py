"""A stream is replayed phase by phase."""

import pytest

from vramfit.allocator import AllocatorOptions, AscendingPlacement, DriverEvent, Mark, replay

MIB = 2**20


def phase(index: int, name: str) -> Mark:
    return Mark(index=index, kind="phase", name=name)


def test_positive_events_request_and_others_free_by_number() -> None:
    result = replay([30 * MIB, 40 * MIB, 0, 50 * MIB, -1, -2])

    assert result.peak_requested_bytes == 90 * MIB
    assert result.peak_reserved_bytes == 120 * MIB
    assert result.out_of_memory is None


def test_an_empty_stream_takes_nothing() -> None:
    result = replay([])

    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (0, 0)


def test_each_phase_has_its_own_peaks_that_begin_with_what_is_held() -> None:
    events = [30 * MIB, 80 * MIB, -1, 12 * MIB, -2]
    result = replay(events, [phase(0, "load"), phase(3, "first_step"), phase(4, "steady_step")])

    assert [p.name for p in result.phases] == ["load", "first_step", "steady_step"]
    assert [p.peak_requested_bytes // MIB for p in result.phases] == [110, 42, 42]
    assert [p.peak_reserved_bytes // MIB for p in result.phases] == [110, 110, 110]
    assert [p.allocated_peak_index for p in result.phases] == [1, 3, 4]
    assert result.phase("load").peak_allocated_bytes == 110 * MIB


def test_reserved_counts_over_all_phases_and_in_each() -> None:
    marks = [phase(0, "load"), Mark(index=2, kind="empty_cache"), phase(2, "step")]
    result = replay([90 * MIB, 0, 30 * MIB], marks)

    assert result.phase("step").peak_reserved_bytes == 30 * MIB
    assert result.phase("step").cumulative_reserved_bytes == 90 * MIB
    assert result.peak_reserved_bytes == 90 * MIB


def test_events_before_the_first_phase_are_a_phase_without_name() -> None:
    result = replay([1000, 2000], [phase(1, "step")])

    assert [p.name for p in result.phases] == ["", "step"]


def test_what_does_not_fit_ends_the_replay() -> None:
    marks = [phase(0, "load"), phase(1, "step"), phase(3, "later")]
    result = replay([30 * MIB, 12 * MIB, 60 * MIB, 5], marks, capacity_bytes=64 * MIB)

    assert result.out_of_memory is not None
    assert (result.out_of_memory.index, result.out_of_memory.requested_bytes) == (2, 60 * MIB)
    assert result.out_of_memory.allocated_bytes == 42 * MIB
    assert [p.name for p in result.phases] == ["load", "step"]
    assert result.num_retries == 1
    with pytest.raises(LookupError, match="later"):
        result.phase("later")


def test_retries_are_counted_by_phase() -> None:
    events = [30 * MIB, 0, 40 * MIB, -1, 50 * MIB]
    result = replay(events, [phase(0, "a"), phase(4, "b")], capacity_bytes=64 * MIB)

    assert [p.num_retries for p in result.phases] == [1, 1]


def test_the_placement_is_told_what_happens_to_the_address_space() -> None:
    class Listening(AscendingPlacement):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[DriverEvent] = []

        def on_event(self, event: DriverEvent) -> None:
            self.heard.append(event)

    placement = Listening()
    marks = [
        Mark(index=1, kind="driver", name="cublas_loaded"),
        Mark(index=0, kind="driver", name="model_loaded"),
    ]
    replay([1000], marks, placement=placement)

    assert placement.heard == ["model_loaded", "cublas_loaded"]


def test_options_are_those_of_the_allocator() -> None:
    result = replay([30 * MIB], options=AllocatorOptions(expandable_segments=True))

    assert result.peak_reserved_bytes == 40 * MIB


@pytest.mark.parametrize(
    ("events", "message"),
    [([1000, 0, 0], "second time"), ([1000, -1], "there were 1"), ([0], "there were 0")],
)
def test_a_stream_that_frees_what_it_does_not_hold_is_refused(events: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(events)


def test_a_phase_cannot_begin_twice() -> None:
    with pytest.raises(ValueError, match="begins twice"):
        replay([1000, 1000], [phase(0, "step"), phase(1, "step")])


@pytest.mark.parametrize(("kind", "name", "index"), [("driver", "moon", 0), ("party", "", 0), ("phase", "a", -1)])
def test_a_mark_that_means_nothing_is_refused(kind: str, name: str, index: int) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Mark(index=index, kind=kind, name=name)  # type: ignore[arg-type]


def test_what_one_cuda_stream_has_freed_is_no_use_to_another() -> None:
    events = [30 * 2**20, 0, 30 * 2**20]
    assert replay(events).peak_reserved_bytes == 30 * 2**20
    assert replay(events, streams={1: 2}).peak_reserved_bytes == 60 * 2**20
    assert replay(events, streams={0: 2, 1: 2}).peak_reserved_bytes == 30 * 2**20
