"""The figures of the README and of `docs/speed.md`, made from committed results.

    python benchmarks/readme_figures.py

A block is `<!-- figures: NAME -->` … `<!-- end -->`; the script replaces the text between the two marks.
"""

import re
from collections import Counter
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
from vramfit.planner.heuristics import BASIS_SHARE, LENGTHS_SHARE

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
    rows: list[list[object]] = [_predicted_row()]
    for name, ours, trainer in _fine_tuned():
        rows.append(_row(f"Fine-tune {name}", "tokens/s", ours, "Trainer, `auto_find_batch_size`", trainer))
    found = {line["side"]: line for line in readme_runs.lines("inference_speed_h200", "model", "side", "cap")}
    rates = (found[side]["tokens_per_s"] for side in ("packed", "pipeline"))
    ours, theirs = rates
    rows.append(_row("Label texts with BERT-base", "tokens/s", ours, "`pipeline` at its best batch size", theirs))
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


def _fine_tuned() -> list[tuple[str, float, float]]:
    """Real tokens a second with vramfit and with the Trainer, model by model."""
    packed = {(n["model"], n["side"], n["cap"], n["lengths"]): n for n in readme_runs.packed_lines()}
    sides = (readme_runs.OURS, ("trainer",))
    return [
        (name, *(float(readme_runs.fastest(packed, model, side, "real")["tokens_per_s"]) for side in sides))
        for model, name in readme_runs.SHOWN.items()
    ]


def trusted() -> str:
    """What else was measured on one GPU, and what is known of others."""
    cases, edges = newest("random_cases_h200"), newest("batch_edges_h200")["summary"]
    disturbed = newest("stepper_h200")["disturbed"]
    assert not cases["summary"]["num_under_allocated"]
    return bullets(
        f"**On the H200** (torch {cases['torch_version'].split('+')[0]}), {edges['num_cases']} predictions of whether "
        f"one more sample still fits were tried: {edges['num_agree']} were right ([Accuracy](docs/accuracy.md)). In a "
        f"run of {disturbed['num_steps']} steps, during which another process took "
        f"{disturbed['taken_bytes'] / GIB:.0f} GiB, memory ran out {WORDS[disturbed['num_recoveries']]} times; each "
        "time the step was repeated in smaller passes, and no step was lost ([Speed](docs/speed.md)).",
        "**Estimates for other GPUs are marked `derived`**: computed in the same way from the card's data, not "
        "measured on one. [Other cards](docs/cards.md) has every published run, with the reason for its error if it "
        "is known. On your own card, `vramfit measure bert-base-uncased --batch 8 --seq 128` shows prediction and "
        "measurement.",
    )


def num_beyond_bound(result: dict[str, Any]) -> int:
    """Random cases that reserved more than the bound on which `fits` is decided."""
    most = [max(step["peak_reserved_bytes"] for step in c["measurement"]["steps"]) for c in result["cases"]]
    return sum(n > c["safe_reserved_bytes"] for n, c in zip(most, result["cases"], strict=True))


def summed_up() -> str:
    """What it costs, and what can be trusted, for readers who have a minute."""
    overheads = [row["overhead"] for row in newest("stepper_h200")["overhead"]["rows"]]
    cases, (found, others) = newest("random_cases_h200"), _published()
    s, errors = cases["summary"], [c.error for c in found]
    cards = Counter(find_gpu(c.row["card"]).title.removeprefix("NVIDIA ").removeprefix("GeForce ") for c in found)
    counts = ", ".join(f"{card}: {count}" for card, count in sorted(cards.items()))
    exact = round(s["exact_share_allocated_both_steps"] * s["num_compared"])
    over = [c for c in found if c.error < -HEADROOM]
    low, high = (_percent(share) for share in (-min(overheads), max(overheads)))
    beyond = num_beyond_bound(cases) or "no job"
    where = _list(sorted({c.row["card"].upper() for c in over}))
    omitted = sorted(-c.error for c in others)
    cost = f"""**What does it cost me?** A prediction or a plan takes a few seconds. Plans leave {_whole(HEADROOM)} of
    PyTorch's memory free ({_whole(MEASURED_HEADROOM)} on an H200). At the same settings, a step takes between {low}
    less and {high} more time than in a loop written by hand (H200). Each time memory runs out, one step is repeated.
    Where it saves memory or time, a plan may use 16-bit autocast (`--exact` keeps fp32), recompute activations, or
    use host memory (only this makes steps several times slower); it names each. Models stay ordinary `transformers`
    or sentence-transformers folders. Version 0.1, Apache-2.0."""
    trust = f"""**How far can I trust it?** The project measured one GPU, an H200, whose memory was capped in software
    to the sizes of smaller cards. In {s["num_compared"]} jobs with encoders that were not used to fit the rules, the
    predicted peak of allocated memory was exact to the byte in {exact} and at most
    {_percent(s["worst_error_allocated"])} off in the others; {beyond} reserved more than the bound used to decide
    what fits. Newer kinds of jobs were measured less: see the table above. On other cards there are runs that others
    published. For {len(found)} runs whose settings are all known ({counts}), predictions were {_percent(max(errors))}
    too high to {_percent(-min(errors))} too low; {len(over)}, on a {where}, was too low by more than what plans leave
    free. For {len(others)} whose sources omit settings, predictions were {_whole(omitted[0])} to
    {_whole(omitted[-1])} too low. Training on several GPUs was tested on CPUs only."""
    return "\n\n".join(paragraph(*text.split()) for text in (cost, trust))


HEADROOM, MEASURED_HEADROOM = (BASIS_SHARE[basis] + LENGTHS_SHARE["expandable"] for basis in ("derived", "verified"))
"""What plans leave free for samples of varied lengths: on GPUs that were not measured, and on the one that was."""


def _whole(share: float) -> str:
    return f"{100 * share:.0f} %"


def _list(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]


def _published() -> tuple[list[Any], list[Any]]:
    """Predictions compared with what others published, and with what they published without all settings."""
    import json

    import published_page as cards

    measured, predicted = (
        json.loads((ROOT / "benchmarks" / "published" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("measurements", "predictions")
    )
    promised = [c for c in cards.compare(measured, predicted) if c.is_promised]
    return [c for c in promised if c.is_repeatable], [c for c in promised if not c.is_repeatable]


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
    job = f"Predict the allocated peak of {num_cases} runs ({num_new} of them not used to fit the rules)"
    return [job, told["vramfit, allocated"], f"{told['rule of thumb']} (16 bytes a parameter, and activations)", None]


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
        f"{_all(held, made)} ran 20 steps and an evaluation without an out-of-memory error and without an allocator "
        f"retry; {len(exact)} reserved exactly the predicted bytes. The other {len(refused)} cases were refused; "
        f"{_all(right, refused).lower()} ran out of memory when tried.",
        "**Plans against an exhaustive search** over a grid of settings (`benchmarks/brute_force.py`): plans reach "
        f"{', '.join(f'{share:.0%}' for share in reached)} of the best throughput in {_of_all(len(reached))} cases.",
        f"**Predicted step times** are off by {_time_error(made)} at the median for these plans, and by "
        f"{_time_error(tried)} for the grid.",
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
        f"{_percent(r['held_out_median_error'])} on held-out halves. The plans and the grid above ran on another day",
        "and host, after `vramfit calibrate`; most steps took longer than predicted, in the predicted order.",
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


BLOCKS: dict[str, Callable[[], str]] = {"summed_up": summed_up, "compared": compared, "trusted": trusted}
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
    "started": readme_runs.started,
    "encoded": readme_runs.encoded,
}
"""Of the page on speed."""
PAGES = {README: BLOCKS, SPEED: MEASURED}

if __name__ == "__main__":
    write()
