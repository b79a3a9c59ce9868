"""Memory that runs out on one rank of two, at many points: do all recover together, and end with the same weights?

    python scripts/ranks_out_of_memory.py --points 50
    python scripts/ranks_out_of_memory.py --points 50 --out benchmarks/results/ranks_out_of_memory_cpu_DATE.json

Points are spread over forward and backward passes, what comes between collectives, and the optimizer's step; the ranks
take turns. At each, memory runs out once, or three times in a row, which makes all ranks shrink. At some, it is gone
for good: then all must stop, with one message. Every case has 60 s; a world that hangs is ended and counted.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.unit.runtime.distributed import work
from tests.unit.runtime.distributed.launch import Ended, run_ranks

SIZES = (12, 12, 5)
MAX_DIFFERENCE = 1e-6
CASE_S = 60.0
AT_ONCE = 10
NUM_IN_PART = 3
"""Points in each part of the step at the least."""
NUM_FOR_GOOD = 4
"""Points for each way of sharing at which memory is gone for good."""
FOR_GOOD = 100_000
EXHAUSTED = "RecoveryExhausted: one sample of 16 tokens does not fit"
OPTIMIZER_PARTS = ("optimizer step",)
"""What runs out in a step is done again in smaller portions: others need not know."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50, help="for each of ddp and fsdp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="results as JSON")
    options = parser.parse_args()
    start = time.monotonic()
    right = values(run_ranks(work.train_all, 1, [(None, {"sizes": SIZES})]))[0][0]
    rows: list[dict[str, Any]] = []
    for parallel in ("ddp", "fsdp"):
        rows += sweep(parallel, options.points, options.seed, right)
    bad = [row for row in rows if row["problem"]]
    print(f"{len(rows)} points, {len(bad)} bad")
    if options.out is not None:
        options.out.write_text(json.dumps(_head(rows, time.monotonic() - start) | {"rows": rows}, indent=1) + "\n")
    return 1 if bad else 0


def sweep(parallel: str, num_points: int, seed: int, right: dict[str, Any]) -> list[dict[str, Any]]:
    """What happened at each point; `problem` is empty where it was right."""
    whole = {"sizes": SIZES, "counts_operators": True}
    parts = [made[0]["parts"] for made in values(run_ranks(work.train_all, 2, [(parallel, whole)]))]
    points = _spread(min(parts, key=len), num_points, random.Random(seed))
    rows = []
    for start in range(0, num_points, AT_ONCE):
        group = list(enumerate(points[start : start + AT_ONCE], start))
        rows += _recoveries(parallel, [_injected(number, at) for number, at in group], right)
    for number, at in enumerate(points[:: max(num_points // NUM_FOR_GOOD, 1)][:NUM_FOR_GOOD]):
        rows.append(_ending(parallel, number % 2, at))
    return rows


def _spread(parts: list[str], num_points: int, draw: random.Random) -> list[int]:
    """Operators by number, some in every part of the step; the rest anywhere."""
    chosen: set[int] = set()
    for part in sorted(set(parts)):
        there = [number for number, one in enumerate(parts, 1) if one == part]
        chosen.update(draw.sample(there, min(len(there), NUM_IN_PART)))
    others = [number for number in range(1, len(parts) + 1) if number not in chosen]
    return sorted([*chosen, *draw.sample(others, max(num_points - len(chosen), 0))])[:num_points]


def _injected(number: int, at: int) -> tuple[int, tuple[int, ...]]:
    """The rank, and the operators at which it runs out."""
    return number % 2, (at,) if number // 2 % 2 else (at, at + 40, at + 80)


def _recoveries(
    parallel: str, points: list[tuple[int, tuple[int, ...]]], right: dict[str, Any]
) -> list[dict[str, Any]]:
    """Several points in one world; where that hangs or fails, each in a world of its own, to see which."""
    cases = [(parallel, {"sizes": SIZES, "fail_at": {rank: at}}) for rank, at in points]
    try:
        first, second = values(run_ranks(work.train_all, 2, cases, timeout_s=CASE_S * len(cases)))
    except (TimeoutError, SystemExit) as error:
        if len(points) > 1:
            return [row for point in points for row in _recoveries(parallel, [point], right)]
        rank, at = points[0]
        print(f"{parallel:4}  rank {rank} at {at!s:18}: {error}", flush=True)
        return [{"parallel": parallel, "rank": rank, "operators": at, "problem": str(error)}]
    rows = [
        _row(parallel, rank, at, ours, theirs, right)
        for (rank, at), ours, theirs in zip(points, first, second, strict=True)
    ]
    for row in rows:
        print(
            f"{parallel:4}  rank {row['rank']} at {row['operators']!s:18} {row['parts']}: recovered "
            f"{row['num_recoveries']} times, micro-batch {row['micro_batch']}, {row['difference']:.1e} from one "
            f"process {row['problem']}",
            flush=True,
        )
    return rows


def _row(
    parallel: str, rank: int, at: tuple[int, ...], ours: dict[str, Any], theirs: dict[str, Any], right: dict[str, Any]
) -> dict[str, Any]:
    away = max(work.distance(made["weights"], right["weights"]) for made in (ours, theirs))
    places = (ours, theirs)[rank]["places"]
    return {
        "parallel": parallel,
        "rank": rank,
        "operators": at,
        "parts": [part for part, _ in places],
        "names": [name for _, name in places],
        "num_recoveries": ours["num_recoveries"],
        "micro_batch": ours["micro_batch"],
        "difference": away,
        "problem": _problem(ours, theirs, away, places),
    }


def _problem(ours: dict[str, Any], theirs: dict[str, Any], away: float, places: list[tuple[str, str]]) -> str:
    if ours["num_recoveries"] != theirs["num_recoveries"] or ours["micro_batch"] != theirs["micro_batch"]:
        return "not together"
    if not places:
        return "nothing ran out"
    if ours["num_recoveries"] == 0 and any(part not in OPTIMIZER_PARTS for part, _ in places):
        return "nobody noticed"
    return "" if away <= MAX_DIFFERENCE else "other weights"


def _ending(parallel: str, rank: int, at: int) -> dict[str, Any]:
    """Memory is gone for good from a point on: how the ranks end."""
    start = time.monotonic()
    keywords = {"sizes": SIZES, "fail_at": {rank: range(at, FOR_GOOD)}, "micro_batch": 1}
    try:
        ended = run_ranks(work.train, 2, parallel, timeout_s=CASE_S, **keywords)
        messages = [one.error.splitlines()[0] if one.error else "ended well" for one in ended]
    except TimeoutError as error:
        messages = [str(error)]
    well = len(messages) == 2 and all(message.startswith(EXHAUSTED) for message in messages)
    print(f"{parallel:4}  rank {rank} from {at} on, for good: {messages}", flush=True)
    return {
        "parallel": parallel,
        "rank": rank,
        "from_operator": at,
        "messages": messages,
        "seconds": round(time.monotonic() - start, 1),
        "problem": "" if well else "not all stopped with one message",
    }


def _head(rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    import torch
    import transformers

    recovered = [row for row in rows if "parts" in row]
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": "cpu",
        "num_ranks": 2,
        "seconds": round(seconds, 1),
        "num_points": len(recovered),
        "num_points_for_good": len(rows) - len(recovered),
        "num_bad": sum(bool(row["problem"]) for row in rows),
        "worst_difference": max((row["difference"] for row in recovered), default=None),
        "failures_by_part": {
            parallel: dict(Counter(part for row in recovered if row["parallel"] == parallel for part in row["parts"]))
            for parallel in ("ddp", "fsdp")
        },
    }


def values(ended: list[Ended]) -> list[Any]:
    """What every rank gave."""
    for one in ended:
        if one.value is None:
            raise SystemExit(one.trace or f"exit {one.exit_code}")
    return [one.value for one in ended]


if __name__ == "__main__":
    sys.exit(main())
