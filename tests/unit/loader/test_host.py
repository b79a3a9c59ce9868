"""The host's memory: what a load takes of it, and what the system says is available."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.loader.checkpoints import to_pickle, write

from vramfit.checkpoints.inspection import inspect_checkpoint
from vramfit.loader import budget
from vramfit.models.build import build_meta
from vramfit.models.resolve import resolve
from vramfit.techniques import offloading
from vramfit.workload import Workload

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = 8 * 2**10
"""Buffers that are computed."""


def own(model: Any, *, folder: Path | None = None, device: torch.device = CPU, resident: int = 4, **how: Any) -> int:
    inspection = None if folder is None else inspect_checkpoint(folder)
    return budget.own_bytes(
        build_meta(resolve(model)), Workload(model="m", mode="infer", **how), inspection, device, resident
    )


def test_what_is_mapped_takes_nothing_and_what_is_copied_its_size(tmp_path: Path) -> None:
    whole = offloading.model_bytes(write(tmp_path))
    assert own(tmp_path, folder=tmp_path) < SMALL
    assert own(tmp_path, folder=tmp_path, precision="bf16") == pytest.approx(whole / 2, rel=0.05)
    assert own(tmp_path, folder=tmp_path, precision="bf16", device=GPU) < SMALL
    to_pickle(tmp_path)
    assert own(tmp_path, folder=tmp_path) < SMALL


def test_an_old_pickle_is_read_whole(tmp_path: Path) -> None:
    whole = offloading.model_bytes(write(tmp_path))
    to_pickle(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    assert own(tmp_path, folder=tmp_path) == pytest.approx(whole, rel=0.05)


def test_drawn_weights_stay_until_all_are_in_place() -> None:
    whole = offloading.model_bytes(build_meta(resolve("bert-mini")))
    assert own("bert-mini") == pytest.approx(whole, rel=0.01)
    assert own("bert-mini", precision="bf16") == pytest.approx(1.5 * whole, rel=0.01)
    assert own("bert-mini", device=GPU) == pytest.approx(whole, rel=0.01)


def test_offloaded_layers_are_packed_on_the_host(tmp_path: Path) -> None:
    model = write(tmp_path)
    layer = offloading.device_bytes(list(model.bert.encoder.layer[0].parameters()))
    assert own(tmp_path, folder=tmp_path, device=GPU, resident=1) == pytest.approx(3 * layer, abs=SMALL)
    assert own(tmp_path, folder=tmp_path, resident=1) == pytest.approx((3 + 2) * layer, abs=SMALL)
    in_bf16 = own(tmp_path, folder=tmp_path, device=GPU, resident=1, precision="bf16")
    assert in_bf16 == pytest.approx(2 * 3 * layer / 2, rel=0.05)


def test_available_is_what_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "meminfo"
    monkeypatch.setattr(budget, "MEMINFO", file)
    assert budget.available_bytes() is None
    file.write_text("MemTotal:       16384 kB\nMemFree:  1 kB\nMemAvailable:    2048 kB\n")
    assert budget.available_bytes() == 2 * 2**20
