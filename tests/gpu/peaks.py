"""What training takes beside what is predicted, written down for `tests/truth` where VRAMFIT_PEAKS names a file."""

import json
import os
from multiprocessing import get_context
from typing import Any

import torch

from vramfit.devices.catalogue import match_gpu
from vramfit.estimator.predict import estimate
from vramfit.models.resolve import resolve
from vramfit.runtime.measurement import prepare
from vramfit.runtime.stepper import Stepper
from vramfit.techniques import fusing, optimizers
from vramfit.techniques.application import use_expandable_segments
from vramfit.workload import Workload

MAX_ERROR = 0.01


def assert_takes_what_was_predicted(keywords: dict[str, Any]) -> None:
    """Three steps in a process of their own, packed, with segments that can grow.

    In others, a block that is a little too large is handed out whole, and which block that is depends on addresses.
    """
    given = {"attention": "packed", "precision": "amp-bf16", "optimizer": "adamw-fused", "loop": "stepper"} | keywords
    given |= {"allocator": "expandable"}
    gpu = match_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    assert gpu is not None
    predicted = estimate(given["model"], **{k: v for k, v in given.items() if k != "model"}, gpu=gpu.name)
    with get_context("spawn").Pool(1) as fresh:
        allocated, reserved = fresh.apply(_peaks, (predicted.workload, given))
    _note(given, allocated, reserved)
    promised = predicted.peak_allocated_bytes
    assert allocated <= promised <= (1 + MAX_ERROR) * allocated, (allocated, promised)
    assert reserved <= predicted.safe_reserved_bytes, (reserved, predicted.safe_reserved_bytes)


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


def take_steps(w: Workload, given: dict[str, Any]) -> torch.nn.Module:
    """Three steps of full length in this process; gives the model."""
    model = prepare(resolve(w.model, task=w.task, num_labels=w.num_labels), Workload(**given)).cuda()
    optimizer = optimizers.make(w.optimizer, [p for p in model.parameters() if p.requires_grad])
    assert w.micro_batch is not None
    stepper = Stepper(model, optimizer, micro_batch=w.micro_batch, seq=w.seq, precision=w.precision, graphs=w.graphs)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (w.batch, w.seq), generator=draw)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for _ in range(3):
        stepper.step(batch | _labels(w, draw))
    return model


def _labels(w: Workload, draw: torch.Generator) -> dict[str, torch.Tensor]:
    if w.task == "question-answering":
        places = torch.randint(0, w.seq, (w.batch,), generator=draw)
        return {"start_positions": places, "end_positions": places}
    shape = (w.batch,) if w.task == "sequence-classification" else (w.batch, w.seq)
    return {"labels": torch.randint(0, 2, shape, generator=draw)}
