"""A warm process: workspaces first, everything else as it was."""

from dataclasses import replace

from vramfit.allocator.replay import replay
from vramfit.estimator.peaks import marks_of, warm_stream
from vramfit.estimator.resolve import resolve_workload
from vramfit.records.stream import Origin, Stream, StreamMark

MARKS = [
    StreamMark(0, "phase", "load"),
    StreamMark(2, "driver", "cublas_loaded"),
    StreamMark(3, "phase", "first_step"),
]


def small() -> Stream:
    """weight, activation, workspace, temporary; the activation and the temporary are freed."""
    return Stream(
        events=[100, 200, 300, 400, -3, -1],
        request_origins=[0, 0, 1, 0],
        origins=[Origin("mm", "m", "forward"), Origin("cublas_workspace", "", "forward")],
        marks=MARKS,
        parts=[(0, "load"), (1, "forward")],
    )


def test_workspaces_are_asked_for_first_and_frees_follow_their_requests() -> None:
    warm = warm_stream(small())
    assert warm.events == [300, 100, 200, 400, -3, -2]
    assert [warm.origins[o].operator for o in warm.request_origins] == ["cublas_workspace", "mm", "mm", "mm"]


def test_marks_stay_before_what_they_were_before_and_the_library_is_loaded_already() -> None:
    warm = warm_stream(small())
    assert [(m.index, m.name) for m in warm.marks] == [(1, "load"), (3, "first_step")]


def test_a_stream_without_workspaces_is_as_it_was() -> None:
    stream = Stream(
        events=[100, 0, 200], request_origins=[0, 0], origins=[Origin("mm", "m", "forward")], marks=[], parts=[]
    )
    assert warm_stream(stream) == stream


def test_a_whole_step_asks_for_the_same_in_another_order() -> None:
    traced, _ = resolve_workload("bert-tiny", {"batch": 8, "gpu": "h200"})
    stream = traced.stream(8)
    moved = warm_stream(stream)
    assert sorted(e for e in moved.events if e > 0) == sorted(e for e in stream.events if e > 0)
    assert len(moved.events) == len(stream.events)
    cold, warm = replay(stream.events, marks_of(stream)), replay(moved.events, marks_of(moved))
    assert warm.peak_requested_bytes == cold.peak_requested_bytes
    assert [p.name for p in warm.phases if p.name] == [p.name for p in cold.phases if p.name]


def test_requests_stay_on_their_cuda_streams() -> None:
    assert warm_stream(replace(small(), request_streams={1: 1, 3: 2})).request_streams == {2: 1, 3: 2}
