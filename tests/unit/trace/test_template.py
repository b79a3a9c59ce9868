"""A traced run read off at a batch: segments repeat, ids come again, kernels are asked anew."""

from dataclasses import replace

import pytest
from tests.unit.trace.recording import H200

from vramfit.cuda.kernels import KERNELS
from vramfit.records.stream import Origin, StreamMark
from vramfit.trace.template import (
    CallTemplate,
    Launch,
    Notice,
    Part,
    Release,
    Request,
    SpecTemplate,
    StreamTemplate,
)


def template(**segments: list) -> StreamTemplate:
    return StreamTemplate(
        H200, 2**31 - 1, dict(segments), [Origin("op", "m", "forward"), Origin("sum", "m", "backward")]
    )


def bias_gradient() -> CallTemplate:
    """A column sum of [256 · batch, 768]."""
    x = SpecTemplate(((256, 0), (0, 768)), ((0, 768), (0, 1)), "float32", 4)
    out = SpecTemplate(((0, 768),), ((0, 1),), "float32", 4)
    return CallTemplate("sum", KERNELS["sum"], (x, (0,)), {}, (out,), ((3072,),))


def test_sizes_are_those_of_the_batch() -> None:
    made = template(step=[Request(1, (100, 8), 0), Request(2, (0, 0, 4), 0), Release(1)])
    assert made.instantiate(3, [("step", None)]).events == [124, 36, 0]
    assert made.instantiate(10, [("step", None)]).events == [180, 400, 0]


def test_a_turn_may_have_samples_of_its_own() -> None:
    made = template(step=[Request(1, (100, 8), 0), Release(1)], last=[Launch(bias_gradient(), (5,), 1)])
    stream = made.instantiate(10, [("step", None), ("step", None, 3), ("step", None)])
    assert [event for event in stream.events if event > 0] == [180, 124, 180]
    apart = [made.instantiate(n, [("last", None)]).events for n in (4, 64)]
    both = made.instantiate(4, [("last", None), ("last", None, 64)]).events
    assert [e for e in both if e > 0] == [e for events in apart for e in events if e > 0]


def test_a_segment_that_is_repeated_asks_again_under_new_numbers() -> None:
    made = template(step=[Request(1, (512,), 0), Request(2, (8,), 1), Release(1), Release(2)])
    stream = made.instantiate(1, [("step", "first"), ("step", "second"), ("step", None)])
    assert stream.events == [512, 8, 0, -1, 512, 8, -2, -3, 512, 8, -4, -5]
    assert stream.request_origins == [0, 1] * 3
    assert stream.num_requests == 6


def test_what_one_segment_asks_for_another_may_free() -> None:
    made = template(a=[Request(7, (512,), 0)], b=[Release(7), Request(7, (1024,), 0)])
    assert made.instantiate(1, [("a", None), ("b", None), ("b", None)]).events == [512, 0, 1024, -1, 1024]


def test_phases_and_notices_are_marks_and_parts_have_their_place() -> None:
    made = template(
        load=[Part("load"), Request(1, (512,), 0), Notice("driver", "model_loaded")],
        step=[Part("forward"), Request(2, (512,), 0), Release(2), Part("backward")],
    )
    stream = made.instantiate(1, [("load", "load"), ("step", "first_step"), ("step", None)])
    assert stream.marks == [
        StreamMark(0, "phase", "load"),
        StreamMark(1, "driver", "model_loaded"),
        StreamMark(1, "phase", "first_step"),
    ]
    assert stream.parts == [(0, "load"), (1, "forward"), (3, "backward"), (3, "forward"), (5, "backward")]


@pytest.mark.parametrize(("batch", "buffer"), [(1, 0), (8, 12582912), (16, 25165824)])
def test_a_kernel_is_asked_anew_at_every_batch(batch: int, buffer: int) -> None:
    events = template(step=[Launch(bias_gradient(), (5,), 1)]).instantiate(batch, [("step", None)]).events
    assert events == ([3072, buffer, 24, -2, -1] if buffer else [3072])


def test_a_kernel_asks_the_gpu_it_is_meant_for() -> None:
    made = template(step=[Launch(bias_gradient(), (5,), 1)])
    small = replace(made, profile=replace(H200, num_multiprocessors=8))
    assert small.instantiate(256, [("step", None)]).events[1] < made.instantiate(256, [("step", None)]).events[1]


def test_the_output_of_a_kernel_outlives_it_and_its_temporaries_do_not() -> None:
    made = template(step=[Launch(bias_gradient(), (5,), 1)], later=[Release(5)])
    stream = made.instantiate(16, [("step", None), ("later", None)])
    assert stream.events[-1] == 0
    assert sorted(-e for e in stream.events if e <= 0) == [0, 1, 2]
    assert stream.request_origins == [1, 1, 1]


def test_an_output_that_nobody_follows_is_not_requested() -> None:
    made = template(step=[Launch(bias_gradient(), (0,), 1)])
    assert made.instantiate(16, [("step", None)]).events == [25165824, 24, -1, 0]


def test_a_segment_that_was_never_traced_is_a_lookup_error() -> None:
    with pytest.raises(KeyError, match="steady"):
        template(first=[]).instantiate(1, [("steady", None)])
