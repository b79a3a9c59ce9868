"""Who knows beforehand what a run takes? Peers asked of the same cases, held against what an H200 measured.

    python benchmarks/peers.py               # on any machine; two minutes, and half an hour more for MemTracker
    python benchmarks/peers.py --tables      # from results/: docs/peers.md

The cases are the 159 runs recorded under tests/truth and the 64 random ones of `random_cases.py`. `MemTracker` takes
some twenty seconds a case, so it is asked of every tenth (`--tracked-every`). A peer is held against what it comes
nearest to saying: live blocks, or reserved segments. One line of JSON for each peer and case is added to the results;
what is there is not asked again. `torch-preflight` is asked where it is installed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import forked
import pages
import peer_runs
from pages import bullets, paragraph, table
from peer_predictions import PEERS, Case, Peer, ask

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "peers.md"
sys.path.insert(0, str(ROOT))
UNDER_FRACTION, UNDER_BYTES = 0.001, 2 * 2**20
"""A prediction is too low where it is below the truth by more than both, as in `case_comparison.py`."""


def main(arguments: list[str] | None = None) -> int:
    """Ask, or show."""
    options = _parse(arguments)
    if options.tables:
        PAGE.write_text(page(*read()), encoding="utf-8")
        print(PAGE.read_text(encoding="utf-8"))
        return 0
    done = {(line["peer"], line["case"]) for line in forked.read_lines(options.out, "peer", "case")}
    for peer in PEERS:
        if options.only not in peer.name:
            continue
        found = peer.version()
        if found is None:
            print(f"{peer.name}: {peer.package} is not installed; pip install {peer.package}")
            continue
        for case in chosen(peer, options.tracked_every):
            if (peer.name, case.name) not in done:
                line = {"date": date.today().isoformat(), "version": found, **ask(peer, case)}
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(peer.name, case.name, line.get("error") or line["predicted_bytes"], flush=True)
    return 0


def chosen(peer: Peer, tracked_every: int) -> list[Case]:
    """The cases that a peer is asked of."""
    made = list(cases())
    return made[::tracked_every] if peer.name == "MemTracker" else made


def cases() -> Iterator[Case]:
    """Every case with a measured peak."""
    from tests.truth.cases import load, model_of, workload_of

    from vramfit.records.codec import from_data
    from vramfit.workload import Workload

    for file in ("peaks_h200", "peaks_random_h200"):
        for index, recorded in enumerate(load(file)):
            steps = recorded["result"]["steps"]
            yield Case(
                name=f"{file} {index}",
                workload=workload_of(recorded["case"]),
                model=model_of(recorded["case"]),
                allocated_bytes=max(step["peak"] for step in steps),
                reserved_bytes=max(step["reserved"] for step in steps),
            )
    newest = json.loads(sorted(RESULTS.glob("random_cases_h200_*.json"))[-1].read_text(encoding="utf-8"))
    for index, row in enumerate(newest["cases"]):
        steps = row["measurement"]["steps"]
        workload = from_data(Workload, row["workload"] | {"gpu": "h200", "torch_version": newest["torch_version"]})
        yield Case(
            name=f"random_cases {index}",
            workload=workload,
            model=workload.model,
            allocated_bytes=max(step["peak_allocated_bytes"] for step in steps),
            reserved_bytes=max(step["peak_reserved_bytes"] for step in steps),
        )


def read() -> tuple[list[dict[str, Any]], int]:
    """The lines of the newest results, and how many cases there are."""
    files = sorted(RESULTS.glob("peers_*.jsonl"))
    return (forked.read_lines(files[-1], "peer", "case") if files else []), len(list(cases()))


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of one peer: medians and the worst, how many are too low, seconds."""
    said = [line for line in lines if line.get("predicted_bytes")]
    errors = [abs(line["predicted_bytes"] / line["true_bytes"] - 1) for line in said]
    low = [
        n for n in said if n["true_bytes"] - n["predicted_bytes"] > max(UNDER_BYTES, UNDER_FRACTION * n["true_bytes"])
    ]
    return {
        "num_cases": len(said),
        "num_failed": sum("error" in line for line in lines),
        "median_error": median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "unsafe_share": len(low) / len(said) if said else None,
        "median_s": median(line["seconds"] for line in said) if said else None,
    }


def page(lines: list[dict[str, Any]], num_cases: int) -> str:
    """The page as Markdown."""
    failed = sum("error" in line for line in lines)
    days = " and ".join(sorted({line["date"] for line in lines}))
    return pages.page(
        "# Compared with other tools",
        "## Predicting what a run takes",
        paragraph(
            f"{num_cases} workloads were run on an H200: the recorded and the random ones of [Accuracy](accuracy.md).",
            "Each tool was asked about the same workloads, without a GPU. Its answer is compared with the figure",
            "that it comes nearest to: *allocated* (blocks handed out) or *reserved* (segments held). *Too low* is",
            "the share of answers that are below the measurement by more than 0.1 % and 2 MiB: a job planned with",
            "such an answer runs out of memory.",
        ),
        _table(lines),
        paragraph(
            "vramfit's rules were fitted to the recorded workloads. It had seen none of the random ones:",
        ),
        _table([line for line in lines if line["case"].startswith("random_cases")]),
        paragraph(
            "vramfit is not the fastest: formulas answer in hundredths of a second. *Seconds* is the median on two",
            "busy CPU cores, after imports.",
        ),
        bullets(
            "**vramfit**: *allocated* is its prediction; *safe bound* is the upper bound that `fits` is decided on.",
            "**`torch-preflight`** and **`accelerate estimate-memory`** cannot describe a forward pass with gradients, "
            "so they have fewer cases. *By name* are the models that `torch-preflight` ships; for the others it reads "
            "the configuration. `accelerate estimate-memory` takes neither batch nor length.",
            "**`MemTracker`** counts live tensors under FakeTensorMode, with the kernels of a CPU. It is so slow "
            "that it was asked about a sample only.",
            "**The rule of thumb** is 16 bytes per parameter plus the activations by the formula of Korthikanti et al.",
        ),
        f"{failed} questions ended in an error of the tool and are left out. Asked on {days}."
        if failed
        else f"Asked on {days}.",
        *peer_runs.sections(),
        "Made by `benchmarks/peers.py`.",
    )


def _table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for peer in PEERS:
        own = [line for line in lines if line["peer"] == peer.name]
        s = summarise(own)
        if s["num_cases"]:
            shown = [f"{100 * s[name]:.1f} %" for name in ("median_error", "worst_error", "unsafe_share")]
            told = peer.name if peer.package == "vramfit" else f"{peer.name} ({own[-1]['version']})"
            rows.append([told, peer.figure, s["num_cases"], *shown, f"{s['median_s']:.2f} s"])
    return table(["", "compared with", "cases", "median error", "worst error", "too low", "seconds"], rows)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"peers_{date.today().isoformat()}.jsonl")
    parser.add_argument("--only", default="", help="peers whose name contains this")
    parser.add_argument("--tracked-every", type=int, default=10, help="MemTracker is asked of one case in so many")
    parser.add_argument("--tables", action="store_true", help="write the page from the results kept here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
