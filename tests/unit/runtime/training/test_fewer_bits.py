"""Plans with fewer bits are named; `exact` does without."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.small_runs import request_of

from vramfit.planner.heuristics import PRICES
from vramfit.runtime.distributed.processes import Processes
from vramfit.runtime.training import events
from vramfit.runtime.training.checkpoints import CheckpointStore
from vramfit.runtime.training.preparation import Run
from vramfit.runtime.training.reading import read_data
from vramfit.runtime.training.train import _plan


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that looks like a GPU, to plan for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    return SimpleNamespace(device=torch.device("cuda", 0), has_budget=True, emulated=None)


@pytest.mark.parametrize(
    ("asked", "precision", "said"),
    [
        ({}, "amp-bf16", "Planned with fewer bits: precision amp-bf16. With --exact, without."),
        ({"exact": True}, "fp32", None),
        ({"precision": "amp-bf16"}, "amp-bf16", None),
    ],
)
def test_fewer_bits_are_named_unless_they_were_asked_for(
    tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], precision: str, said: str | None
) -> None:
    monkeypatch.setitem(PRICES, "amp", replace(PRICES["amp"], share=-0.9))  # a tiny model gains nothing by it
    request = request_of(tmp_path, device=None, gpu="l4", memory="64MiB", **asked)
    seen: list[Any] = []
    data, store = read_data(request, None), CheckpointStore(tmp_path)
    run = Run(request=request, data=data, run_device=gpu, processes=Processes(), store=store, on_event=seen.append)
    Path(request.output).mkdir()
    plan = _plan(run, None)
    assert plan is not None
    assert plan.workload.precision == precision
    notes = [event.text for event in seen if isinstance(event, events.Note)]
    assert notes[1:] == ([said] if said else [])
