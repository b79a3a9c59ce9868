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
    "The rules were fitted to these runs: of fourteen rules for the placement of segments, the one that predicts most",
    "of the 159 runs exactly was taken, and the rules for the largest batch (warm process, placements seen on",
    "hardware, no lone size from 100 samples on) were settled with the 24 answers known. So this section shows a fit;",
    "the next one is a test.",
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
        paragraph(
            f"The largest batch under a cap was searched for on the GPU in {len(found)} cases: the prediction is",
            f"equal in {sum(a == b for a, b in found)}, one sample lower in {sum(a == b - 1 for a, b in found)}, and",
            f"higher in {sum(a > b for a, b in found)}.",
        ),
        "",
        IN_SAMPLE,
    ]
    return lines


def random_cases() -> list[str]:
    result = newest("random_cases_h200")
    s = result["summary"]
    return [
        paragraph(
            f"{s['num_compared']} workloads that the rules had never seen, drawn at random (seed",
            f"{result['seeds'][0]}) and run on an {result['gpu']} with torch {result['torch_version']} and",
            f"transformers {result['transformers_version']} on {result['date']}:",
        ),
        "",
        "| peak | exact in both steps | worst error | too low |",
        "|---|---|---|---|",
        f"| requested | {percent(s['exact_share_requested_both_steps'])} | – | 0 |",
        f"| allocated | {percent(s['exact_share_allocated_both_steps'])} | {100 * s['worst_error_allocated']:.2f} % "
        f"| {s['num_under_allocated']} |",
        f"| reserved | {percent(s['exact_share_reserved_both_steps'])} | {100 * s['worst_error_reserved']:.2f} % "
        f"| {s['num_under_reserved']} |",
        "",
        paragraph(
            "*Both steps* are the first one and a later one. *Too low* counts predictions that are below the",
            "measurement by more than 0.1 % and 2 MiB. `fits` is decided on the upper bound of reserved memory, which",
            f"was below the measurement in {readme_figures.num_beyond_bound(result)} of the {s['num_compared']} cases.",
        ),
    ]


def batch_edges() -> list[str]:
    s = newest("batch_edges_h200")["summary"]
    return [
        paragraph(
            "At a memory cap where one sample more or less decides,",
            f"{s['num_agree']} of {s['num_cases']} predictions of *runs* or *out of memory* were right;",
            f"{s['num_unsafe']} batches that were called safe ran out of memory.",
        ),
    ]


def forward_passes() -> list[str]:
    """Single passes of the study, predicted before they were measured."""
    lines = _passes()
    figures = ("after_allocated_bytes", "peak_allocated_bytes")
    exact = [all(line["predicted"][f] == line["measured"][f] for f in figures) for line in lines]
    return [
        paragraph(
            f"Of {len(lines)} forward passes of [a study of 2019](study.md), predicted before they were measured, "
            f"{sum(exact)} allocated exactly the predicted bytes, both at the peak and after the pass.",
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
            f"For {len(planned)} jobs under a memory cap, vramfit planned {len(plans)} and refused the others",
            f"(`benchmarks/planned_runs.py`). Of the {len(plans)} plans that were run, {exact} reserved exactly the",
            f"predicted bytes. `benchmarks/brute_force.py` tried {len(tried)} settings; for the {len(ran)} that ran,",
            f"the predicted allocated peak was off by {_off(median(map(abs, errors)))} at the median,",
            f"{_off(max(errors))} too high at most, and {_off(-min(errors))} too low at most.",
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
        f"To predict the training of {r['case']['model']}, batch {r['case']['batch']}, on 2 CPU cores, after imports:",
        "",
        "| what | figure |",
        "|---|---|",
        f"| the first estimate | {f['estimate_s']:.2f} s |",
        f"| another batch of the same workload | {f['other_batch_s']:.2f} s |",
        f"| the largest batch | {f['max_batch_s']:.2f} s |",
        f"| memory of the process | {f['peak_rss_bytes'] / 2**20:.0f} MiB |",
        f"| `MemTracker` of torch, two steps | {f['mem_tracker_two_steps_s']:.1f} s ({f['ratio']:.0f} times the first "
        "estimate) |",
    ]


def page() -> str:
    """The page, from committed results."""
    parts = [
        [
            "# Accuracy",
            "",
            paragraph(
                f"How close predictions of GPU memory are to {num_cases()} runs and searches, all on one NVIDIA",
                "H200. The project has measured no other GPU yet; estimates for others say `derived`, and [Other",
                "cards](cards.md) compares some of them with figures that others published.",
            ),
        ],
        ["## The runs that the rules were fitted to", "", *recorded_peaks()],
        ["## New cases", "", *random_cases(), "", *forward_passes()],
        ["## At the limit", "", *batch_edges()],
        ["## Plans under a cap", "", *capped_runs()],
        ["## Speed", "", *speed(), "", "Made by `benchmarks/accuracy.py`."],
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
