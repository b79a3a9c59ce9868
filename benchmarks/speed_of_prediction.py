"""How fast is a prediction? BERT-large training, beside PyTorch's own MemTracker on the same case.

    python benchmarks/speed_of_prediction.py

Every part runs in fresh processes; time begins after imports. MemTracker follows the model's tensors under
FakeTensorMode, its quickest way that needs no GPU, through two steps: the first has no optimizer state yet, and a
prediction covers both too. Absolute times belong to this machine; the ratio is what is kept.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

MODEL, SEQ, BATCH, OTHER_BATCH = "bert-large-uncased", 512, 8, 13
KEYWORDS: dict[str, Any] = {"mode": "train", "seq": SEQ, "mask": "ones", "gpu": "h200", "torch_version": "2.11"}
LIMITS = {"estimate_s": 1.5, "other_batch_s": 0.1, "max_batch_s": 3.0, "peak_rss_bytes": 2**30, "ratio": 15.0}
"""What is asked of a machine with two cores."""


def time_estimate() -> dict[str, Any]:
    """An estimate, and then another batch of the same workload."""
    predict = _import("vramfit.estimator.predict")
    began = time.perf_counter()
    first = predict.estimate(MODEL, batch=BATCH, **KEYWORDS)
    estimate_s = time.perf_counter() - began
    began = time.perf_counter()
    predict.estimate(MODEL, batch=OTHER_BATCH, **KEYWORDS)
    return {
        "estimate_s": estimate_s,
        "other_batch_s": time.perf_counter() - began,
        "peak_allocated_bytes": first.peak_allocated_bytes,
    }


def time_max_batch() -> dict[str, Any]:
    """The largest batch of the same workload, from nothing."""
    search = _import("vramfit.estimator.search")
    began = time.perf_counter()
    found = search.max_batch(MODEL, **KEYWORDS)
    return {"max_batch_s": time.perf_counter() - began, "batch": found.batch}


def time_mem_tracker() -> dict[str, Any]:
    """Two training steps under MemTracker, the model's building included as in an estimate."""
    from peer_predictions import track

    _import("vramfit.estimator.predict")
    from vramfit.workload import Workload

    peak_bytes, steps_s = track(Workload(model=MODEL, batch=BATCH, attention="sdpa", **KEYWORDS), MODEL)
    return {"one_step_s": steps_s[0], "two_steps_s": steps_s[1], "peak_bytes": peak_bytes}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "estimate": time_estimate,
    "max_batch": time_max_batch,
    "mem_tracker": time_mem_tracker,
}


def _import(name: str) -> Any:
    """The module, and what it would import on its first use: that is no part of a prediction."""
    for needed in ("torch", "transformers", "transformers.models.bert.modeling_bert"):
        import_module(needed)
    return import_module(name)


def run_part(name: str) -> dict[str, Any]:
    """One part in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--part", name],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(name, json.dumps(result), flush=True)
    return result


def measure_all(num_repeats: int) -> dict[str, Any]:
    """All parts; each prediction's median over several processes, MemTracker once."""
    runs = {name: [run_part(name) for _ in range(num_repeats)] for name in ("estimate", "max_batch")}
    tracked = run_part("mem_tracker")
    estimates, searches = runs["estimate"], runs["max_batch"]
    figures = {
        "estimate_s": median(r["estimate_s"] for r in estimates),
        "other_batch_s": median(r["other_batch_s"] for r in estimates),
        "max_batch_s": median(r["max_batch_s"] for r in searches),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in (*estimates, *searches)),
        "mem_tracker_one_step_s": tracked["one_step_s"],
        "mem_tracker_two_steps_s": tracked["two_steps_s"],
    }
    figures["ratio"] = figures["mem_tracker_two_steps_s"] / figures["estimate_s"]
    figures["ratio_one_step"] = figures["mem_tracker_one_step_s"] / figures["estimate_s"]
    return {"figures": figures, "runs": runs | {"mem_tracker": [tracked]}}


def save(measured: dict[str, Any], folder: Path) -> Path:
    date = datetime.now(UTC).date().isoformat()
    content = {
        "question": "speed_of_prediction",
        "date": date,
        "case": {"model": MODEL, "batch": BATCH, "other_batch": OTHER_BATCH, **KEYWORDS},
        "machine": {"num_cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "limits": LIMITS,
        **measured,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"speed_of_prediction_{date}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), help="time one part in this process")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each prediction")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.part:
        warnings.simplefilter("ignore")
        result = PARTS[options.part]()
        peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(result | {"peak_rss_bytes": peak_rss_bytes}))
        return 0
    measured = measure_all(options.repeats)
    for name, value in measured["figures"].items():
        limit = f"   asked: {LIMITS[name]}" if name in LIMITS else ""
        print(f"{name:26} {value:,.3f}{limit}")
    print(f"wrote {save(measured, options.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
