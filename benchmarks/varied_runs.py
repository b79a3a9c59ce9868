"""Does "at most" hold where lengths vary? Plans drawn at random, each run on lengths like those it was planned for.

    python benchmarks/varied_runs.py --plans-only plans.json      # on any machine: draws jobs and plans them
    python benchmarks/varied_runs.py --plans plans.json           # on a GPU: runs them

A plan runs in a process of its own with `Stepper(plan=plan)`: windows of samples whose lengths are drawn as the plan's
were, the longest ones together in one window in ten. Written down are the reserved and allocated peaks beside what the
plan says, retries of the allocator, and recoveries. One line of JSON a plan is added to the results; plans that are
there are not run again.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import capped_run
import forked

GIB = 2**30
MODELS = (
    "bert-base-uncased",
    "bert-large-uncased",
    "roberta-base",
    "xlm-roberta-base",
    "distilbert-base-uncased",
    "electra-base-discriminator",
    "all-MiniLM-L6-v2",
    "modernbert-base",
)
TASKS = ("sequence-classification", "token-classification", "question-answering")
BATCHES = (8, 16, 32, 64)
LONGEST = (96, 128, 300, 512)
MEMORIES = (1.5, 3.0, 5.0, 8.0, 11.17, 24.0, 64.0)
PRECISIONS = (None, None, None, "tf32", "fp32")
NUM_LENGTHS = 400
NUM_WINDOWS = 60
CASE_TIMEOUT_S = 120


def main(arguments: list[str] | None = None) -> int:
    """Make plans, or run them; 0 when no run reserved more than its plan says."""
    options = _parse(arguments)
    if options.plans_only:
        make_plans(options.seed, options.count, options.plans_only)
        return 0
    plans = json.loads(options.plans.read_text())
    done = {line["name"] for line in forked.read_lines(options.out, "name") if "error" not in line}
    deadline = time.monotonic() + options.limit_s
    forked.import_all()
    cases = [(entry,) for name, entry in plans.items() if name not in done]
    for (entry,), outcome in forked.in_children(
        run_case, cases, num_processes=options.workers, timeout_s=CASE_TIMEOUT_S
    ):
        line = {"name": entry["name"], "job": entry["job"], **outcome}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(_short(line), flush=True)
        if time.monotonic() > deadline:
            break
    return summarise(forked.read_lines(options.out, "name"))


def draw_lengths(draw: random.Random, longest: int, count: int) -> list[int]:
    """Log-normal, as the lengths of texts are, cut at the longest."""
    return [max(8, min(longest, round(draw.lognormvariate(0.0, 0.7) * longest / 3))) for _ in range(count)]


def make_plans(seed: int, count: int, path: Path) -> None:
    """Draw jobs until so many have a plan; written as they are made."""
    from vramfit.errors import VramfitError
    from vramfit.planner.plan import plan
    from vramfit.records.codec import to_data

    draw, made = random.Random(seed), {}
    while len(made) < count:
        job: dict[str, Any] = {
            "model": draw.choice(MODELS),
            "task": draw.choice(TASKS),
            "batch": draw.choice(BATCHES),
            "memory": int(draw.choice(MEMORIES) * GIB),
            "precision": draw.choice(PRECISIONS),
            "steps": draw.choice((20, 20_000)),
        }
        longest, lengths_seed = draw.choice(LONGEST), draw.randrange(1000)
        lengths = draw_lengths(random.Random(lengths_seed), longest, NUM_LENGTHS)
        keywords = {"gpu": "h200", "torch_version": "2.11.0", "max_grad_norm": 1.0, "compile": False, "offload": False}
        try:
            found = plan(lengths=[*lengths, longest], **job, **keywords)
        except VramfitError as error:
            print(f"no plan: {job}: {str(error)[:80]}", flush=True)
            continue
        name = f"{seed}-{len(made)}"
        job |= {"longest": longest, "lengths_seed": lengths_seed}
        made[name] = {"name": name, "job": job, "plan": to_data(found)}
        path.write_text(json.dumps(made) + "\n")
        print(f"{name} {job} {found.workload.attention} graphs {found.workload.graphs}", flush=True)


def run_case(entry: dict[str, Any]) -> dict[str, Any]:
    """Windows of varied lengths under the plan, in this process."""
    import torch

    from vramfit.records.codec import from_data
    from vramfit.records.plan import Plan
    from vramfit.runtime.stepper import Stepper
    from vramfit.techniques import optimizers

    plan, job = from_data(Plan, entry["plan"]), entry["job"]
    w = plan.workload
    model = capped_run.make_model(w).cuda()
    optimizer = optimizers.make(w.optimizer, model.parameters())
    stepper = Stepper(model, optimizer, plan=plan, memory=plan.limit_bytes)  # as `vramfit train` has it
    draw = random.Random(job["lengths_seed"] + 1)
    lengths = [*draw_lengths(random.Random(job["lengths_seed"]), job["longest"], NUM_LENGTHS), job["longest"]]
    for index in range(NUM_WINDOWS):
        is_long = index % 10 == 9
        chosen = sorted(lengths)[-w.batch :] if is_long else draw.choices(lengths, k=w.batch)
        stepper.step(varied_batch(chosen, index, w.task))
    stats = torch.cuda.memory_stats()
    return {
        "settings": f"{w.precision}, {w.attention}, {w.optimizer}, {w.micro_batch} × {w.accumulate}",
        "graphs": w.graphs,
        "fused": w.fused,
        "budget_bytes": plan.budget_bytes,
        "predicted_allocated_bytes": plan.estimate.peak_allocated_bytes,
        "predicted_reserved_bytes": plan.estimate.safe_reserved_bytes,
        "most_reserved_bytes": plan.most_reserved_bytes,
        "num_recoveries": stepper.num_recoveries,
        "num_alloc_retries": stats["num_alloc_retries"],
        **capped_run.peaks("training"),
    }


def varied_batch(lengths: list[int], seed: int, task: str) -> dict[str, Any]:
    """Samples of these lengths, padded to the longest."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    size, seq = len(lengths), max(lengths)
    mask = (torch.arange(seq) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1000, 30000, (size, seq), generator=draw) * mask + (1 - mask)
    made: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if task == "question-answering":
        ends = {"start_positions": torch.ones(size, dtype=torch.long), "end_positions": torch.full((size,), 3)}
        return made | ends
    labels = torch.randint(0, 2, (size,) if task == "sequence-classification" else (size, seq), generator=draw)
    return made | {"labels": labels if labels.dim() == 1 else torch.where(mask.bool(), labels, -100)}


def _short(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"{line['name']} {line['error'][-300:]}"
    used, said, most = (
        line[k] / 2**20 for k in ("training_reserved_bytes", "predicted_reserved_bytes", "most_reserved_bytes")
    )
    allocated = line["training_allocated_bytes"] / line["predicted_allocated_bytes"] - 1
    return (
        f"{line['name']} {line['job']['model']} {line['settings']} graphs {line['graphs']}: reserved {used:.0f} MiB, "
        f"predicted {said:.0f} ({used - said:+.0f}, {used / said - 1:+.1%}), at most {most:.0f}; allocated "
        f"{allocated:+.2%}; {line['num_recoveries']} recoveries, {line['num_alloc_retries']} retries"
    )


def summarise(lines: list[dict[str, Any]]) -> int:
    """Say how many runs stayed inside what their plans say; 1 if one did not."""
    ran = [line for line in lines if "error" not in line]
    above = [line for line in ran if line["training_reserved_bytes"] > line["most_reserved_bytes"]]
    beyond = [line for line in ran if line["training_reserved_bytes"] > line["predicted_reserved_bytes"]]
    print(
        f"{len(ran)} of {len(lines)} ran; {len(beyond)} reserved more than predicted for full windows, "
        f"{len(above)} more than their plans' at most"
    )
    return 1 if above or len(ran) < len(lines) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--plans-only", type=Path, metavar="FILE", help="make the plans, run nothing")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="plans that were made before")
    parser.add_argument("--workers", type=int, default=4, help="plans at a time on the one GPU")
    parser.add_argument("--limit-s", type=float, default=480.0)
    parser.add_argument("--out", type=Path, default=Path("varied_runs.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
