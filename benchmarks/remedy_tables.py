"""`docs/remedies.md`, from the predictions and the results, if any, of `remedies.py`."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import forked
import pages
from pages import paragraph, table
from remedy_cases import DATASETS, METRICS, REMEDIES, Remedy

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PREDICTIONS = RESULTS / "remedies_predictions.json"
PAGE = ROOT / "docs" / "remedies.md"
MIB = 2**20
TITLES = {
    "sst2": "SST-2: 24,000 sentences, batch 256, two epochs",
    "imdb": "IMDB: 800 reviews of up to 512 tokens, batch 32, three epochs",
    "rte": "RTE: pairs of sentences, batch 32, three epochs",
    "banking77": "Banking77: 77 intents, batch 64, five epochs",
    "wnut17": "WNUT17: named entities (F1), batch 32, five epochs",
    "xquad": "XQuAD: answers in paragraphs (F1), batch 32, six epochs",
}
SAVES, COSTS_POINTS, SLOW = 0.05, 1.0, 1.5
"""A remedy saves from this share on, costs accuracy from so many points on, and is slow from this ratio on."""
Runs = dict[tuple[str, str], list[dict[str, Any]]]


def write() -> int:
    """Write the page."""
    PAGE.write_text(page(*read()), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
    return 0


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was predicted, and every line that was measured."""
    predicted = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["cases"]
    lines = [line for path in sorted(RESULTS.glob("remedies_*.jsonl")) for line in forked.read_lines(path, "name")]
    return predicted, [line for line in lines if "error" not in line]


def page(predicted: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """The page as Markdown; data sets of the smaller model, and what was run with another one after them."""
    models = list(dict.fromkeys(line["model"] for line in lines)) or [""]
    parts = ["# Remedies: what each saves, and what it costs", *_introduction(lines)]
    for number, model in enumerate(models):
        runs = _runs([line for line in lines if line["model"] == model and "remedy" in line])
        for dataset in DATASETS:
            if number == 0 or any(key[0] == dataset for key in runs):
                title = f"## {TITLES[dataset]}" + (f", {model}" if number else "")
                parts += [title, _table(dataset, predicted[dataset] if number == 0 else {}, runs)]
    return pages.page(*parts, "## What does not help", *_folklore([line for line in lines if "folklore" in line]))


def _introduction(lines: list[dict[str, Any]]) -> list[str]:
    heads = {(n["gpu"], n["torch"], n["transformers"], n["date"]) for n in lines if "torch" in n}
    where = [f"Measured on an {gpu}, torch {t}, transformers {h}, {day}." for gpu, t, h, day in sorted(heads)]
    return [
        paragraph(
            "MiniLM (6 layers of 384, real weights) fine-tuned on real data with `vramfit train`, everything as",
            "in plain",
            "fp32 with torch's AdamW in one pass but for the remedy of the row. Memory is what PyTorch reserved",
            "at the peak,",
            "predicted for an H200 before the run and measured; accuracy is the mean over seeds with the lowest",
            "and the",
            "highest; time is a step's, beside that of the row *fp32*. The first two rows are a loop written by",
            "hand.",
        ),
        paragraph(
            f"*Worth it* says a rule, not a person: it saves at least {SAVES:.0%}, costs less than",
            f"{COSTS_POINTS:g} point of",
            f"accuracy or no more than the seeds differ, and takes less than {SLOW:g} times as long.",
        ),
        paragraph(
            "Data parallelism splits the batch among GPUs; weights, gradients and optimizer state stay whole on each,",
            "so it saves what a smaller batch saves. What each of two GPUs takes is predicted; it was not run.",
        ),
        paragraph(*where) if where else "Not measured yet: columns that need a GPU show –.",
        "Made by `benchmarks/remedies.py`.",
    ]


def _runs(lines: list[dict[str, Any]]) -> Runs:
    """(data set, remedy) → its runs, the timed ones first."""
    found: Runs = {}
    for line in sorted(lines, key=lambda line: not line["timed"]):
        run = line["run"] | {"timed": line["timed"]}
        found.setdefault((line["dataset"], line["remedy"]), []).append(run)
    return found


def _table(dataset: str, predicted: dict[str, Any], runs: Runs) -> str:
    chosen = [r for r in REMEDIES if dataset in r.datasets and (r.name in predicted or (dataset, r.name) in runs)]
    base = runs.get((dataset, "fp32"), [])
    rows = [_row(r, predicted.get(r.name), runs.get((dataset, r.name), []), base, METRICS.get(dataset)) for r in chosen]
    score = METRICS.get(dataset, "accuracy")
    head = ["remedy", "class", "predicted MiB", "measured MiB", "step predicted", "step measured", "time", score, ""]
    return table(head, rows)


def _row(remedy: Remedy, predicted: Any, runs: list[Any], base: list[Any], metric: str | None) -> list[object]:
    saved = _reserved(runs) / _reserved(base) if runs and base else None
    times = _step_s(runs) / _step_s(base) if _step_s(runs) and _step_s(base) else None
    scores, whole = _scores(runs, metric), _scores(base, metric)
    return [
        remedy.name,
        remedy.kind,
        f"{predicted['reserved_bytes'] / MIB:,.0f}" if predicted else None,
        f"{_reserved(runs) / MIB:,.0f}" + (f" ({saved:.0%})" if saved else "") if runs else None,
        f"{1000 * predicted['step_s']:.0f} ms" if predicted and predicted["step_s"] else None,
        f"{1000 * _step_s(runs):.0f} ms" if _step_s(runs) else None,
        f"{times:.2f}×" if times else None,
        f"{mean(scores):.1f} ({min(scores):.1f}–{max(scores):.1f}, {len(scores)})" if scores else None,
        verdict(saved, times, scores, whole) if remedy.name != "fp32" else "",
    ]


def verdict(saved: float | None, times: float | None, scores: list[float], whole: list[float]) -> str:
    """What the rule says of a row: shares of memory and time, scores in percent."""
    if saved is None or not whole:
        return "–"
    lost = mean(whole) - mean(scores)
    spread = max(max(whole) - min(whole), max(scores) - min(scores))
    told = []
    if saved > 1 - SAVES:
        told.append("saves nothing" if saved <= 1 + SAVES else f"takes {saved - 1:.0%} more")
    if lost >= COSTS_POINTS and lost > spread:
        told.append(f"costs {lost:.1f} points")
    if times is not None and times >= SLOW:
        told.append("slow")
    return ", ".join(told) or "worth it"


def _reserved(runs: list[Any]) -> float:
    return mean(run.get("measured_reserved_bytes") or run["reserved_bytes"] for run in runs)


def _step_s(runs: list[Any]) -> float:
    """Mean seconds of the runs that were timed; 0 where none was."""
    timed = [run["step_time_s"] for run in runs if run["timed"]]
    return mean(timed) if timed else 0.0


def _scores(runs: list[Any], metric: str | None) -> list[float]:
    """In percent."""
    scores = [run["metrics"][metric or "accuracy"] if "metrics" in run else run["accuracy"] for run in runs]
    return [score if score > 1 else 100 * score for score in scores]


def _folklore(lines: list[dict[str, Any]]) -> list[str]:
    found = {line["folklore"]: line["run"] for line in lines}
    rows = [[f"`{name}`", *SHOWN[name](found.get(name))] for name in SHOWN]
    return [
        "Advice that goes round, as it was run, and what to do instead.",
        table(["advice", "what happened", "instead"], rows),
    ]


def _quantize_dynamic(run: Any) -> list[str | None]:
    if run is None:
        return [None, None]
    happened = "ran" if run["ran"] else f"did not run: `{run['refused']}`"
    return [happened, f'`vramfit.load(quantize="int8")`: {_mib(run["instead_allocated_bytes"])} at the peak of a batch']


def _quantization_config(run: Any) -> list[str | None]:
    if run is None:
        return [None, None]
    happened = f"loaded, in {', '.join(run['dtypes'])}" if run["ran"] else f"did not load: `{run['refused']}`"
    return [happened, f"`dtype=torch.float16`: {_mib(run['instead_allocated_bytes'])}"]


def _half(run: Any) -> list[str | None]:
    if run is None:
        return [None, None]
    bad = run["first_bad_step"]
    happened = f"accuracy {100 * run['accuracy']:.1f}; " + (
        "losses stayed finite" if bad is None else f"no number from step {bad} on"
    )
    refused = f"; with a GradScaler `{run['scaler_error']}`" if run["scaler_error"] else ""
    return [happened + refused, "autocast over fp32 weights"]


def _frozen_input(run: Any) -> list[str | None]:
    if run is None:
        return [None, None]
    before, after, without = (_mib(run[name]) for name in ("as it is", "x.requires_grad = False", "no_grad"))
    return [f"{after} at the peak, as before ({before})", f"`torch.no_grad()`: {without}"]


SHOWN = {
    "quantize_dynamic on a GPU": _quantize_dynamic,
    'quantization_config="fp16"': _quantization_config,
    "model.half() with AdamW": _half,
    "x.requires_grad = False": _frozen_input,
}


def _mib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / MIB:,.0f} MiB"
