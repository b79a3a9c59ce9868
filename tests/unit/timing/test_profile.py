"""Calibrations kept, found again, and turned into speeds."""

from pathlib import Path

import pytest
from tests.unit.timing.samples import RATES, calibration

from vramfit.devices.catalogue import find_gpu
from vramfit.errors import VramfitError
from vramfit.records.codec import from_json, to_json
from vramfit.records.measurement import Calibration
from vramfit.records.stream import Stretch, Work, WorkItem, WorkSegment
from vramfit.timing.model import (
    calibrated_speed,
    profile_folder,
    profile_path,
    save_profile,
    speed_of,
    step_seconds,
    with_host_factor,
)
from vramfit.timing.speed import HostSpeed, catalogue_speed

A10G = find_gpu("a10g")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def host_bound(num_operators: int) -> Work:
    item = WorkItem(
        operator="add", kind="elementwise", phase="forward", num_calls=num_operators, num_launches=1, num_bytes=8
    )
    return Work(segments=(WorkSegment(stretches=(Stretch(items=(item,)),)),))


def test_profiles_lie_in_the_cache_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile_folder() == folder / "vramfit" / "calibration"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    assert profile_folder() == Path.home() / ".cache" / "vramfit" / "calibration"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_folder() == Path.home() / ".cache" / "vramfit" / "calibration"


def test_a_name_from_the_driver_makes_a_file_name(folder: Path) -> None:
    assert profile_path("NVIDIA A10G / 24").name == "nvidia-a10g-24.json"


def test_without_a_profile_the_catalogue_speaks() -> None:
    assert speed_of(A10G) == (catalogue_speed(A10G), ())


def test_a_profile_is_used_for_the_gpu_of_its_name_only() -> None:
    path = save_profile(calibration())
    assert path == profile_path("a10g")
    speed, notes = speed_of(A10G)
    assert speed is not None
    assert speed.basis == "calibrated"
    assert notes == ("step time: by the calibration of NVIDIA A10G on 2026-11-15",)
    other, _ = speed_of(find_gpu("t4"))
    assert other is not None
    assert other.basis == "catalogue"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"schema_version": 1, "record": "Estimate"}', "\x00"])
def test_a_profile_that_cannot_be_read_is_named_and_not_used(text: str) -> None:
    profile_path("a10g").parent.mkdir(parents=True)
    profile_path("a10g").write_text(text)
    speed, notes = speed_of(A10G)
    assert speed == catalogue_speed(A10G)
    assert "vramfit calibrate" in notes[0]


def test_a_profile_with_impossible_rates_is_not_used() -> None:
    save_profile(calibration(bytes_per_s=0.0))
    assert speed_of(A10G)[0] == catalogue_speed(A10G)


def test_rates_are_freed_of_what_tiles_and_waves_lost() -> None:
    speed = calibrated_speed(calibration())
    assert dict(speed.product_flops_per_s) == pytest.approx(RATES)
    assert (speed.bytes_per_s, speed.transfer_bytes_per_s) == (4e11, 12e9)


def test_a_type_that_was_not_measured_runs_as_float32() -> None:
    made = calibration()
    old = calibration(products=tuple(p for p in made.products if p.dtype == "float32"))
    assert list(calibrated_speed(old).product_flops_per_s.values()) == pytest.approx([8e12] * 4)


def test_a_calibration_without_float32_is_no_speed() -> None:
    with pytest.raises(ValueError, match="float32"):
        calibrated_speed(calibration(products=()))


def test_the_host_factor_gives_the_reference_its_measured_time() -> None:
    work = host_bound(1000)
    default_s = 1000 * HostSpeed().operator_s
    made = with_host_factor(calibration(reference_step_s=3 * default_s), work)
    assert made.host_factor == pytest.approx(3.0, rel=1e-3)
    assert step_seconds(work, calibrated_speed(made)) == pytest.approx(3 * default_s, rel=1e-3)


def test_a_calibration_survives_being_saved() -> None:
    made = calibration(host_factor=1.25)
    assert from_json(Calibration, to_json(made)) == made


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VramfitError, match="cannot write"):
        save_profile(calibration(), tmp_path / "file" / "profile.json")
