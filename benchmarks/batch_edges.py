"""Where does a batch stop fitting, really? Batches around the predicted edge, each run in a fresh process.

On a machine with a GPU:     python benchmarks/batch_edges.py --out edges.jsonl
On any machine, afterwards:  python benchmarks/batch_edges.py --compare edges.jsonl

Every batch is run twice: cold, where the first matrix product of the process is the workload's, and warm, where
cuBLAS was used before the model came to the GPU. Its workspaces lie elsewhere then, and that moves the edge.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GIB = 2**30
CASES: list[dict[str, Any]] = [
    {
        "keywords": {"model": "bert-base-uncased", "mode": "train", "seq": 256, "mask": "ones", "memory": 16 * GIB},
        "batches": [92, 94, 95, 96, 97],
    },
    {
        "keywords": {
            "model": "bert-large-uncased",
            "mode": "infer",
            "seq": 512,
            "attention": "eager",
            "mask": "none",
            "memory": int(11.17 * GIB),
        },
        "batches": [220, 221, 225, 229, 230],
    },
    {
        "keywords": {"model": "distilbert-base-uncased", "seq": 256, "mask": "ones", "memory": 8 * GIB},
        "batches": [88, 89, 90, 91],
    },
    {
        "keywords": {
            "model": "bert-base-uncased",
            "seq": 512,
            "precision": "amp-bf16",
            "mask": "padded",
            "memory": int(11.17 * GIB),
        },
        "batches": [45, 46, 47, 48, 49],
    },
    {
        "keywords": {
            "model": "bert-base-uncased",
            "seq": 512,
            "precision": "amp-bf16",
            "mask": "ones",
            "checkpointing": "full",
            "memory": int(11.17 * GIB),
        },
        "batches": [229, 230, 231, 233, 234, 235],
    },
    {
        "keywords": {
            "model": "roberta-large",
            "seq": 200,
            "precision": "amp-fp16",
            "optimizer": "adamw-fused",
            "memory": 10 * GIB,
        },
        "batches": [],
    },
]
"""Batches are those around which a search on the GPU and a fresh process disagreed; none: the predicted edge."""


def child() -> None:
    """Run one workload under its cap; the last line says how it went."""
    import torch

    from vramfit.records.codec import from_data
    from vramfit.runtime.measurement import run_workload
    from vramfit.workload import Workload

    task = json.loads(sys.stdin.read())
    if task["warm"]:
        _warm_up(torch)
    result = run_workload(from_data(Workload, task["workload"]), num_steps=3)
    print(json.dumps({"ran": result.out_of_memory is None, "num_retries": result.num_retries}))


def _warm_up(torch: Any) -> None:
    """One product with a bias, forward and backward: both threads get their cuBLAS workspaces."""
    layer = torch.nn.Linear(8, 8).cuda()
    layer(torch.ones(8, 8, device="cuda")).sum().backward()


def measure(case: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child"], input=json.dumps(case), capture_output=True, text=True, check=False
    )
    try:
        return case | json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return case | {"error": done.stderr[-400:]}


def draw() -> list[dict[str, Any]]:
    from vramfit.estimator.search import max_batch
    from vramfit.records.codec import to_data
    from vramfit.workload import Workload

    cases = []
    for entry in CASES:
        keywords = {"gpu": "h200", "torch_version": "2.11"} | entry["keywords"]
        batches = entry["batches"]
        if not batches:
            edge = max_batch(keywords["model"], **{k: v for k, v in keywords.items() if k != "model"}).batch
            batches = list(range(edge - 2, edge + 3))
        cases += [
            {"workload": to_data(Workload(**keywords, batch=batch)), "warm": warm}
            for batch in batches
            for warm in (False, True)
        ]
    return cases


def predict(case: dict[str, Any]) -> tuple[bool, bool]:
    """Whether it runs where segments most likely lie, and whether it runs wherever they lie."""
    from vramfit.allocator.replay import PLACEMENTS, replay
    from vramfit.estimator.peaks import marks_of, warm_stream
    from vramfit.estimator.resolve import resolve_workload

    keywords = {k: v for k, v in case["workload"].items() if k != "model"}
    keywords |= {"gpu": "h200", "torch_version": "2.11"}
    traced, target = resolve_workload(case["workload"]["model"], keywords)
    stream = traced.stream(case["workload"]["micro_batch"])
    stream = warm_stream(stream) if case["warm"] else stream
    fits = [
        replay(stream.events, marks_of(stream), capacity_bytes=target.capacity_bytes, placement=make()).out_of_memory
        is None
        for make in PLACEMENTS
    ]
    return fits[0], all(fits)


def compare(lines: list[dict[str, Any]]) -> dict[str, Any]:
    rows = []
    for case in lines:
        if "error" in case:
            print("not run", case)
            continue
        likely, sure = predict(case)
        w = case["workload"]
        row = {"model": w["model"], "mode": w["mode"], "seq": w["seq"], "batch": w["batch"], "warm": case["warm"]}
        rows.append(row | {"ran": case["ran"], "likely": likely, "sure": sure, "num_retries": case["num_retries"]})
        print("=" if likely == case["ran"] else "≠", json.dumps(rows[-1]))
    summary = {
        "num_cases": len(rows),
        "num_agree": sum(r["likely"] == r["ran"] for r in rows),
        "num_unsafe": sum(r["sure"] and not r["ran"] for r in rows),
    }
    print(summary)
    return {"question": "batch_edges", "date": time.strftime("%Y-%m-%d"), "summary": summary, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        child()
    elif options.compare:
        result = compare([json.loads(line) for line in options.compare.read_text().splitlines()])
        if options.results:
            options.results.write_text(json.dumps(result, indent=1) + "\n")
    else:
        with ThreadPoolExecutor(options.workers) as pool, options.out.open("w") as file:
            for line in pool.map(measure, draw()):
                file.write(json.dumps(line) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
