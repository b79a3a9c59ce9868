"""How long does a plan take? BERT-large at 512 tokens and an effective batch of 32, under several budgets.

    python benchmarks/speed_of_planning.py

Every case runs in a fresh process; time begins after imports, and nothing is kept from one case to the next. Absolute
times belong to this machine; the limit is for one with two cores.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

MODEL, SEQ, BATCH = "bert-large-uncased", 512, 32
_draw = Random(0)
LENGTHS = [min(max(round(_draw.lognormvariate(5.2, 0.8)), 8), SEQ) for _ in range(500)]
"""Of samples: a median of about 185 tokens, as reviews have."""
CASES: dict[str, dict[str, Any]] = {
    "t4": {"gpu": "t4"},
    "h200": {"gpu": "h200"},
    "h200 capped at 16 GiB": {"gpu": "h200", "memory": "16GiB"},
    "h200 capped at 8 GiB": {"gpu": "h200", "memory": "8GiB"},
    "h200 capped at 4 GiB": {"gpu": "h200", "memory": "4GiB", "torch_version": "2.11"},
    "t4, lengths that vary": {"gpu": "t4", "lengths": LENGTHS},
    "t4, lengths that vary, 10,000 steps": {"gpu": "t4", "lengths": LENGTHS, "steps": 10_000},
    "t4 capped at 600 MiB": {"gpu": "t4", "memory": "600MiB"},
    "t4 capped at 250 MiB (nothing fits)": {"gpu": "t4", "memory": "250MiB"},
}
LIMIT_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Run every case; 0 when all stay below the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(time_case(json.loads(options.child))))
        return 0
    rows = []
    for name, keywords in CASES.items():
        if options.only in name:
            runs = [_run(keywords) for _ in range(options.repeats)]
            seconds = median(run["plan_s"] for run in runs)
            rows.append({"case": name, **runs[0], "plan_s": seconds})
            print(f"{name:<38} {seconds:6.2f} s  {runs[0]['answer']}", flush=True)
    path = options.results / f"speed_of_planning_{datetime.now(UTC).date().isoformat()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"machine": platform.machine(), "num_cores": os.cpu_count(), "torch": version("torch"), "model": MODEL}
    path.write_text(json.dumps({**head, "seq": SEQ, "batch": BATCH, "cases": rows}, indent=1) + "\n")
    print(f"wrote {path}")
    return 0 if all(row["plan_s"] <= LIMIT_S for row in rows) else 1


def time_case(keywords: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one plan, after imports."""
    import vramfit.planner.plan as planner
    from vramfit.errors import NoPlanFits
    from vramfit.models.build import build_meta
    from vramfit.models.resolve import resolve

    build_meta(resolve("bert-tiny"))  # transformers imports a model's code at its first use
    began = time.perf_counter()
    try:
        made = planner.plan(MODEL, seq=SEQ, batch=BATCH, **keywords)
        w = made.workload
        answer = (
            f"{w.precision}, {w.optimizer}, checkpointing {w.checkpointing}, {made.micro_batch} × {made.accumulate}"
        )
        fits, num_predicted = True, made.num_predicted
    except NoPlanFits as error:
        answer, fits, num_predicted = f"nothing fits; {error.hint}", False, 0
    return {
        "plan_s": time.perf_counter() - began,
        "answer": answer,
        "fits": fits,
        "num_predicted": num_predicted,
    }


def _run(keywords: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(keywords)]
    forgetful = {**os.environ, "VRAMFIT_CACHE": "off"}  # a remembered plan would be an answer about the disk
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=forgetful)
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


if __name__ == "__main__":
    sys.exit(main())
