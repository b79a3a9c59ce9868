"""What is live at the peak and what each block is."""

from dataclasses import replace

from vramfit.allocator.options import AllocatorOptions
from vramfit.estimator.contents import NUM_TIMELINE_POINTS, contents_at_peak
from vramfit.records.stream import Origin, Stream

K = 1024
ORIGINS = [
    Origin("parameter", "layer.0.dense", "load"),
    Origin("zeros", "", "inputs"),
    Origin("addmm", "layer.0.dense", "forward"),
    Origin("native_dropout", "layer.1.drop", "forward"),
    Origin("cublas_workspace", "", "forward"),
    Origin("mm", "layer.0.dense", "backward"),
    Origin("addmm", "layer.1.dense", "recompute"),
    Origin("_foreach_add", "", "optimizer"),
]
REQUESTS = [0, 1, 2, 3, 4, 5, 6, 5, 7, 7]
PARTS = [(0, "load"), (1, "inputs"), (2, "forward"), (6, "backward"), (12, "optimizer"), (15, "end")]


def small() -> Stream:
    return Stream(
        events=[K, K, K, 2 * K, -3, 4 * K, K, 2 * K, K, -7, -6, -2, K, 2 * K, -9],
        request_origins=REQUESTS,
        origins=ORIGINS,
        marks=[],
        parts=PARTS,
    )


def test_blocks_are_told_apart_by_who_asked_and_how_long_they_live() -> None:
    at_backward = contents_at_peak(small(), 8, (2, 15), AllocatorOptions()).breakdown()
    assert at_backward == {
        "weights": K,
        "inputs": K,
        "activations": K + 2 * K,  # kept for backward, and recomputed
        "temporaries": K,
        "workspaces": 4 * K,
        "gradients": K,
        "optimizer": 0,
    }


def test_what_is_freed_within_its_forward_is_a_temporary() -> None:
    at_forward = contents_at_peak(small(), 3, (2, 15), AllocatorOptions()).breakdown()
    assert at_forward["temporaries"] == 2 * K
    assert at_forward["activations"] == K


def test_what_an_optimizer_keeps_is_its_state() -> None:
    at_the_end = contents_at_peak(small(), 13, (2, 15), AllocatorOptions()).breakdown()
    assert at_the_end["optimizer"] == K
    assert at_the_end["temporaries"] == 2 * K


def test_without_a_backward_everything_of_a_forward_is_an_activation() -> None:
    stream = Stream(
        events=[K, 2 * K, -1],
        request_origins=[0, 3],
        origins=ORIGINS,
        marks=[],
        parts=[(0, "load"), (1, "forward")],
    )
    assert contents_at_peak(stream, 1, (1, 3), AllocatorOptions()).breakdown()["activations"] == 2 * K


def test_modules_are_largest_first_and_add_up() -> None:
    seen = contents_at_peak(small(), 8, (2, 15), AllocatorOptions())
    sizes = list(seen.modules().values())
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == sum(seen.breakdown().values()) == 11 * K


def test_like_blocks_of_all_layers_are_one_group() -> None:
    groups = contents_at_peak(small(), 8, (2, 15), AllocatorOptions()).groups()
    assert groups[0].operator == "cublas_workspace"
    modules = {(g.category, g.operator): (g.module, g.num_blocks) for g in groups}
    assert modules["activations", "addmm"] == ("layer.*.dense", 2)


def test_a_short_step_has_a_point_for_each_event_and_a_long_one_only_so_many() -> None:
    assert [p.part for p in contents_at_peak(small(), 8, (2, 15), AllocatorOptions()).timeline] == (
        ["forward"] * 4 + ["backward"] * 6 + ["optimizer"] * 3
    )
    events = [K if i % 2 == 0 else -(i // 2) for i in range(1000)]
    long = Stream(events=events, request_origins=[0] * 500, origins=ORIGINS, marks=[], parts=[(0, "forward")])
    timeline = contents_at_peak(long, 0, (0, 1000), AllocatorOptions()).timeline
    assert len(timeline) == NUM_TIMELINE_POINTS
    assert {p.allocated_bytes for p in timeline} == {K}


def test_what_a_pass_drops_after_backward_is_no_second_forward() -> None:
    parts = [*PARTS[:4], (10, "forward"), *PARTS[4:]]
    dropping = replace(small(), parts=parts)
    assert [p.part for p in contents_at_peak(dropping, 8, (2, 15), AllocatorOptions()).timeline] == (
        ["forward"] * 4 + ["backward"] * 6 + ["optimizer"] * 3
    )
    again = replace(small(), parts=[*parts[:5], (11, "backward"), *PARTS[4:]])  # the next micro-batch
    assert [p.part for p in contents_at_peak(again, 8, (2, 15), AllocatorOptions()).timeline][8:10] == [
        "forward",
        "backward",
    ]


def test_every_moment_of_the_step_adds_up_to_what_is_live_then() -> None:
    timeline = contents_at_peak(small(), 8, (2, 15), AllocatorOptions()).timeline
    assert all(sum(point.breakdown.values()) == point.allocated_bytes for point in timeline)
    assert all(point.requested_bytes == point.allocated_bytes for point in timeline)  # all are multiples of 512
    assert timeline[0].breakdown == {"weights": K, "inputs": K, "activations": K}
    assert timeline[6].breakdown["activations"] == 3 * K
