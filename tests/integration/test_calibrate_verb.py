"""`vramfit calibrate`: a profile is kept and used, or one line says why not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.integration.command import vramfit
from tests.unit.timing.samples import calibration
from vramfit.cli.main import make_app
from vramfit.estimator.predict import estimate
from vramfit.records.codec import from_data, from_json
from vramfit.records.measurement import Calibration
from vramfit.runtime import calibration as measuring


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose GPU measures as the sample says, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("vramfit.devices.probe.has_driver", lambda: True)
    monkeypatch.setattr(measuring, "calibrate", calibration)
    return tmp_path / "cache" / "vramfit" / "calibration"


def test_without_a_gpu_it_is_one_line_and_what_to_do() -> None:
    done = vramfit("calibrate", CUDA_VISIBLE_DEVICES="")
    assert done.code == 1
    assert done.out == ""
    first, second = done.err.strip().splitlines()
    assert first.startswith("Error: no CUDA device")
    assert second.startswith("  → ")


def test_a_calibration_is_kept_and_used_by_the_next_estimate(cache: Path) -> None:
    done = CliRunner().invoke(make_app(), ["calibrate"])
    assert done.exit_code == 0, done.output
    assert "NVIDIA A10G" in done.output
    assert "a10g.json" in done.output.replace("\n", "")
    kept = from_json(Calibration, (cache / "a10g.json").read_text())
    assert kept.host_factor != 1.0
    assert estimate("bert-tiny", batch=4, seq=16, gpu="a10g").time_basis == "calibrated"


def test_json_is_the_record_alone(cache: Path) -> None:
    done = CliRunner().invoke(make_app(), ["calibrate", "--json"])
    assert from_data(Calibration, json.loads(done.stdout)).gpu == "a10g"


def test_a_file_can_be_named_and_is_then_not_looked_for(cache: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(make_app(), ["calibrate", "--output", str(tmp_path / "mine.json")])
    assert done.exit_code == 0, done.output
    assert from_json(Calibration, (tmp_path / "mine.json").read_text()).gpu == "a10g"
    assert not cache.exists()


def test_a_gpu_that_the_catalogue_lacks_can_be_calibrated(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "calibrate", lambda: calibration(gpu="NVIDIA Q1", reported_name="NVIDIA Q1"))
    assert CliRunner().invoke(make_app(), ["calibrate"]).exit_code == 0
    assert (cache / "nvidia-q1.json").exists()
