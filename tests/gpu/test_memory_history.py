"""Steps recorded on a real GPU: what the allocator counted, request by request."""

import pytest
import torch

from vramfit.runtime.device import RunDevice
from vramfit.runtime.training.outcome import can_keep, kept_history

pytestmark = pytest.mark.gpu


def test_the_course_is_what_the_allocator_counts() -> None:
    run_device = RunDevice("cuda")
    assert can_keep(run_device)
    weight = torch.randn(512, 512, device=run_device.device, requires_grad=True)
    (weight @ weight).sum().backward()  # workspaces are there now
    torch.cuda.reset_peak_memory_stats(run_device.device)
    with kept_history(run_device) as course:
        (torch.relu(weight @ weight) @ weight).sum().backward()
    stats = torch.cuda.memory_stats(run_device.device)
    assert max(course) == stats["requested_bytes.all.peak"]
    assert course[-1] == stats["requested_bytes.all.current"]
    assert can_keep(run_device)


def test_a_recording_of_somebody_elses_is_left_alone() -> None:
    run_device = RunDevice("cuda")
    torch.cuda.memory._record_memory_history(enabled="all", context=None)
    try:
        assert not can_keep(run_device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
