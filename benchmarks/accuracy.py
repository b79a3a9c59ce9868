"""How near are predictions to measurement? Writes docs/accuracy.md and the README's figures from committed results.

    python benchmarks/accuracy.py --recorded   # predicts the 159 recorded runs anew; some minutes
    python benchmarks/accuracy.py              # from results/ alone

`--recorded` keeps its counts in `results/recorded_truth_h200.json`; everything else is read from benchmarks/results.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import forked
import readme_figures
from pages import paragraph

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accuracy.md"
RECORDED = RESULTS / "recorded_truth_h200.json"
sys.path.insert(0, str(ROOT))
IN_SAMPLE = paragraph(
    "The rules were made looking at these cases: where segments lie was chosen among fourteen variants by how",
    "many of the",
    "159 it gets right, and how the largest batch is decided (warm process, placements seen on hardware, no lone",
    "size from",
    "100 samples on) was settled knowing the 24 answers. Read this section as a fit, the next as a test.",
)


def newest(question: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sorted(RESULTS.glob(f"{question}_*.json"))[-1].read_text())
    return found


def newest_lines(question: str, *keys: str) -> list[dict[str, Any]]:
    return forked.read_lines(sorted(RESULTS.glob(f"{question}_*.jsonl"))[-1], *keys)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def recorded_summary() -> dict[str, Any]:
    """The recorded runs predicted anew: shares that are exact, worst errors, and the largest batches."""
    from tests.truth.test_max_batch import CASES, predict
    from tests.truth.test_peaks import rows

    found = [(predict(c["case"]), c["result"]["max_batch"]) for c in CASES]
    return {**peaks_summary(rows()), "largest": found}


def peaks_summary(rows: Any) -> dict[str, Any]:
    """Of the rows that tests/truth/test_peaks.py makes."""
    from tests.truth.test_peaks import share, worst

    summary: dict[str, Any] = {"num_cases": len(rows)}
    chosen = {
        "training, allocated, steady step": ([r for r in rows if r.trains], "allocated"),
        "forward and inference, allocated": ([r for r in rows if not r.trains], "allocated"),
        "all, reserved": (list(rows), "reserved"),
    }
    for name, (picked, figure) in chosen.items():
        off = [getattr(r, figure)[-1] for r in picked]
        true = [getattr(r, f"true_{figure}")[-1] for r in picked]
        summary[name] = {"num": len(picked), "exact": share([n == 0 for n in off]), "worst": worst(off, true)}
    return summary


def recorded_peaks() -> list[str]:
    summary = json.loads(RECORDED.read_text(encoding="utf-8"))
    lines = [f"| {summary['num_cases']} recorded runs | exact to the byte | worst error |", "|---|---|---|"]
    for name, row in summary.items():
        if isinstance(row, dict):
            lines.append(f"| {name} ({row['num']}) | {percent(row['exact'])} | {100 * row['worst']:.2f} % |")
    found = summary["largest"]
    lines += [
        "",
        f"Largest batch under a cap, {len(found)} searches on the GPU: equal in {sum(a == b for a, b in found)}, one "
        f"below in {sum(a == b - 1 for a, b in found)}, above in {sum(a > b for a, b in found)}.",
        "",
        IN_SAMPLE,
    ]
    return lines


def random_cases() -> list[str]:
    result = newest("random_cases_h200")
    s = result["summary"]
    return [
        paragraph(
            f"{s['num_compared']} workloads drawn at random (seed {result['seeds'][0]}: {result['gpu']}, torch",
            f"{result['torch_version']}, transformers {result['transformers_version']}, {result['date']}), never",
            "seen",
            "before:",
        ),
        "",
        "| figure | exact in both steps | worst error | under-predicted |",
        "|---|---|---|---|",
        f"| requested | {percent(s['exact_share_requested_both_steps'])} | – | 0 |",
        f"| allocated | {percent(s['exact_share_allocated_both_steps'])} | {100 * s['worst_error_allocated']:.2f} % "
        f"| {s['num_under_allocated']} |",
        f"| reserved | {percent(s['exact_share_reserved_both_steps'])} | {100 * s['worst_error_reserved']:.2f} % "
        f"| {s['num_under_reserved']} |",
        "",
        "Under-predicted counts cases more than 0.1 % and 2 MiB below the measurement.",
    ]


def batch_edges() -> list[str]:
    s = newest("batch_edges_h200")["summary"]
    return [
        paragraph(
            "At the edge of a memory cap, where one sample more or less decides,",
            f"{s['num_agree']} of {s['num_cases']} predictions of *runs* or *out of memory* were right, and",
            f"{s['num_unsafe']} batches that were called safe ran out.",
        ),
    ]


def forward_passes() -> list[str]:
    """Single passes of the study, predicted before they were measured."""
    lines = _passes()
    figures = ("after_allocated_bytes", "peak_allocated_bytes")
    exact = [all(line["predicted"][f] == line["measured"][f] for f in figures) for line in lines]
    return [
        paragraph(
            f"{len(lines)} forward passes of [a well-known study](study.md), predicted before they were measured: what",
            f"was allocated after the pass and at its peak was as predicted to the byte in {sum(exact)} of them.",
        ),
    ]


def _passes() -> list[dict[str, Any]]:
    return [line for line in newest_lines("bert_memory_study_h200", "name") if line["kind"] == "forward"]


def capped_runs() -> list[str]:
    """Plans and settings of a grid, run under their caps with `Stepper`."""
    planned, tried = newest_lines("planned_runs_h200", "name"), newest_lines("brute_force_h200", "key")
    plans = [line for line in planned if line["is_plan"] and "error" not in line]
    exact = sum(line["training_reserved_bytes"] == line["predicted_reserved_bytes"] for line in plans)
    ran = [line for line in tried if line["fits"] and line.get("predicted_allocated_bytes")]
    errors = [line["predicted_allocated_bytes"] / line["training_allocated_bytes"] - 1 for line in ran]
    return [
        paragraph(
            f"{len(planned)} plans and refusals of `benchmarks/planned_runs.py`: reserved memory of {exact} of",
            f"{len(plans)} plans was as predicted to the byte. {len(tried)} settings of",
            "`benchmarks/brute_force.py`: for the",
            f"{len(ran)} that ran, predictions of the allocated peak were off by {_off(median(map(abs, errors)))}",
            "at the",
            f"median, too high by {_off(max(errors))} at most, and too low by {_off(-min(errors))} at most.",
        ),
    ]


def _off(share: float) -> str:
    return f"{100 * max(share, 0.0):.2f} %"


def num_cases() -> int:
    """Runs and searches on a GPU that the page speaks of."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    counted = [
        newest("random_cases_h200")["summary"]["num_compared"],
        newest("batch_edges_h200")["summary"]["num_cases"],
    ]
    capped = len(newest_lines("planned_runs_h200", "name")) + len(newest_lines("brute_force_h200", "key"))
    return recorded["num_cases"] + len(recorded["largest"]) + sum(counted) + capped + len(_passes())


def speed() -> list[str]:
    r = newest("speed_of_prediction")
    f = r["figures"]
    return [
        f"Training of {r['case']['model']}, batch {r['case']['batch']}, on 2 CPU cores, after imports:",
        "",
        "| what | figure |",
        "|---|---|",
        f"| an estimate | {f['estimate_s']:.2f} s |",
        f"| another batch of the same workload | {f['other_batch_s']:.2f} s |",
        f"| the largest batch | {f['max_batch_s']:.2f} s |",
        f"| memory of the process | {f['peak_rss_bytes'] / 2**20:.0f} MiB |",
        f"| `MemTracker` of torch, two steps | {f['mem_tracker_two_steps_s']:.1f} s ({f['ratio']:.0f} times) |",
    ]


def page() -> str:
    """The page, from committed results."""
    parts = [
        [
            "# Accuracy",
            "",
            paragraph(
                f"From {num_cases()} runs and searches, all on one NVIDIA H200; no other GPU has been measured",
                "yet, and",
                "estimates for others say `derived`. Made by `benchmarks/accuracy.py`.",
            ),
        ],
        ["## Recorded truth", "", *recorded_peaks()],
        ["## Fresh cases", "", *random_cases(), "", *forward_passes()],
        ["## The edge", "", *batch_edges()],
        ["## Under a cap", "", *capped_runs()],
        ["## Speed", "", *speed()],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def main() -> None:
    """Write the page and the README's figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="predict the recorded runs anew")
    if parser.parse_args().recorded:
        RECORDED.write_text(json.dumps(recorded_summary(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    readme_figures.write()
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
