"""The figures of the README and of `docs/speed.md`, made from committed results.

    python benchmarks/readme_figures.py

A block is `<!-- figures: NAME -->` … `<!-- end -->`; the script replaces the text between the two marks.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import capped_run
import readme_runs
import remedy_tables
from pages import bullets, paragraph, table
from readme_runs import newest

from vramfit.devices.catalogue import find_gpu

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
SPEED = ROOT / "docs" / "speed.md"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GIB, KIB = 2**30, 2**10
NUM_GRIDS = 8
"""Cases of `brute_force.py`."""
TRAINED = {
    "plain PyTorch loop in fp32": "a plain loop",
    "`vramfit train` in fp32": "fp32",
    "`vramfit train` in a third of that memory": "planned for a third",
    "LoRA": "LoRA",
    "int8 base, only the head trained": "int8, only the head learns",
}
"""Rows of the table → remedies."""
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write() -> None:
    """Fill the blocks of the README and of the page on speed."""
    for page, blocks in PAGES.items():
        page.write_text(fill(page.read_text(encoding="utf-8"), blocks), encoding="utf-8")


def fill(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a text with its blocks made anew.

    Args:
        blocks: the function that makes each block.

    Raises:
        KeyError: no function makes a block.
    """
    return BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2]]()}\n\n{found[3]}", text)


def names(text: str) -> list[str]:
    """The blocks of a text."""
    return [found[1] for found in BLOCK.findall(text)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def compared() -> str:
    """The README's table: vramfit and what people would otherwise use, one row a job."""
    packed = {(n["model"], n["side"], n["cap"], n["lengths"]): n for n in readme_runs.packed_lines()}
    rows: list[list[object]] = [_predicted_row()]
    for model, name in readme_runs.SHOWN.items():
        ours, trainer = (
            readme_runs.fastest(packed, model, sides, "real")["tokens_per_s"]
            for sides in (readme_runs.OURS, ("trainer",))
        )
        rows.append(_row(f"Fine-tune {name} in 11 GiB", "tokens/s", ours, "Trainer, `auto_find_batch_size`", trainer))
    found = {line["side"]: line for line in readme_runs.lines("inference_speed_h200", "model", "side", "cap")}
    rates = (found[side]["tokens_per_s"] for side in ("packed", "pipeline"))
    ours, theirs = rates
    rows.append(_row("Label texts with BERT-base", "tokens/s", ours, "`pipeline`, best batch size", theirs))
    served = newest("serving_h200")["plain"]
    rate = served["requests_per_s"]
    rows.append(
        _row(
            "Serve MiniLM to 64 clients",
            "requests/s",
            rate,
            "`transformers`, one request at a time",
            rate / served["times_as_fast"],
        )
    )
    return table(["Job", "vramfit", "The usual way", "Gain"], rows)


def trusted() -> str:
    """How near predictions are on the GPU that was measured, and on others."""
    cases, edges = newest("random_cases_h200"), newest("batch_edges_h200")["summary"]
    s = cases["summary"]
    assert not s["num_under_allocated"]
    return bullets(
        f"**Measured** on an {cases['gpu']} with torch {cases['torch_version'].split('+')[0]}. Of {s['num_compared']} "
        f"random workloads it had never seen, {_percent(s['exact_share_allocated_both_steps'])} of allocated peaks "
        f"were exact to the byte; the worst was {_percent(s['worst_error_allocated'])} off. Reserved peaks decide "
        f"whether a job fits, and {s['num_under_reserved']} of {s['num_compared']} was predicted too low by more than "
        "0.1 % and 2 MiB. At the edge of a memory cap, where one sample "
        f"decides, {edges['num_agree']} of {edges['num_cases']} answers were right "
        "([Accuracy](docs/accuracy.md)). The speeds above are of this GPU too; gains on others are not measured.",
        _other_cards(),
    )


def _other_cards() -> str:
    """Predictions beside what others published."""
    import json

    import published_page as cards

    measured, predicted = (
        json.loads((ROOT / "benchmarks" / "published" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("measurements", "predictions")
    )
    promised = [c for c in cards.compare(measured, predicted) if c.is_promised]
    found = [c for c in promised if c.is_repeatable]
    below = [c for c in found if c.is_below]
    names = sorted({find_gpu(c.row["card"]).title.removeprefix("NVIDIA ") for c in found})
    return (
        f"**Other GPUs** use the same rules with their own data. On {WORDS[len(names)]} of them ({', '.join(names)}), "
        f"{len(below)} of {len(found)} published runs took more memory than predicted, by at most "
        f"{_percent(-min(c.error for c in below))}. [Other cards](docs/cards.md) lists each with its reason, if "
        f"known, and {len(promised) - len(found)} whose source leaves settings out. Estimates for such a GPU say "
        "`derived`. Compare with yours: `vramfit measure bert-base-uncased --batch 8 --seq 128`."
    )


def _row(job: str, unit: str, ours: float, way: str, theirs: float) -> list[object]:
    rates = [f"{rate:,.0f}" if rate < 10_000 else f"{round(rate, -3):,.0f}" for rate in (ours, theirs)]
    return [job, f"{rates[0]} {unit}", f"{rates[1]} ({way})", f"{ours / theirs:.1f}×"]


def _predicted_row() -> list[object]:
    """Errors of predictions on the same measured runs."""
    from peers import read, summarise

    lines, _ = read()
    told = {}
    for peer in ("vramfit, allocated", "rule of thumb"):
        s = summarise([line for line in lines if line["peer"] == peer])
        told[peer] = f"median error {_percent(s['median_error'])}, too low in {100 * s['unsafe_share']:.0f} %"
        num_cases = s["num_cases"]
    num_new = newest("random_cases_h200")["summary"]["num_compared"]
    job = f"Predict the allocated peak: {num_cases} runs, {num_new} of them held out"
    return [job, told["vramfit, allocated"], f"{told['rule of thumb']} (16 B/parameter + activations)", None]


def trained() -> str:
    """Fine-tuning in a third of the memory, and in less."""
    r = newest("trained_h200")
    tight = [r[part]["metrics"]["accuracy"] for part in ("sst2-lora", "sst2-int8-head")]
    return "\n".join(
        [
            table(["", "dev accuracy", "reserved", "step time"], remedy_tables.summary("sst2", TRAINED)),
            "",
            paragraph(
                "MiniLM on 24,000 sentences of SST-2, two epochs, batch 256, on an H200 (`benchmarks/remedies.py`): "
                "the mean",
                "of three seeds, with the lowest and the highest. Step times are relative to `vramfit train` in fp32 "
                "in the",
                "same call. [Remedies](remedies.md) has every other technique and data set. On all 67,000 sentences "
                "with",
                f"one seed, LoRA in 512 MiB reaches {_percent(tight[0])} and an int8 base with a trained head in 256 "
                "MiB",
                f"{_percent(tight[1])} (`benchmarks/trained_runs.py`).",
            ),
        ]
    )


def plans() -> str:
    """Plans run for real, and beside every setting of a grid."""
    lines = readme_runs.lines("planned_runs_h200", "name")
    made = [line for line in lines if line["is_plan"]]
    held = [n for n in made if not (n["num_alloc_retries"] or n["num_ooms"] or n.get("failed"))]
    exact = [line for line in made if line["training_reserved_bytes"] == line["predicted_reserved_bytes"]]
    refused = [line for line in lines if not line["is_plan"]]
    right = [line for line in refused if line.get("failed") or line["num_ooms"]]
    tried = [line for line in readme_runs.lines("brute_force_h200", "key") if line["fits"]]
    reached = sorted(_reached(tried), reverse=True)
    cases = newest("speed_of_planning")["cases"]
    quick = sorted(case["plan_s"] for case in cases if case["fits"] and "steps" not in case["case"])
    (long,) = (case["plan_s"] for case in cases if "steps" in case["case"])
    (refusal,) = (case["plan_s"] for case in cases if not case["fits"])
    return bullets(
        f"**Planning time**, after imports, on two CPU cores: {quick[0]:.0f} to {quick[-1]:.0f} s for BERT-large at "
        f"512 tokens, {long:.0f} s for a long run with varied lengths, {refusal:.0f} s to find that nothing fits "
        "(`benchmarks/speed_of_planning.py`).",
        "**Plans run for real** on an H200 capped at 2, 4, 8, 11.17 and 16 GiB: four models, 128 and 512 tokens, "
        f"effective batch 32 (`benchmarks/planned_runs.py`). {len(made)} of {len(lines)} cases have a plan. "
        f"{_all(held, made)} ran 20 steps and an evaluation without out-of-memory and without an allocator retry; "
        f"reserved memory was as predicted, to the byte, in {len(exact)}. The other {len(refused)} cases were "
        f"refused; {_all(right, refused).lower()} ran out of memory when tried.",
        "**Plans against an exhaustive search** over a grid of settings (`benchmarks/brute_force.py`): plans reach "
        f"{', '.join(f'{share:.0%}' for share in reached)} of the best throughput in {_of_all(len(reached))} cases.",
        f"**Step times** of these plans are off by {_time_error(made)} at the median, those of the grid by "
        f"{_time_error(tried)}.",
    )


def _all(some: list[Any], of: list[Any]) -> str:
    """How many of some there are, in words."""
    return f"All {len(of)}" if len(some) == len(of) else f"{len(some)} of these"


def step_times() -> str:
    """How near step times are to the runs they were fitted to, and to others."""
    r = newest("step_time_fit")
    return paragraph(
        f"The model of step times was fitted to {r['num_workloads']} runs on one H200",
        f"(`benchmarks/step_time_fit.py`): median error {_percent(r['median_error'])} on these runs,",
        f"{_percent(r['held_out_median_error'])} on held-out halves. The plans and grids above ran on another day's "
        "machine,",
        "after `vramfit calibrate`. Most steps took longer than predicted, in the predicted order.",
    )


def _of_all(count: int) -> str:
    return f"all {WORDS[NUM_GRIDS]}" if count == NUM_GRIDS else f"{count} of {WORDS[NUM_GRIDS]}"


def _reached(lines: list[dict[str, Any]]) -> list[float]:
    """Throughput of each plan as a share of the best in its grid."""
    shares = []
    for own in (line for line in lines if line["origin"] == "plan"):
        best = min(line["step_s"] for line in lines if line["name"] == own["name"])
        shares.append(best / own["step_s"])
    return shares


def _time_error(lines: list[dict[str, Any]]) -> str:
    timed = [line for line in lines if line.get("step_s") and line.get("predicted_step_s")]
    assert capped_run.time_errors(timed) != "none"
    return _percent(median(abs(line["predicted_step_s"] / line["step_s"] - 1) for line in timed))


def loading() -> str:
    """Seconds to load BERT-large, beside others."""
    r = newest("loading_h200")
    seconds = {(row["loader"], row["kind"]): f"{row['seconds']:.2f} s" for row in r["rows"] if row.get("seconds")}
    rows = [
        [kind, *(seconds[loader, kind] for loader in ("vramfit", "from_pretrained", "device_map"))]
        for kind in ("fp32", "bf16", "int8")
    ]
    own = next(row for row in r["rows"] if (row["loader"], row["kind"]) == ("vramfit", "int8"))
    more = (own["peak_device_bytes"] - own["final_device_bytes"]) / 2**20
    return "\n".join(
        [
            table(["BERT-large", "vramfit", "`from_pretrained`", "`device_map`"], rows),
            "",
            paragraph(
                f"From a warm page cache to an H200 (`benchmarks/loading.py`, medians of {WORDS[r['repeats']]} runs). "
                "While",
                f"loading, the GPU never holds more than the final model; in int8, {more:.0f} MiB more.",
            ),
        ]
    )


def stepper() -> str:
    """A long run in a budget, undisturbed and disturbed."""
    r = newest("stepper_h200")
    calm, disturbed = r["undisturbed"], r["disturbed"]
    below = calm["predicted"]["peak_allocated_bytes"] - calm["max_allocated_bytes"]
    rows = [row["overhead"] for row in r["overhead"]["rows"]]
    return "\n".join(
        [
            paragraph(
                "BERT-large on an H200 with samples of 32 to 512 tokens, 300 steps inside 11.17 GiB",
                "(`benchmarks/stepper_run.py`):",
            ),
            "",
            bullets(
                f"**Undisturbed**: {calm['num_steps']} steps, {calm['num_ooms']} out-of-memory errors, "
                f"{calm['num_alloc_retries']} allocator retries. The allocated peak was {below / KIB:.1f} KiB below "
                f"the prediction of {calm['predicted']['peak_allocated_bytes'] / GIB:.2f} GiB.",
                f"**Another process took {disturbed['taken_bytes'] / GIB:.0f} GiB at step 100**: "
                f"{disturbed['num_recoveries']} recoveries, all {disturbed['num_steps']} steps taken. Losses stayed "
                f"within {disturbed['max_loss_difference']:.1e} of the undisturbed run. Halving the micro-batch, "
                f"which changes only rounding, makes a difference of {calm['halved']['max_loss_difference']:.1e}.",
                f"**Overhead** of a step against a loop written by hand, in {WORDS[len(rows)]} cases: "
                f"{100 * min(rows):+.1f} % to {100 * max(rows):+.1f} %.",
            ),
        ]
    )


BLOCKS: dict[str, Callable[[], str]] = {"compared": compared, "trusted": trusted}
"""Of the README."""
MEASURED: dict[str, Callable[[], str]] = {
    "trained": trained,
    "plans": plans,
    "step_times": step_times,
    "loading": loading,
    "stepper": stepper,
    "packed": readme_runs.packed,
    "predicted": readme_runs.predicted,
    "offloaded": readme_runs.offloaded,
    "fitted": readme_runs.fitted,
    "served": readme_runs.served,
    "watched": readme_runs.watched,
}
"""Of the page on speed."""
PAGES = {README: BLOCKS, SPEED: MEASURED}

if __name__ == "__main__":
    write()
