"""On a GPU: predictions without padding are those of padded batches, and nothing waits for the device on the way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.small_runs import request_of, run, write_classes

from vramfit.runtime.data.source import DataSource
from vramfit.runtime.device import RunDevice
from vramfit.runtime.trained import open_model

pytestmark = pytest.mark.gpu
CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
needs_kernel = pytest.mark.skipif(not CAPABLE, reason="needs a GPU of sm_80 or newer")


@needs_kernel
def test_packed_predictions_are_the_padded_ones_within_rounding(tmp_path: Path) -> None:
    run(tmp_path, device="cuda", epochs=1)
    trained, run_device = open_model(str(tmp_path / "out")), RunDevice("cuda")
    data = write_classes(tmp_path / "new.csv", num_rows=600, seed=9)
    source = DataSource(path=str(data), task="sequence-classification", needs_labels=False)
    samples = trained.read(source)
    found: dict[str, torch.Tensor] = {}
    for asked in ("sdpa", None):
        settings = trained.suited(run_device, precision="bf16", attention=asked)
        inference = trained.load(run_device, samples, **settings)
        logits = torch.zeros(len(samples), 2)

        def take(output: Any, batch: Any, rows: list[int], logits: torch.Tensor = logits) -> None:
            logits[torch.tensor(rows)] = output.logits.float()

        inference.run(samples, take)
        found[settings["attention"]] = logits
    assert set(found) == {"sdpa", "packed"}
    torch.testing.assert_close(found["packed"], found["sdpa"], atol=0.05, rtol=0.05)


@needs_kernel
def test_a_batch_is_sent_without_waiting_for_the_device(tmp_path: Path) -> None:
    run(tmp_path, device="cuda", epochs=1)
    trained, run_device = open_model(str(tmp_path / "out")), RunDevice("cuda")
    source = DataSource(path=str(tmp_path / "train.csv"), task="sequence-classification")
    samples = trained.read(source)
    inference = trained.load(run_device, samples, precision="bf16", attention="packed")
    inference.run(samples, lambda *_: None)
    inference.model.eval()
    torch.cuda.set_sync_debug_mode("error")
    try:
        passed = inference._try(samples, list(range(len(samples))), lambda *_: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not isinstance(passed, str)


@needs_kernel
@pytest.mark.parametrize("compile", [False, True])
def test_a_packed_run_stays_inside_its_plan(tmp_path: Path, compile: bool) -> None:
    write_classes(tmp_path / "train.csv", num_rows=400)
    settings: dict[str, Any] = {"device": "cuda", "batch": 64, "attention": "packed", "precision": "amp-bf16"}
    request = request_of(tmp_path, memory="256MiB", epochs=2, compile=compile, **settings)
    from vramfit.runtime.training.train import train

    record = train(request)
    assert record.settings["attention"] == "packed"
    assert record.num_recoveries == 0
    assert record.measured_reserved_bytes is not None
    assert record.predicted_reserved_bytes is not None
    assert record.measured_reserved_bytes <= record.budget_bytes
    assert (record.compile_s > 0) == compile
