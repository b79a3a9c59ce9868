"""Predicted and measured: the comparison, how it is shown, and what `vramfit measure` leaves with."""

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vramfit.cli.main import make_app
from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.records.codec import from_data
from vramfit.records.estimate import Estimate
from vramfit.records.measurement import Comparison, Measurement, PhaseMeasurement, compare
from vramfit.report.run import render_comparison
from vramfit.workload import Workload

ARGUMENTS = ["measure", "bert-tiny", "--batch", "2", "--seq", "16"]


@pytest.fixture(scope="module")
def predicted() -> Estimate:
    return estimate("bert-tiny", batch=2, seq=16, gpu="h200", torch_version="2.11")


def as_measured(predicted: Estimate, *, factor: float = 1.0, **changes: Any) -> Measurement:
    phases = {
        name: PhaseMeasurement(
            peak_requested_bytes=phase.peak_requested_bytes,
            peak_allocated_bytes=int(phase.peak_allocated_bytes / factor),
            peak_reserved_bytes=phase.peak_reserved_bytes,
        )
        for name, phase in predicted.phases.items()
    }
    made = Measurement(
        workload=Workload(model="bert-tiny", batch=2, seq=16),
        gpu="NVIDIA H200",
        compute_capability=(9, 0),
        total_memory_bytes=150_109_945_856,
        torch_version="2.11.0+cu130",
        transformers_version="5.17.0",
        driver_version="580.1",
        phases={**phases, "load": phases["first_step"], "inputs": phases["load"]},
        steps=(phases["first_step"], phases["steady_step"]),
        step_times_s=(1.0, 0.0123),
        num_retries=0,
        num_ooms=0,
        reserved_bytes=10 * 2**20,
        process_bytes=711 * 2**20,
        out_of_memory=None,
    )
    return replace(made, **changes)


def shown(comparison: Comparison) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_comparison(comparison))
    return console.export_text()


def test_equal_peaks_agree_to_the_byte(predicted: Estimate) -> None:
    made = compare(predicted, as_measured(predicted), tolerance=0.0)
    assert made.agrees
    assert made.worst_error == 0
    assert {d.phase for d in made.differences} == {"load", "first_step", "steady_step"}
    assert {d.figure for d in made.differences} == {"requested", "allocated", "reserved"}
    assert "predicted to the byte" in shown(made)


def test_a_prediction_that_is_too_low_has_a_negative_error(predicted: Estimate) -> None:
    made = compare(predicted, as_measured(predicted, factor=0.98), tolerance=0.01)
    assert not made.agrees
    assert made.worst_error == pytest.approx(0.02, abs=1e-4)
    assert all(d.error_bytes < 0 for d in made.differences if d.figure == "allocated")
    text = shown(made)
    assert "more than the 1 % allowed" in text
    assert "-2.000 %" in text


def test_a_small_error_is_named(predicted: Estimate) -> None:
    assert "Within 5 %" in shown(compare(predicted, as_measured(predicted, factor=1.02), tolerance=0.05))


def test_what_else_was_seen_is_said(predicted: Estimate) -> None:
    text = shown(compare(predicted, as_measured(predicted, num_retries=2))).replace("\N{NO-BREAK SPACE}", " ")
    assert "12.3 ms a step" in text
    assert "711.00 MiB, 701.00 MiB of them CUDA's own" in text
    assert "tried again 2 times" in text


@pytest.mark.parametrize(("fits", "agrees"), [(True, False), (False, True)])
def test_out_of_memory_agrees_with_a_prediction_that_it_does_not_fit(
    predicted: Estimate, fits: bool, agrees: bool
) -> None:
    ran_out = as_measured(predicted, out_of_memory="CUDA out of memory. Tried to allocate 2.00 GiB.", phases={})
    made = compare(replace(predicted, fits=fits), ran_out)
    assert made.agrees is agrees
    assert "CUDA out of memory" in shown(made)


def measure_verb(monkeypatch: pytest.MonkeyPatch, measurement: Measurement, *arguments: str) -> Any:
    asked: list[dict[str, Any]] = []

    def measure(workload: Workload, **given: Any) -> Measurement:
        asked.append({"workload": workload, **given})
        return replace(measurement, workload=workload)

    monkeypatch.setattr("vramfit.devices.probe.has_driver", lambda: True)
    monkeypatch.setattr("vramfit.runtime.measurement.measure", measure)
    monkeypatch.setattr("vramfit.estimator.resolve.version", lambda name: "2.11.0")
    done = CliRunner().invoke(make_app(), [*ARGUMENTS, *arguments])
    return done, asked


def test_the_verb_leaves_with_zero_when_they_agree(monkeypatch: pytest.MonkeyPatch, predicted: Estimate) -> None:
    done, asked = measure_verb(monkeypatch, as_measured(predicted), "--steps", "5", "--tolerance", "0")
    assert done.exit_code == 0, done.output
    assert asked[0]["num_steps"] == 5
    assert (asked[0]["workload"].batch, asked[0]["workload"].seq) == (2, 16)


def test_the_verb_leaves_with_four_when_they_differ(monkeypatch: pytest.MonkeyPatch, predicted: Estimate) -> None:
    done, _ = measure_verb(monkeypatch, as_measured(predicted, factor=0.9), "--json")
    assert done.exit_code == 4
    assert not from_data(Comparison, json.loads(done.stdout)).agrees


def test_the_verb_leaves_with_three_when_it_runs_out_as_predicted(
    monkeypatch: pytest.MonkeyPatch, predicted: Estimate
) -> None:
    ran_out = as_measured(predicted, out_of_memory="CUDA out of memory.", phases={})
    done, _ = measure_verb(monkeypatch, ran_out, "--memory", "8MiB")
    assert done.exit_code == 3, done.output


def test_a_gpu_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch, predicted: Estimate) -> None:
    done, _ = measure_verb(monkeypatch, as_measured(predicted, gpu="NVIDIA Z9", total_memory_bytes=1))
    assert isinstance(done.exception, VramfitError)
    assert "NVIDIA Z9" in str(done.exception)
