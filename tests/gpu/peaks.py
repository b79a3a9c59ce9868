"""What training takes beside what is predicted, written down for `tests/truth` where VRAMFIT_PEAKS names a file."""

import json
import os
from multiprocessing import get_context
from typing import Any

import torch
from tests.gpu.test_packing import MAX_ERROR, take_steps

from vramfit.devices.catalogue import match_gpu
from vramfit.estimator.predict import estimate
from vramfit.runtime.budget import use_expandable_segments
from vramfit.techniques import fusing
from vramfit.workload import Workload


def assert_takes_what_was_predicted(keywords: dict[str, Any]) -> None:
    """Three steps in a process of their own, packed, with segments that can grow."""
    given = {"attention": "packed", "precision": "amp-bf16", "optimizer": "adamw-fused", "loop": "stepper"} | keywords
    given |= {"allocator": "expandable"}
    gpu = match_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    assert gpu is not None
    predicted = estimate(given["model"], **{k: v for k, v in given.items() if k != "model"}, gpu=gpu.name)
    with get_context("spawn").Pool(1) as fresh:
        allocated, reserved = fresh.apply(_peaks, (predicted.workload, given))
    _note(given, allocated, reserved)
    assert allocated <= predicted.peak_allocated_bytes <= (1 + MAX_ERROR) * allocated
    assert reserved <= predicted.safe_reserved_bytes


def _peaks(w: Workload, given: dict[str, Any]) -> tuple[int, int]:
    use_expandable_segments(torch.device("cuda"))
    assert fusing.is_applied(take_steps(w, given)) is w.fused
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _note(workload: dict[str, Any], allocated: int, reserved: int) -> None:
    path = os.environ.get("VRAMFIT_PEAKS")
    if path:
        line = {"workload": workload, "max_allocated_bytes": allocated, "max_reserved_bytes": reserved}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
