"""Does a change of the code change an answer? Every figure of many estimates and plans, by its digest.

    python benchmarks/same_answers.py record before.jsonl      # with the code as it was
    python benchmarks/same_answers.py record after.jsonl       # with the code as it is
    python benchmarks/same_answers.py compare before.jsonl after.jsonl

Estimates of the runs that were recorded on a GPU (`tests/truth`), of random workloads (`case_space.py`) and of random
techniques; plans of the 40 cells of `planned_runs.py`. A line has a digest of all numbers of an answer, and the peaks
and settings themselves, which say what changed where digests differ. Words may change: they are not in the digest.
Cases that a file has are not computed again. Both files must be of one machine: torch and transformers decide streams.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import case_space
import planned_runs

ROOT = Path(__file__).parent.parent
ALONE = "model=deberta"
"""Functions of this family are compiled by torch.jit, which traces differently when they ran before in a process: each
of its cases has a process of its own."""
NUM_RANDOM, NUM_TECHNIQUES, SEED = 100, 80, 29
SETTINGS = (
    *("precision", "attention", "checkpointing", "freeze", "optimizer", "lora", "quantize", "offload", "compile"),
    *("fused", "graphs", "allocator", "micro_batch", "accumulate"),
)


def main(arguments: list[str] | None = None) -> int:
    """Record answers, or compare two records; 1 where any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    record_parser = verbs.add_parser("record")
    record_parser.add_argument("out", type=Path)
    record_parser.add_argument("--processes", type=int, default=os.cpu_count())
    compare_parser = verbs.add_parser("compare")
    compare_parser.add_argument("before", type=Path)
    compare_parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.verb == "compare":
        return compare(options.before, options.after)
    record(options.out, options.processes)
    return 0


def record(out: Path, processes: int) -> None:
    """Add a line for every case that the file does not have."""
    done = set(read(out)) if out.exists() else set()
    left = [case for case in cases() if case[0] not in done]
    os.environ["PYTHONHASHSEED"] = "0"
    spawn = multiprocessing.get_context("spawn")
    for alone, size in ((False, 40), (True, 1)):
        mine = [case for case in left if (ALONE in case[0]) == alone]
        with spawn.Pool(processes, maxtasksperchild=size) as pool, out.open("a", encoding="utf-8") as file:
            for line in pool.imap_unordered(answer, mine, chunksize=1):
                file.write(json.dumps(line) + "\n")
                file.flush()


def compare(before: Path, after: Path) -> int:
    """Print what differs; 1 where anything does or is missing."""
    old, new = read(before), read(after)
    missing = sorted(set(old) ^ set(new))
    different = [name for name in old if name in new and old[name] != new[name]]
    for name in missing:
        print(f"only in one file: {name}")
    for name in different:
        print(f"{name}\n  before {json.dumps(old[name])}\n  after  {json.dumps(new[name])}")
    errors = sum("error" in line for line in old.values())
    print(f"{len(old)} cases ({errors} of them refused), {len(different)} different, {len(missing)} missing")
    return 1 if different or missing else 0


def read(path: Path) -> dict[str, Any]:
    """Name of a case → its line."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line.pop("name"): line for line in lines}


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Name, verb and keywords of every case; keywords that are not given are left to the code."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for keywords in [*_recorded(), *_random(), *_techniques()]:
        found.setdefault("estimate " + _words(keywords), ("estimate", keywords))
    for cell in planned_runs.grid():
        keywords = {k: v for k, v in cell.items() if k != "name"} | {"batch": planned_runs.BATCH, "gpu": "h200"}
        found[f"plan {cell['name']}"] = ("plan", keywords | {"torch_version": "2.11.0", "offload": False})
    return [(name, *case) for name, case in found.items()]


def answer(case: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """One line: the digest of all numbers, and what a reader wants to know where it differs."""
    import torch

    import vramfit
    from vramfit.errors import NoPlanFits, VramfitError
    from vramfit.records.codec import to_data

    torch.set_num_threads(1)
    name, verb, keywords = case
    keywords = dict(keywords)
    model = keywords.pop("model")
    try:
        made = vramfit.estimate(model, **keywords) if verb == "estimate" else vramfit.plan(model, **keywords)
    except NoPlanFits as error:
        return {"name": name, "error": "NoPlanFits", "shortfall_bytes": error.shortfall_bytes}
    except VramfitError as error:
        return {"name": name, "error": type(error).__name__}
    estimate = made if verb == "estimate" else made.estimate
    numbers = json.dumps(sorted(_numbers(to_data(made))))
    line = {"name": name, "digest": hashlib.sha256(numbers.encode()).hexdigest()[:16]}
    line |= {n: getattr(estimate, n) for n in ("peak_allocated_bytes", "peak_reserved_bytes", "safe_reserved_bytes")}
    if verb == "plan":
        line["settings"] = {n: getattr(made.workload, n) for n in SETTINGS}
        line["step_time_s"] = made.step_time_s
    return line


def _numbers(data: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number with where it stands; what a workload says of itself is the question, not the answer."""
    if isinstance(data, dict):
        for name, value in data.items():
            if name not in ("workload", "schema_version"):
                yield from _numbers(value, f"{path}.{name}")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _numbers(value, f"{path}[{index}]")
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield path, data


def _words(keywords: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in keywords.items())


def _recorded() -> Iterator[dict[str, Any]]:
    """What ran on a GPU."""
    sys.path.insert(0, str(ROOT))
    from tests.truth import cases as truth

    for name in ("peaks_h200", "peaks_random_h200"):
        for recorded in truth.load(name):
            yield _given(truth.workload_of(recorded["case"]))
    for name in ("graphs_h200", "fused_h200"):
        for case in json.loads((truth.HERE / f"{name}.json").read_text())["cases"]:
            yield case["workload"] | {"gpu": "h200", "torch_version": "2.11.0"}
    for case in json.loads((truth.HERE / "ranks_h200.json").read_text()):
        job, ranks = case["job"], case["num_gpus"]
        size = {"batch": job["micro_batch"] * ranks, "num_gpus": ranks, "parallel": case["parallel"]}
        yield {k: v for k, v in job.items() if k != "micro_batch"} | size | {"loop": "stepper", "gpu": "h200"}


def _random() -> Iterator[dict[str, Any]]:
    for workload in case_space.draw_cases(SEED, NUM_RANDOM):
        yield _given(workload) | {"gpu": "h200"}


def _given(workload: Any) -> dict[str, Any]:
    """Keywords that are not as they are by themselves."""
    from dataclasses import fields

    found = {f.name: getattr(workload, f.name) for f in fields(workload)}
    defaults = {f.name: f.default for f in fields(workload)}
    if workload.accumulate is not None and workload.micro_batch is not None:
        del found["micro_batch"]
    return {name: value for name, value in found.items() if value != defaults.get(name)}


def _techniques() -> Iterator[dict[str, Any]]:
    """Techniques at random; those that do not go together are refused, which is an answer too."""
    rng = random.Random(SEED)
    models = ("bert-base-uncased", "all-MiniLM-L6-v2", "roberta-base", "modernbert-base", "distilbert-base-uncased")
    for _ in range(NUM_TECHNIQUES):
        keywords: dict[str, Any] = {
            "model": rng.choice(models),
            "batch": rng.choice((4, 12, 32)),
            "seq": rng.choice((48, 128, 300)),
            "loop": "stepper",
            "gpu": rng.choice(("h200", "t4", "a10g", "rtx-4090")),
            "precision": rng.choice(("fp32", "amp-bf16", "amp-fp16", "bf16", "tf32")),
            "optimizer": rng.choice(("adamw", "adamw-fused", "adamw-8bit", "adafactor")),
        }
        rare: dict[str, tuple[Any, ...]] = {
            "attention": ("packed", "packed", "eager"),
            "fused": (True,),
            "graphs": (True,),
            "casts": ("together",),
            "compile": (True,),
            "lora": (8, 16),
            "quantize": ("int8",),
            "offload": ("optimizer", "weights"),
            "checkpointing": ("full", 2),
            "freeze": ("embeddings", "encoder", 3),
            "micro_batch": (4,),
            "num_gpus": (2,),
            "parallel": ("fsdp", "ddp"),
            "task": ("token-classification", "masked-lm"),
        }
        for name in rng.sample(sorted(rare), rng.choice((1, 2, 3))):
            keywords[name] = rng.choice(rare[name])
        if keywords.get("fused") or keywords.get("graphs"):
            keywords |= {"attention": "packed", "precision": "amp-bf16", "optimizer": "adamw-fused", "gpu": "h200"}
        if keywords.get("attention") == "packed":
            keywords |= {"gpu": "h200", "precision": rng.choice(("amp-bf16", "bf16"))}
        yield keywords


if __name__ == "__main__":
    raise SystemExit(main())
