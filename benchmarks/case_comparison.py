"""Measured cases beside their predictions: a table, a summary, and the file that is kept."""

import json
import sys
import time
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vramfit.devices.catalogue import match_gpu
from vramfit.errors import VramfitError
from vramfit.records.codec import from_data, to_data
from vramfit.records.estimate import Estimate
from vramfit.records.measurement import Measurement, compare
from vramfit.workload import Workload

STEPS = ("first_step", "steady_step")
FIGURES = ("allocated", "reserved")
UNDER_FRACTION, UNDER_BYTES = 0.001, 2 * 2**20
"""Below these a prediction counts as too low: 0.1 %, or 2 MiB where that is more."""


def compare_lines(
    lines: list[dict[str, Any]], *, print_progress: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row a case, and the summary of all."""
    rows = []
    for number, line in enumerate(lines, 1):
        began = time.perf_counter()
        rows.append(compare_line(line))
        if print_progress:
            took_s = time.perf_counter() - began
            print(f"{number}/{len(lines)} {line['workload']['model']} {took_s:.1f} s", file=sys.stderr, flush=True)
    return rows, summarize(rows)


def compare_line(line: dict[str, Any]) -> dict[str, Any]:
    """One case: predicted less measured for both steps, in bytes and as a fraction."""
    row: dict[str, Any] = {"workload": line["workload"], "not_run": line["error"]}
    if line["measurement"] is None:
        return row
    measurement = from_data(Measurement, line["measurement"])
    row["out_of_memory"] = measurement.out_of_memory
    try:
        predicted = predict(measurement)
    except VramfitError as error:
        return row | {"not_predicted": str(error)}
    except Exception as error:  # a crash of the predictor is a finding of this benchmark, not its end
        return row | {"not_predicted": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    differences = compare(predicted, measurement).differences
    row["basis"] = predicted.basis
    row["predicted_fits"] = predicted.fits
    row["safe_reserved_bytes"] = predicted.safe_reserved_bytes
    row["differences"] = [to_data(difference) for difference in differences]
    return row


def predict(measurement: Measurement) -> Estimate:
    """The prediction for the GPU and the torch release of the measurement."""
    from vramfit.estimator.predict import estimate

    gpu = match_gpu(measurement.gpu, measurement.total_memory_bytes)
    if gpu is None:
        raise VramfitError(f"{measurement.gpu} is not in the catalogue")
    workload = replace(measurement.workload, gpu=gpu.name, torch_version=measurement.torch_version)
    keywords = {f.name: getattr(workload, f.name) for f in fields(Workload) if f.name != "model"}
    return estimate(model_of(workload), **keywords)


def model_of(workload: Workload) -> Any:
    """The model of a case; an encoder alone that was trained on the mean of what it gives, as a module."""
    from vramfit.models.build import build_meta
    from vramfit.models.resolve import resolve

    if workload.task != "features" or not workload.trains:
        return workload.model
    return build_meta(resolve(workload.model, task=workload.task), workload.attention)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of exact cases, the worst errors, and how many are too low."""
    compared = [row for row in rows if row.get("differences")]
    summary: dict[str, Any] = {
        "num_cases": len(rows),
        "num_compared": len(compared),
        "num_not_run": sum(row["not_run"] is not None for row in rows),
        "num_not_predicted": sum("not_predicted" in row for row in rows),
        "num_out_of_memory": sum(bool(row.get("out_of_memory")) for row in rows),
    }
    if not compared:
        return summary
    for figure in FIGURES:
        for step in STEPS:
            errors = [e["error_bytes"] for row in compared for e in _of(row, figure, (step,))]
            summary[f"exact_share_{figure}_{step}"] = _share(e == 0 for e in errors)
        errors = [e["error"] for row in compared for e in _of(row, figure)]
        summary[f"exact_share_{figure}_both_steps"] = _share(is_exact(row, figure) for row in compared)
        summary[f"worst_error_{figure}"] = max(map(abs, errors))
        summary[f"num_under_{figure}"] = sum(is_under(row, figure) for row in compared)
    summary["exact_share_both_figures_both_steps"] = _share(all(is_exact(r, f) for f in FIGURES) for r in compared)
    summary["exact_share_requested_both_steps"] = _share(is_exact(row, "requested") for row in compared)
    return summary


def is_exact(row: dict[str, Any], figure: str) -> bool:
    return all(e["error_bytes"] == 0 for e in _of(row, figure))


def is_under(row: dict[str, Any], figure: str) -> bool:
    """Too low by more than both bounds."""
    return any(-e["error_bytes"] > max(UNDER_BYTES, UNDER_FRACTION * e["measured_bytes"]) for e in _of(row, figure))


def _of(row: dict[str, Any], figure: str, steps: tuple[str, ...] = STEPS) -> list[dict[str, Any]]:
    return [d for d in row["differences"] if d["figure"] == figure and d["phase"] in steps]


def _share(values: Any) -> float:
    counted = list(values)
    return round(sum(counted) / len(counted), 4) if counted else 1.0


def render(rows: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    """The table, worst cases last, and the summary under it."""
    title = f"{'allocated: first':>18} {'steady':>16} {'reserved: first':>18} {'steady':>16}  {'worst':>8}  case"
    lines = [title, *(_render_row(row) for row in sorted(rows, key=_worst)), ""]
    return "\n".join(lines + [f"{name:42} {value}" for name, value in summary.items()])


def _worst(row: dict[str, Any]) -> float:
    if not row.get("differences"):
        return float("inf")
    return max((abs(e["error"]) for figure in FIGURES for e in _of(row, figure)), default=0.0)


def _render_row(row: dict[str, Any]) -> str:
    plain = to_data(Workload(model=row["workload"]["model"], batch=row["workload"]["batch"]))
    case = " ".join(f"{k}={v}" for k, v in row["workload"].items() if k == "model" or v != plain[k])
    if not row.get("differences"):
        return f"{row['not_run'] or row.get('not_predicted') or 'nothing to compare'}  {case}"
    cells = []
    for figure in FIGURES:
        for step, width in zip(STEPS, (18, 16), strict=True):
            found = _of(row, figure, (step,))
            cells.append(f"{found[0]['error_bytes']:>{width},}" if found else f"{'–':>{width}}")
    return f"{' '.join(cells)}  {_worst(row):8.3%}  {case}"


def save_results(
    rows: list[dict[str, Any]], summary: dict[str, Any], lines: list[dict[str, Any]], folder: Path
) -> Path:
    """`random_cases_<gpu>_<date>.json`: where it was measured, the summary, every case with its figures."""
    measured = next((line["measurement"] for line in lines if line["measurement"]), {})
    gpu = match_gpu(measured.get("gpu", ""), measured.get("total_memory_bytes", 0))
    date = datetime.now(UTC).date().isoformat()
    machine = ("gpu", "total_memory_bytes", "torch_version", "transformers_version", "driver_version")
    content = {
        "question": "random_cases",
        "date": date,
        "seeds": sorted({line["seed"] for line in lines}),
        **{name: measured.get(name) for name in machine},
        "summary": summary,
        "cases": [
            row
            | {"measurement": {k: v for k, v in (line["measurement"] or {}).items() if k not in ("workload", *machine)}}
            for row, line in zip(rows, lines, strict=True)
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"random_cases_{gpu.name if gpu else 'unknown'}_{date}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
