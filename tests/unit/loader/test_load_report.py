"""A load's report, saved and read back."""

from pathlib import Path

from tests.unit.loader.checkpoints import write_encoder

import vramfit
from vramfit.records.codec import from_json, to_json


def test_a_report_survives_json(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    _, report = vramfit.load(tmp_path, device="cpu")
    assert from_json(vramfit.LoadReport, to_json(report)) == report
    assert report.findings


def test_a_report_knows_the_largest_tensor_and_the_layers(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    _, report = vramfit.load(tmp_path, device="cpu")
    assert report.largest_tensor_bytes == 200 * 64 * 4
    assert (report.num_layers, report.num_resident_layers) == (4, 4)
    assert (report.final_device_bytes, report.peak_device_bytes) == (None, None)
