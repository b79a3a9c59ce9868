"""One step in a while is written down request by request: the measured course that a report lays over the predicted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.records.run import StepCourse, sample
from vramfit.runtime.device import RunDevice

MAX_KEPT = 4
"""Steps of a session: each only where its batch is larger than those before."""
MAX_EVENTS = 1_000_000


class MemoryHistory:
    """Decides which steps are worth it: those of the largest batches, the first of all left out."""

    def __init__(self, run_device: RunDevice, texts: int = 1) -> None:
        self.texts = texts
        """Sequences of a sample."""
        self._run_device = run_device
        self._largest = 0
        self._num_left = MAX_KEPT

    @contextmanager
    def step(
        self, number: int, batch: int, micro_batch: int, seq: int, lengths: tuple[int, ...] = ()
    ) -> Iterator[list[StepCourse]]:
        """Inside, a step is taken; afterwards the list has its course, if it was recorded.

        Args:
            number: of the step, from 1.
            batch: samples.
            micro_batch: samples of a forward pass.
            seq: tokens of the longest, padding included.
            lengths: of the sequences, where they are packed: `micro_batch` times `seq` is what a pass may hold then.
        """
        found: list[StepCourse] = []
        num_tokens = sum(lengths) or batch * seq
        if number < 2 or num_tokens <= self._largest or not self._num_left or not can_keep(self._run_device):
            yield found
            return
        with kept_history(self._run_device) as course:
            yield found
        if course:
            self._largest = num_tokens
            self._num_left -= 1
            found.append(
                StepCourse(
                    step=number,
                    device=self._run_device.name,
                    batch=batch,
                    micro_batch=micro_batch,
                    seq=seq,
                    num_events=len(course),
                    requested_bytes=sample(course),
                    lengths=lengths,
                    texts=self.texts,
                )
            )


def can_keep(run_device: RunDevice) -> bool:
    """Whether requests can be seen there, and nobody else is recording them."""
    if run_device.emulated is not None:
        return True
    is_recording = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return run_device.device.type == "cuda" and is_recording is not None and not is_recording()


@contextmanager
def kept_history(run_device: RunDevice) -> Iterator[list[int]]:
    """Inside, requests are written down; afterwards the list has what was live after each."""
    course: list[int] = []
    if run_device.emulated is not None:
        with run_device.emulated.recorded(course):
            yield course
        return
    start = torch.cuda.memory_stats(run_device.device)["requested_bytes.all.current"]
    # without stacks, an entry costs next to nothing
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MAX_EVENTS)
    try:
        yield course
    finally:
        events = torch.cuda.memory._snapshot(run_device.device)["device_traces"][run_device.device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
    course += live_after(start, events)


def live_after(start_bytes: int, events: list[dict[str, Any]]) -> Iterator[int]:
    """What is live after each request and free of PyTorch's own trace; other entries are no requests."""
    live = start_bytes
    for event in events:
        if event["action"] == "alloc":
            live += event["size"]
        elif event["action"] == "free_completed":
            live -= event["size"]
        else:
            continue
        yield live
