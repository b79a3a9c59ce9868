"""Memory that runs out on one rank of two, at many points: do all recover together, and end with the same weights?

    python scripts/ranks_out_of_memory.py --points 50

Points are spread over forward and backward passes, what comes between collectives, and the optimizer's step; at each,
memory runs out once, and three times in a row, which makes all ranks shrink. Every world has 60 s for each case.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.unit.runtime.distributed import work
from tests.unit.runtime.distributed.launch import Ended, run_ranks

SIZES = (12, 12, 5)
MAX_DIFFERENCE = 1e-6
CASE_S = 60.0
AT_ONCE = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50, help="for each of ddp and fsdp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    right = values(run_ranks(work.train_all, 1, [(None, {"sizes": SIZES})]))[0][0]
    num_bad = sum(sweep(parallel, options.points, options.seed, right) for parallel in ("ddp", "fsdp"))
    print(f"{2 * options.points} points, {num_bad} bad")
    return 1 if num_bad else 0


def sweep(parallel: str, num_points: int, seed: int, right: dict[str, Any]) -> int:
    """How many points go wrong."""
    whole = {"sizes": SIZES, "counts_operators": True}
    last = values(run_ranks(work.train_all, 2, [(parallel, whole)]))[1][0]["num_operators"]
    points = sorted(random.Random(seed).sample(range(1, last + 1), num_points))
    cases = [
        (parallel, {"sizes": SIZES, "fail_at": {1: (at,) if i % 2 else (at, at + 40, at + 80)}})
        for i, at in enumerate(points)
    ]
    num_bad = 0
    for start in range(0, num_points, AT_ONCE):
        group = cases[start : start + AT_ONCE]
        first, second = values(run_ranks(work.train_all, 2, group, timeout_s=CASE_S * len(group)))
        for (_, keywords), ours, theirs in zip(group, first, second, strict=True):
            away = max(work.distance(made["weights"], right["weights"]) for made in (ours, theirs))
            together = ours["num_recoveries"] == theirs["num_recoveries"]
            num_bad += not together or away > MAX_DIFFERENCE
            print(
                f"{parallel:4}  at {keywords['fail_at'][1]!s:20} recovered {ours['num_recoveries']} times, micro-batch "
                f"{ours['micro_batch']}, {away:.1e} from one process"
            )
    return num_bad


def values(ended: list[Ended]) -> list[Any]:
    """What every rank gave."""
    for one in ended:
        if one.value is None:
            raise SystemExit(one.trace or f"exit {one.exit_code}")
    return [one.value for one in ended]


if __name__ == "__main__":
    sys.exit(main())
