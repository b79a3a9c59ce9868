"""Does the prediction hold on workloads nobody looked at? Cases drawn at random, run for real, then predicted.

On a machine with a GPU:     python benchmarks/random_cases.py --seed 1 --count 64 --out cases.jsonl
On any machine, afterwards:  python benchmarks/random_cases.py --compare cases.jsonl

Each case runs in a process of its own; several at a time, since PyTorch counts memory per process. One line of
JSON a case is appended as it ends; a later call goes on where an earlier one stopped, and tries again what failed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_comparison import compare_lines, render, save_results
from case_space import draw_cases

from vramfit.errors import VramfitError
from vramfit.records.codec import to_data
from vramfit.records.measurement import Measurement
from vramfit.units import GIB
from vramfit.workload import Workload

Measure = Callable[[Workload, float], Measurement]
CASE_TIMEOUT_S = 150.0
LEAST_S = 15.0
"""A case is not begun with less time than this left."""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.compare:
        lines = read_lines(options.compare)
        rows, summary = compare_lines(lines, print_progress=not options.quiet)
        print(render(rows, summary))
        print(f"wrote {save_results(rows, summary, lines, options.results)}")
        return 0
    cases = draw_cases(options.seed, options.count, bound_bytes=int(options.max_gib * GIB))
    if options.list:
        for case in cases:
            print(json.dumps(short(case)))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    run = Run(measure=_measure, seed=options.seed, workers=options.workers, max_seconds=options.max_seconds)
    return run_cases(cases, options.out, run)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How cases are run."""

    measure: Measure
    seed: int
    """Of the draw; written beside every case."""
    workers: int
    max_seconds: float


def run_cases(cases: list[Workload], out: Path, run: Run) -> int:
    """Run what the file does not hold yet; 0 when all of it is measured, else 1."""
    deadline = time.monotonic() + run.max_seconds
    done = {_key(line["workload"]) for line in read_lines(out) if line["measurement"]} if out.exists() else set()
    waiting = [case for case in cases if _key(to_data(case)) not in done]
    print(f"{len(cases)} cases, {len(cases) - len(waiting)} done before, {run.workers} at a time", flush=True)
    running: set[Future[dict[str, Any]]] = set()
    with ThreadPoolExecutor(run.workers) as pool, out.open("a", encoding="utf-8") as file:
        if out.stat().st_size and not out.read_bytes().endswith(b"\n"):  # a call that was cut off
            file.write("\n")
        while waiting or running:
            while waiting and len(running) < run.workers and deadline - time.monotonic() > LEAST_S:
                case = waiting.pop(0)
                timeout_s = min(CASE_TIMEOUT_S, deadline - time.monotonic())
                running.add(pool.submit(_line, case, run, timeout_s))
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                running.remove(future)
                line = future.result()
                file.write(json.dumps(line) + "\n")
                file.flush()
                _report(line)
    num_failed = sum(line["measurement"] is None for line in read_lines(out))
    print(f"{num_failed} cases failed, {len(waiting)} were not begun; a later call tries them again", flush=True)
    return 1 if waiting or num_failed else 0


def _measure(workload: Workload, timeout_s: float) -> Measurement:
    from vramfit.runtime.measurement import measure

    return measure(workload, timeout_s=timeout_s)


def _line(case: Workload, run: Run, timeout_s: float) -> dict[str, Any]:
    try:
        measurement, error = to_data(run.measure(case, timeout_s)), None
    except VramfitError as failure:
        measurement, error = None, str(failure)
    return {"seed": run.seed, "workload": to_data(case), "measurement": measurement, "error": error}


def _report(line: dict[str, Any]) -> None:
    measured = line["measurement"]
    peaks = [s["peak_allocated_bytes"] >> 20 for s in measured["steps"]] if measured else line["error"]
    note = " OUT OF MEMORY" if measured and measured["out_of_memory"] else ""
    print(f"{json.dumps(short_data(line['workload']))} → MiB {peaks}{note}", flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The cases of a file, each as it was last tried; a line that was cut off is left out."""
    lines: dict[str, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        lines[_key(line["workload"])] = line
    return list(lines.values())


def short(case: Workload) -> dict[str, Any]:
    """What differs from a plain workload."""
    return short_data(to_data(case))


def short_data(data: dict[str, Any]) -> dict[str, Any]:
    plain = to_data(Workload(model=data["model"], batch=data["batch"]))
    always = ("model", "mode", "precision", "micro_batch", "seq")
    return {k: v for k, v in data.items() if k in always or v != plain[k]}


def _key(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True)


def _parse(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--workers", type=int, default=6, help="cases at a time on the one GPU")
    parser.add_argument("--max-gib", type=float, default=22.0, help="roughly the most that one case may take")
    parser.add_argument("--max-seconds", type=float, default=540.0, help="no case runs on beyond this")
    parser.add_argument("--out", type=Path, default=Path("random_cases.jsonl"), help="file the cases are added to")
    parser.add_argument("--list", action="store_true", help="show the cases that would run")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="predict the cases of a file beside them")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--quiet", action="store_true", help="with --compare: only the table")
    return parser.parse_args(None if arguments is None else list(arguments))


if __name__ == "__main__":
    sys.exit(main())
