"""The room of a step: what its window had beside what is in use when the step begins."""

from vramfit.allocator.options import AllocatorOptions
from vramfit.estimator.traced import depends_on_headroom, headrooms_of
from vramfit.records.stream import Origin, Stream
from vramfit.units import MIB
from vramfit.workload import Workload

JOB = {"model": "bert-tiny", "batch": 8, "loop": "stepper"}


def test_a_room_is_what_was_given_back_since_the_highest_point() -> None:
    """A weight of 40 MiB; a window of 60 MiB, then state of 20; a window of 80 MiB."""
    events = [40 * MIB, 60 * MIB, -1, 20 * MIB, 80 * MIB, -3, 2 * MIB]
    parts = [(0, "load"), (1, "forward"), (3, "optimizer"), (4, "optimizer"), (4, "forward"), (6, "optimizer")]
    stream = Stream(
        events=events,
        request_origins=[0] * 5,
        origins=[Origin("mm", "", "forward")],
        marks=[],
        parts=[*parts, (6, "optimizer")],
    )
    assert headrooms_of(stream, AllocatorOptions()) == (40 * MIB, 80 * MIB)


def test_fused_steps_and_single_gpus_have_no_portions_to_size() -> None:
    assert depends_on_headroom(Workload(**JOB, num_gpus=2, parallel="ddp", optimizer="adamw"))
    assert not depends_on_headroom(Workload(**JOB, num_gpus=2, parallel="ddp", optimizer="adamw-fused"))
    assert not depends_on_headroom(Workload(**JOB, optimizer="adamw"))
