"""`docs/remedies.md`, from the predictions and the results, if any, of `remedies.py`."""

import json
import re
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import forked
import pages
from pages import paragraph, table
from remedy_cases import DATASETS, METRICS, REMEDIES, Remedy

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PREDICTIONS = RESULTS / "remedies_predictions.json"
PAGE = ROOT / "docs" / "remedies.md"
MIB, GIB = 2**20, 2**30
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
SHOWN_AS = {"mpnet": "MPNet"}
RAN_OUT = "does not fit"
"""What a run says that memory ended."""
Runs = dict[tuple[str, str], list[dict[str, Any]]]


def write() -> int:
    """Write the page."""
    PAGE.write_text(page(*read()), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
    return 0


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was predicted of each model, and every case as it was last measured; of failures, those for want of memory.

    Hosts differ, so a case has the step of *fp32* with it that was timed in the same call.
    """
    paths = sorted(PREDICTIONS.parent.glob(f"{PREDICTIONS.stem}*.json"))
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    predicted = {made["model"]: made["cases"] for made in kept}
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("remedies_*.jsonl")):
        lines = forked.read_lines(path, "name")
        wholes = {
            (line["model"], line["dataset"]): line["run"]["step_time_s"]
            for line in lines
            if line.get("remedy") == "fp32" and line["timed"] and not line.get("held")
        }
        found |= {
            line["name"]: line | {"whole_step_s": wholes.get((line["model"], line.get("dataset")))} for line in lines
        }
    return predicted, [line for line in found.values() if "run" in line or RAN_OUT in line["error"]]


def page(predicted: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """The page as Markdown; data sets of the smaller model, and what was run with another one after them.

    Args:
        predicted: model → data set → row → what was predicted; the first model has all data sets.
        lines: as `read` gives them.
    """
    models = list(dict.fromkeys([*[line["model"] for line in lines], *predicted]))
    parts = ["# Remedies: what each saves, and what it costs", *_introduction(predicted, lines, models)]
    for number, model in enumerate(models):
        own = [line for line in lines if line["model"] == model and "remedy" in line]
        runs, failures = _runs(own), {(n["dataset"], n["remedy"]): n["error"] for n in own if "error" in n}
        for dataset in DATASETS:
            if number == 0 or any(key[0] == dataset for key in runs):
                title = f"## {TITLES[dataset]}" + (f", {SHOWN_AS.get(model, model)}" if number else "")
                parts += [title, _table(dataset, predicted[model].get(dataset, {}), runs, failures)]
                parts += [_failed(name, error) for (where, name), error in failures.items() if where == dataset]
    parts += _held(lines)
    return pages.page(*parts, "## What does not help", *_folklore([line for line in lines if "folklore" in line]))


def summary(dataset: str, names: dict[str, str]) -> list[list[str]]:
    """Rows of the smaller model for another page, by what they are called there: accuracy, memory and time."""
    _, lines = read()
    own = [line for line in lines if line.get("dataset") == dataset and line["model"] == lines[0]["model"]]
    runs, metric = _runs(own), METRICS.get(dataset)
    rows = []
    for shown, name in names.items():
        own = runs[dataset, name]
        scores, times = _scores(own, metric), _times(own)
        assert times is not None
        spread = f"{mean(scores):.1f} % ({min(scores):.1f} to {max(scores):.1f})"
        rows.append([shown, spread, f"{_reserved(own) / GIB:.2f} GiB", f"{times:.2f}×"])
    return rows


def _introduction(predicted: dict[str, Any], lines: list[dict[str, Any]], models: list[str]) -> list[str]:
    heads = {(n["gpu"], n["torch"], n["transformers"], n["date"]) for n in lines if "torch" in n}
    first = _runs([n for n in lines if n["model"] == models[0] and "remedy" in n])
    where = [f"Measured on an {gpu}, torch {t}, transformers {h}, {day}." for gpu, t, h, day in sorted(heads)]
    return [
        paragraph(
            "A small model, MiniLM (6 layers, hidden size 384, published weights), fine-tuned on real data with",
            "`vramfit train`. Each row changes one thing. Everything else is as in the row *fp32*: training in 32",
            "bits with torch's AdamW and the whole batch in one pass. The learning rate is the same too, except for",
            "LoRA and where only the head is trained, which need a larger one. The first two rows are a hand-written",
            "loop.",
        ),
        "\n".join(
            [
                _bullet(
                    "**class**: as in [How it works](concepts.md#plans). Weights in bf16 count as different training,",
                    "since small updates are rounded away.",
                ),
                _bullet(
                    "**MiB**: the highest reserved memory of all seeds, and its share of *fp32*. Predictions were made",
                    "for an H200, without one. ⊡ marks runs [inside a budget](#inside-a-budget).",
                ),
                _bullet(
                    "**step**, **time**: the time of a step, and its ratio to the step of *fp32* measured in the",
                    "same call. Only the first seed is timed, alone on the GPU with 64 GiB of memory. The planned",
                    "row is the plan that was made on the day of the run.",
                ),
                _bullet("**accuracy** (or F1), in %: mean (lowest–highest, number of seeds)."),
                _bullet(
                    f"**verdict**: a remedy is *worth it* if it saves at least {SAVES:.0%} of the memory, takes less",
                    f"than {SLOW:g} times as long, and costs less than {COSTS_POINTS:g} point of accuracy or no more",
                    "than the seeds differ. With one seed, the verdict only names the difference.",
                ),
            ]
        ),
        paragraph(
            "Times are those of a small model in short runs: in most rows the GPU waits for the host, so 16 bits",
            "bring little speed. The rows with autocast and the planned ones also have packed rows and fused layers",
            f"([packing](packing.md)). Steps took up to {_longest(predicted[models[0]], first):.1f} times the",
            "predicted time: the host's part is estimated too low, and the slow first steps of a run count here. For",
            "a larger model, let `vramfit plan` weigh time against memory. Rows that cost accuracy, Adafactor and",
            "LoRA above all, may cost less with a learning rate and a number of steps of their own.",
        ),
        paragraph(
            "Data parallelism splits the batch among GPUs; each keeps all weights, gradients and optimizer state, so",
            "it saves what a smaller batch saves. Its row is a prediction for each of two GPUs; it was not run.",
        ),
        *_errors(predicted[models[0]], first),
        *[_larger(predicted[model], [n for n in lines if n["model"] == model], model) for model in models[1:]],
        paragraph(*where) if where else "Not measured yet: columns that need a GPU show –.",
        "Made by `benchmarks/remedies.py`.",
    ]


def _larger(predicted: dict[str, Any], lines: list[dict[str, Any]], model: str) -> str:
    """What is to be known of another model's rows."""
    runs = _runs([n for n in lines if "remedy" in n])
    found = {key: _reserved(runs[key]) / made["reserved_bytes"] - 1 for key, made in _promises(predicted, runs).items()}
    highest, lowest = max(found, key=lambda key: found[key]), min(found, key=lambda key: found[key])
    share = {DATASETS[n["dataset"]]["lr"] / n["run"]["lr"] for n in lines if n.get("remedy") == "fp32"}
    (over,) = {round(number) for number in share}
    return paragraph(
        f"{SHOWN_AS.get(model, model)} (12 layers, hidden size 768, published weights) has some of the rows, at the",
        f"end of the page, with learning rates divided by {over}. `transformers` supports neither checkpointing nor",
        "packed rows for it, and computes its attention eagerly. With 64 GiB of memory it reserved",
        f"{found[lowest]:+.1%} ({lowest[1]}, {lowest[0]}) to",
        f"{found[highest]:+.1%} ({highest[1]}, {highest[0]}) relative to the predictions; these rows were not run",
        "inside a budget.",
    )


def _longest(predicted: dict[str, Any], runs: Runs) -> float:
    """The most times what was predicted that a step of a row took."""
    made = _promises(predicted, runs)
    return max((_step_s(runs[key]) / promise["step_s"] for key, promise in made.items()), default=1.0)


def _bullet(*texts: str) -> str:
    return fill(" ".join(texts), pages.WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _errors(predicted: dict[str, Any], runs: Runs) -> list[str]:
    """How far predictions were off, loops written by hand apart."""
    by_hand = {remedy.name for remedy in REMEDIES if remedy.plain is not None}
    found = {key: _reserved(runs[key]) / made["reserved_bytes"] - 1 for key, made in _promises(predicted, runs).items()}
    own = {key: error for key, error in found.items() if key[1] not in by_hand}
    plain = [error for key, error in found.items() if key[1] in by_hand]
    if not own or not plain:
        return []
    highest, lowest = max(own, key=lambda key: own[key]), min(own, key=lambda key: own[key])
    return [
        paragraph(
            f"Predictions are for a step with the longest batch. Of {len(own)} rows trained by vramfit,",
            f"{sum(abs(error) <= 0.01 for error in own.values())} reserved the predicted memory to within 1%; the",
            f"largest differences are {own[highest]:+.1%} ({highest[1]}, {highest[0]}) and",
            f"{own[lowest]:+.1%} ({lowest[1]}, {lowest[0]}). More is reserved where batches of other lengths fragment",
            "the memory; plans keep headroom for this. The hand-written loop, whose segments cannot grow, reserved up",
            f"to {max(plain):+.0%}.",
        )
    ]


def _runs(lines: list[dict[str, Any]]) -> Runs:
    """(data set, remedy) → its runs, the timed ones first."""
    found: Runs = {}
    for line in sorted(lines, key=lambda line: not line["timed"]):
        if "run" in line:
            run = line["run"] | {"timed": line["timed"] and not line.get("held"), "held": line.get("held", False)}
            run["whole_step_s"] = line["whole_step_s"]
            found.setdefault((line["dataset"], line["remedy"]), []).append(run)
    return found


def _table(dataset: str, predicted: dict[str, Any], runs: Runs, failures: dict[tuple[str, str], str]) -> str:
    names = {*predicted, *(name for where, name in (*runs, *failures) if where == dataset)}
    chosen = [r for r in REMEDIES if dataset in r.datasets and r.name in names]
    base, metric = runs.get((dataset, "fp32"), []), METRICS.get(dataset)
    rows = [
        _row(r, _promise(r, dataset, predicted, runs), runs.get((dataset, r.name), []), base, metric) for r in chosen
    ]
    for remedy, row in zip(chosen, rows, strict=True):
        row[-1] = "ran out of memory" if (dataset, remedy.name) in failures else row[-1]
    score = METRICS.get(dataset, "accuracy")
    head = ["remedy", "class", "predicted MiB", "measured MiB", "step predicted", "step measured", "time", score]
    return table([*head, "verdict"], rows)


def _promises(predicted: dict[str, Any], runs: Runs) -> dict[tuple[str, str], Any]:
    """What was predicted of the rows that were run, where anything was."""
    rows = {remedy.name: remedy for remedy in REMEDIES}
    made = {key: _promise(rows[key[1]], key[0], predicted.get(key[0], {}), runs) for key in runs}
    return {key: promise for key, promise in made.items() if promise}


def _promise(remedy: Remedy, dataset: str, predicted: dict[str, Any], runs: Runs) -> Any:
    """What was predicted of a row; of a plan that was run, by itself: its budget is a third of what was measured."""
    own = runs.get((dataset, remedy.name))
    if not remedy.planned or not own:
        return predicted.get(remedy.name)
    return {"reserved_bytes": own[0]["predicted_reserved_bytes"], "step_s": own[0]["predicted_step_time_s"]}


def _failed(name: str, error: str) -> str:
    """What a run said at its end."""
    settings = re.search(r"Training: [\d,]+ steps, ([^|]*?)\.? \|", error)
    last = re.search(r"Error: ([^|]*?) \|", error)
    assert settings is not None, error
    assert last is not None, error
    return paragraph(
        f"*{name[:1].upper() + name[1:]}*: {settings[1]}. It stopped: {last[1]}.",
    )


def _row(remedy: Remedy, predicted: Any, runs: list[Any], base: list[Any], metric: str | None) -> list[object]:
    saved, times = _reserved(runs) / _reserved(base) if runs and base else None, _times(runs)
    scores, whole = _scores(runs, metric), _scores(base, metric)
    mark = " ⊡" if any(run["held"] for run in runs) else ""
    return [
        remedy.name,
        remedy.kind,
        f"{predicted['reserved_bytes'] / MIB:,.0f}" if predicted else None,
        f"{_reserved(runs) / MIB:,.0f}" + (f" ({saved:.0%})" if saved else "") + mark if runs else None,
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
        told.append(f"saves less than {SAVES:.0%}" if saved <= 1 + SAVES else f"takes {saved - 1:.0%} more")
    if lost >= COSTS_POINTS and min(len(scores), len(whole)) == 1:
        told.append(f"{lost:.1f} points less with one seed")
    elif lost >= COSTS_POINTS and lost > spread:
        told.append(f"costs {lost:.1f} points")
    if times is None:
        told.append("not timed")
    elif times >= SLOW:
        told.append("slow")
    return ", ".join(told) or "worth it"


def _reserved(runs: list[Any]) -> int:
    """The highest peak of all seeds; inside a budget, where there are such runs."""
    chosen = [run for run in runs if run["held"]] or runs
    return max(run.get("measured_reserved_bytes") or run["reserved_bytes"] for run in chosen)


def _step_s(runs: list[Any]) -> float:
    """Mean seconds of the runs that were timed; 0 where none was."""
    timed = [run["step_time_s"] for run in runs if run["timed"]]
    return mean(timed) if timed else 0.0


def _times(runs: list[Any]) -> float | None:
    """How many times the step of *fp32* in the same call a step took; None where none was timed."""
    found = [run["step_time_s"] / run["whole_step_s"] for run in runs if run["timed"] and run["whole_step_s"]]
    return mean(found) if found else None


def _scores(runs: list[Any], metric: str | None) -> list[float]:
    """In percent, of runs that had room."""
    runs = [run for run in runs if not run["held"]]
    scores = [run["metrics"][metric or "accuracy"] if "metrics" in run else run["accuracy"] for run in runs]
    return [score if score > 1 else 100 * score for score in scores]


def _held(lines: list[dict[str, Any]]) -> list[str]:
    """Runs with 64 GiB that took more than predicted, and the same inside a budget."""
    by_name = {line["name"]: line for line in lines if "name" in line and "run" in line}
    rows = []
    for line in by_name.values():
        if not line.get("held"):
            continue
        inside, free = line["run"], by_name[line["name"].removesuffix(" held")]["run"]
        metric = METRICS.get(line["dataset"])
        scores = [_scores([run | {"held": False}], metric)[0] for run in (free, inside)]
        mib = [free["predicted_reserved_bytes"], free["measured_reserved_bytes"], inside["budget_bytes"]]
        mib.append(inside["measured_reserved_bytes"])
        shown = [f"{num_bytes / MIB:,.0f}" for num_bytes in mib]
        counts = [inside["num_alloc_retries"], inside["num_recoveries"]]
        rows.append([line["dataset"], line["remedy"], *shown, *counts, *(f"{score:.1f}" for score in scores)])
    if not rows:
        return []
    head = ["data", "remedy", "predicted MiB", "reserved with 64 GiB", "budget", "reserved in budget", "retries"]
    order = {name: number for number, name in enumerate(DATASETS)}
    return [
        "## Inside a budget",
        paragraph(
            "The rows above ran with 64 GiB, and PyTorch uses what it gets: it keeps fragments that batches of other",
            "lengths leave, and evaluation batches are as large as fits, up to four times those of training. Runs of",
            "the first seed that took more than predicted were therefore run again inside about the smallest budget",
            "that a plan would accept for them: the prediction plus the larger of 4% and 1% + 48 MiB. A *retry* is the",
            "allocator emptying its cache, which takes time that was not measured. A *recovery* would be vramfit",
            "repeating a step in smaller micro-batches. *Predicted* is what the run itself predicted.",
        ),
        table(
            [*head, "recoveries", "score with 64 GiB", "score in budget"], sorted(rows, key=lambda row: order[row[0]])
        ),
        paragraph(f"{'Not all' if any(row[7] for row in rows) else 'All'} finish without a recovery.", _passed(rows)),
    ]


def _passed(rows: list[list[Any]]) -> str:
    """Of runs inside a budget: whether they took more."""
    over = [_number(row[5]) - _number(row[4]) for row in rows]
    if max(over) <= 0:
        return "None exceeded its budget."
    return (
        f"{sum(n > 0 for n in over)} of {len(over)} exceeded the budget, by {max(over)} MiB at most: PyTorch compares "
        "the request with its limit, and then maps whole pages of 20 MiB."
    )


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _folklore(lines: list[dict[str, Any]]) -> list[str]:
    found = {line["folklore"]: line["run"] for line in lines}
    rows = [[f"`{name}`", *SHOWN[name](found.get(name))] for name in SHOWN]
    return [
        "Advice that is often repeated, what happened when it was followed, and what to do instead.",
        table(["advice", "what happened", "instead"], rows),
    ]


def _quantize_dynamic(run: Any) -> list[str | None]:
    if run is None:
        return [None, None]
    happened = "ran" if run["ran"] else f"did not run: `{_first(run['refused'])}`"
    return [happened, f'`vramfit.load(quantize="int8")`: {_mib(run["instead_allocated_bytes"])} at the peak of a batch']


def _quantization_config(run: Any) -> list[str | None]:
    if run is None:
        return [None, None]
    happened = f"loaded, in {', '.join(run['dtypes'])}" if run["ran"] else f"did not load: `{_first(run['refused'])}`"
    return [happened, f"`dtype=torch.float16`: {_mib(run['instead_allocated_bytes'])}"]


def _first(error: str) -> str:
    """The first sentence of an error."""
    return error.partition(". ")[0]


def _half(run: Any) -> list[str | None]:
    if run is None:
        return [None, None]
    bad = run["first_bad_step"]
    happened = f"accuracy {100 * run['accuracy']:.1f}; " + (
        "losses stayed finite" if bad is None else f"the loss is not finite from step {bad} on"
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
