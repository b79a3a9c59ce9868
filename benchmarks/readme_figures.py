"""The figures of the README, each paragraph or table made from committed results between two marks.

    python benchmarks/readme_figures.py

A block is `<!-- figures: NAME -->` … `<!-- end -->`; what lies between is replaced.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import capped_run
import readme_runs
import remedy_tables
from pages import paragraph, table
from readme_runs import newest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GIB, KIB = 2**30, 2**10
NUM_GRIDS = 8
"""Cases of `brute_force.py`."""
TRAINED = {
    "a plain fp32 loop": "a plain loop",
    "`vramfit train` in fp32": "fp32",
    "`vramfit train` with a third of fp32's memory": "planned for a third",
    "LoRA": "LoRA",
    "int8 base, only the head learns": "int8, only the head learns",
}
"""Rows of the README → remedies."""
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write() -> None:
    """Write the README anew."""
    README.write_text(fill(README.read_text(encoding="utf-8")), encoding="utf-8")


def fill(text: str, blocks: Mapping[str, Callable[[], str]] | None = None) -> str:
    """A text with its blocks made anew.

    Args:
        blocks: who makes them; the README's own without.

    Raises:
        KeyError: a block that nobody makes.
    """
    made = BLOCKS if blocks is None else blocks
    return BLOCK.sub(lambda found: f"{found[1]}\n{made[found[2]]()}\n\n{found[3]}", text)


def names(text: str) -> list[str]:
    """The blocks of a text."""
    return [found[1] for found in BLOCK.findall(text)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def accuracy() -> str:
    """How near predictions are: recorded truth, random cases, the edge."""
    import accuracy as made

    fresh = [line for line in made.random_cases() if not line.startswith("Under-predicted")]
    speed = newest("speed_of_prediction")["figures"]
    return "\n".join(
        [
            f"From {made.num_cases()} runs and searches on an H200.",
            "",
            *made.recorded_peaks(),
            "",
            *fresh,
            *made.batch_edges(),
            "",
            paragraph(
                f"An estimate of BERT-large training takes {speed['estimate_s']:.2f} s after imports, another",
                "batch of it",
                f"{speed['other_batch_s']:.2f} s, the largest batch {speed['max_batch_s']:.2f} s.",
            ),
        ]
    )


def peers() -> str:
    """Others asked of the same cases."""
    from peer_predictions import PEERS
    from peers import read, summarise

    lines, _ = read()
    rows = []
    for peer in PEERS:
        s = summarise([line for line in lines if line["peer"] == peer.name])
        if s["num_cases"]:
            shown = [_percent(s[name]) for name in ("median_error", "worst_error", "unsafe_share")]
            rows.append([peer.name, s["num_cases"], *shown, f"{s['median_s']:.2f} s"])
    return table(["", "cases", "median error", "worst error", "too low", "seconds"], rows)


def trained() -> str:
    """Fine-tuning in a third of the memory, and in less."""
    r = newest("trained_h200")
    tight = [r[part]["metrics"]["accuracy"] for part in ("sst2-lora", "sst2-int8-head")]
    return "\n".join(
        [
            table(["", "dev accuracy", "memory reserved", "time of a step"], remedy_tables.summary("sst2", TRAINED)),
            "",
            paragraph(
                "MiniLM on 24,000 sentences of SST-2, two epochs, batch 256, on an H200 (`benchmarks/remedies.py`,",
                "with every other remedy, data set and class of change in [docs/remedies.md](docs/remedies.md)); the",
                "mean of three seeds, the lowest and the highest. Times are beside `vramfit train` in fp32 in the same",
                f"call. With all 67,000 sentences and one seed, LoRA in 512 MiB reached {_percent(tight[0])}, an int8",
                f"base whose head learns in 256 MiB {_percent(tight[1])} (`benchmarks/trained_runs.py`).",
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
    return paragraph(
        f"A plan for BERT-large at 512 tokens takes {quick[0]:.0f} to {quick[-1]:.0f} s after imports on two cores,",
        f"that of a long run on lengths that vary {long:.0f} s, a refusal {refusal:.0f} s",
        "(`benchmarks/speed_of_planning.py`).",
        "On an H200 capped at 2, 4, 8, 11.17 and 16 GiB (`benchmarks/planned_runs.py`: four models, 128 and 512",
        "tokens,",
        f"effective batch 32), {len(made)} of {len(lines)} cases have a plan; {len(held)} of them ran 20 steps and",
        "an",
        "evaluation without running out and without an allocator retry, and reserved memory was as predicted to",
        "the byte",
        f"in {len(exact)}. {len(right)} of the {len(refused)} refusals ran out as they said. Against every setting",
        "of a",
        f"grid (`benchmarks/brute_force.py`), plans reached {', '.join(f'{share:.0%}' for share in reached)} of",
        "the best",
        f"throughput in {_of_all(len(reached))} cases. Step",
        "times of",
        "plans were off by",
        f"{_time_error(made)} at the median, those of the grid by {_time_error(tried)}.",
    )


def step_times() -> str:
    """How near step times are to the runs they were fitted to, and to others."""
    r = newest("step_time_fit")
    return paragraph(
        f"Step times are those of a model fitted to {r['num_workloads']} runs on one H200: median error",
        f"{_percent(r['median_error'])} there, {_percent(r['held_out_median_error'])} on halves it had not seen",
        "(`benchmarks/step_time_fit.py`). The plans and settings above ran on another day's machine, after `vramfit",
        "calibrate`; most took longer than predicted, in the order predicted.",
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
    told = [
        f"{kind} in {seconds['vramfit', kind]}, against {seconds['from_pretrained', kind]} by `from_pretrained` and "
        f"{seconds['device_map', kind]} with `device_map`"
        for kind in ("fp32", "bf16", "int8")
    ]
    own = next(row for row in r["rows"] if (row["loader"], row["kind"]) == ("vramfit", "int8"))
    more = (own["peak_device_bytes"] - own["final_device_bytes"]) / 2**20
    return paragraph(
        f"BERT-large from a warm cache to an H200 (`benchmarks/loading.py`, medians of {WORDS[r['repeats']]}):",
        f"{'; '.join(told)}. The most ever held on the GPU is the final model; in int8, the final model and",
        f"{more:.0f} MiB.",
    )


def stepper() -> str:
    """A long run in a budget, undisturbed and disturbed."""
    r = newest("stepper_h200")
    calm, disturbed = r["undisturbed"], r["disturbed"]
    below = calm["predicted"]["peak_allocated_bytes"] - calm["max_allocated_bytes"]
    rows = [row["overhead"] for row in r["overhead"]["rows"]]
    return paragraph(
        "On an H200 (`benchmarks/stepper_run.py`), BERT-large with samples of 32 to 512 tokens ran",
        f"{calm['num_steps']} steps inside 11.17 GiB with {calm['num_ooms']} out-of-memory errors and",
        f"{calm['num_alloc_retries']} allocator retries; the allocated peak was {below / KIB:.1f} KiB below its",
        "prediction of",
        f"{calm['predicted']['peak_allocated_bytes'] / GIB:.2f} GiB. While another process took",
        f"{disturbed['taken_bytes'] / GIB:.0f} GiB of the card at step 100, the run recovered",
        f"{WORDS[disturbed['num_recoveries']]} times and took all {disturbed['num_steps']} steps; its losses",
        "stayed within",
        f"{disturbed['max_loss_difference']:.1e} of the undisturbed run's. A clean run in micro-batches of half",
        "the size",
        f"differs by {calm['halved']['max_loss_difference']:.1e}: that is rounding. A step took between",
        f"{-100 * min(rows):.1f} % less and {100 * max(rows):.1f} % more time than a loop written by hand, in",
        f"{WORDS[len(rows)]} cases.",
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "peers": peers,
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

if __name__ == "__main__":
    write()
