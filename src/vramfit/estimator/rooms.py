"""The room of a step: what a window had allocated beside what is allocated when its step begins.

A step that needs temporaries goes in portions as large as the room allows (`Stepper`), so that the peak stays.
"""

from itertools import pairwise

from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.replay import Mark, replay
from vramfit.records.stream import Stream
from vramfit.workload import Workload


def steps_by_room(workload: Workload) -> bool:
    """Whether the portions of a step depend on its room."""
    return workload.trains and workload.num_gpus > 1 and not workload.steps_in_place


def rooms_of(stream: Stream, options: AllocatorOptions) -> tuple[int, int]:
    """The rooms of the first step and of the one after it."""
    begins = [index for (_, before), (index, part) in pairwise(stream.parts) if before == part == "optimizer"][:2]
    marks = [Mark(index=0, kind="phase", name="window 0")]
    for number, index in enumerate(begins):
        names = (f"now {number}", f"window {number + 1}")
        marks += [Mark(index=index, kind="phase", name=name) for name in names]
    marks += [Mark(index=m.index, kind="driver", name=m.name) for m in stream.marks if m.kind == "driver"]
    found = replay(stream.events, marks, streams=stream.request_streams, options=options)
    peaks = {phase.name: phase.peak_allocated_bytes for phase in found.phases}
    before = max(peaks["window 0"], peaks["now 0"])
    first = before - peaks["now 0"]
    return first, max(before, peaks["window 1"]) - peaks["now 1"]
