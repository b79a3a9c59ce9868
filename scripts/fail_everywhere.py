"""Out of memory at every single allocation of five training steps; what the run leaves is compared with a clean one.

For each kind of training: a failure at every allocation (the micro-batch stays: bit-equal), and two in a row (it
shrinks: the difference is reported). Run from the repository: python scripts/fail_everywhere.py
"""

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.runtime.failures import KINDS, MAX_DIFFERENCE, train


def main() -> int:
    """Go through kinds and points; 1 where any run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="every n-th allocation only")
    parser.add_argument("--shrink-stride", type=int, default=7, help="the same for two failures in a row")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    options = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: threads only wait for each other
    train(KINDS["plain"])
    gc.collect()
    gc.freeze()  # recovery collects garbage; there is no need to walk all of transformers each time
    wrong = 0
    for name in options.kinds.split(","):
        wrong += _kind(name, options.stride, options.shrink_stride)
    return 1 if wrong else 0


def _kind(name: str, stride: int, shrink_stride: int) -> int:
    kind = KINDS[name]
    clean = train(kind)
    last = clean.last_allocations[-1]
    started = time.perf_counter()
    points = range(1, last + 1, stride)
    single = [train(kind, [n]) for n in points]
    unequal = [n for n, run in zip(points, single, strict=True) if not run.equals(clean)]
    in_step = sum(run.num_recoveries == 0 for run in single)
    without = replace(kind, changes={})  # dropout draws otherwise for other micro-batches
    whole = train(without)
    pairs = (train(without, [n, n + 1]) for n in range(1, whole.last_allocations[-1] + 1, shrink_stride))
    shrunk = [run for run in pairs if run.micro_batch < whole.micro_batch]
    far = max((max(run.distance(whole)) for run in shrunk), default=0.0)
    print(
        f"{name:20} {len(points):5} points: {len(points) - len(unequal)} bit-equal ({in_step} of them recovered inside "
        f"the optimizer's step); two in a row, no dropout: {len(shrunk)} shrank, largest difference {far:.1e}; "
        f"{time.perf_counter() - started:.0f} s",
        flush=True,
    )
    if unequal:
        print(f"  not equal after a failure at {unequal[:10]}")
    apart = max(train(without, micro_batch=3).distance(whole))
    print(f"  two clean runs, in micro-batches of 6 and of 3, differ by {apart:.1e}")
    return len(unequal) + (far > max(MAX_DIFFERENCE, 2 * apart))


if __name__ == "__main__":
    sys.exit(main())
