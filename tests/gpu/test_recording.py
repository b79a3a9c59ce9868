"""Steps recorded on a real GPU: what the allocator counted, request by request."""

import pytest
import torch

from vramfit.runtime.training.place import Place
from vramfit.runtime.training.recording import can_record, recorded

pytestmark = pytest.mark.gpu


def test_the_course_is_what_the_allocator_counts() -> None:
    place = Place("cuda")
    assert can_record(place)
    weight = torch.randn(512, 512, device=place.device, requires_grad=True)
    (weight @ weight).sum().backward()  # workspaces are there now
    torch.cuda.reset_peak_memory_stats(place.device)
    with recorded(place) as course:
        (torch.relu(weight @ weight) @ weight).sum().backward()
    stats = torch.cuda.memory_stats(place.device)
    assert max(course) == stats["requested_bytes.all.peak"]
    assert course[-1] == stats["requested_bytes.all.current"]
    assert can_record(place)


def test_a_recording_of_somebody_elses_is_left_alone() -> None:
    place = Place("cuda")
    torch.cuda.memory._record_memory_history(enabled="all", context=None)
    try:
        assert not can_record(place)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
