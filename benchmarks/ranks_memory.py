"""What does one rank of a world take? DDP and FSDP2 at world sizes 2, 4 and 8, on one GPU, beside the prediction.

PyTorch's `fake` process group stands for the other ranks: this process is rank 0, every collective returns at once, and
what the rank allocates is what it would allocate among real ones, but for the buffers that NCCL takes from the driver.

On a machine with a GPU:     python benchmarks/ranks_memory.py --out ranks.jsonl
On any machine, afterwards:  python benchmarks/ranks_memory.py --compare ranks.jsonl
Without a GPU, as a check:   python benchmarks/ranks_memory.py --device cpu --quick --out /tmp/ranks.jsonl

Each case runs in a process of its own. One line of JSON a case is appended as it ends; a later call goes on where an
earlier one stopped, and tries again what failed. About four minutes on an H200.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forked import head, import_all, in_child, read_lines

CASE_TIMEOUT_S = 90.0
NUM_STEPS = 3
WORLDS = (2, 4, 8)
PARALLELS = ("ddp", "fsdp")
JOBS: tuple[dict[str, Any], ...] = (
    {"model": "bert-base-uncased", "micro_batch": 16, "seq": 128, "precision": "fp32", "optimizer": "adamw-fused"},
    {"model": "bert-base-uncased", "micro_batch": 16, "seq": 256, "precision": "amp-bf16", "optimizer": "adamw-fused"},
    {"model": "bert-base-uncased", "micro_batch": 8, "seq": 128, "precision": "amp-bf16", "optimizer": "adamw"},
    {
        "model": "bert-large-uncased",
        "micro_batch": 8,
        "seq": 256,
        "precision": "amp-bf16",
        "optimizer": "adamw-fused",
        "accumulate": 2,
        "checkpointing": "full",
    },
    {
        "model": "distilbert-base-uncased",
        "micro_batch": 32,
        "seq": 64,
        "precision": "fp32",
        "optimizer": "adamw-fused",
        "accumulate": 3,
        "max_grad_norm": 1.0,
    },
    {
        "model": "roberta-base",
        "task": "masked-lm",
        "micro_batch": 8,
        "seq": 128,
        "precision": "amp-bf16",
        "optimizer": "adamw-fused",
        "max_grad_norm": 1.0,
    },
)
"""`micro_batch` and `accumulate` are of one rank."""
KEY = ("job", "parallel", "num_gpus")


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.compare is not None:
        return compare(read_lines(options.compare, *KEY), options.results)
    import_all()
    return measure_all(options)


def cases(*, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Every job in every world."""
    for parallel in PARALLELS:
        for num_gpus in WORLDS[:1] if quick else WORLDS:
            for job in JOBS[2:3] if quick else JOBS:
                changed = job | ({"model": "bert-tiny", "seq": 32} if quick else {})
                yield {"job": json.dumps(changed, sort_keys=True), "parallel": parallel, "num_gpus": num_gpus}


def measure_all(options: argparse.Namespace) -> int:
    """Run what the file does not hold yet; 0 when all of it is measured, else 1."""
    deadline = time.monotonic() + options.max_seconds
    done = {tuple(line[k] for k in KEY) for line in read_lines(options.out, *KEY) if "error" not in line}
    waiting = [case for case in cases(quick=options.quick) if tuple(case[k] for k in KEY) not in done]
    print(f"{len(waiting)} cases to run, {len(done)} done before", flush=True)
    num_failed = 0
    with options.out.open("a", encoding="utf-8") as file:
        for case in waiting:
            if time.monotonic() > deadline - CASE_TIMEOUT_S / 3:
                print("no time left: a later call goes on", flush=True)
                return 1
            found = in_child(measure, case, options.device, timeout_s=CASE_TIMEOUT_S)
            file.write(json.dumps({**case, **found}) + "\n")
            file.flush()
            num_failed += "error" in found
            shown = found.get("error") or {k: v["allocated"] >> 20 for k, v in found["phases"].items()}
            print(f"{case['parallel']} × {case['num_gpus']} {case['job']} → MiB {shown}", flush=True)
    return 1 if num_failed else 0


def measure(case: dict[str, Any], device_name: str) -> dict[str, Any]:
    """Rank 0 of a world: load, make the ranks, step; peaks of each phase."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from vramfit.models.resolve import resolve
    from vramfit.runtime.distributed.accord import Accord
    from vramfit.runtime.distributed.replicas import Replicas
    from vramfit.runtime.distributed.sharded import Shards
    from vramfit.runtime.preparation import prepare
    from vramfit.runtime.stepper import Stepper
    from vramfit.step.inputs import make_batch
    from vramfit.techniques import optimizers

    workload = workload_of(case)
    device = torch.device(device_name)
    phases: dict[str, dict[str, int]] = {}
    dist.init_process_group("fake", rank=0, world_size=workload.num_gpus, store=FakeStore())
    resolved = resolve(workload.model, task=workload.task)
    torch.manual_seed(0)
    model = prepare(resolved, workload).to(device)
    _note(phases, "weights", device)
    accord = Accord(0, workload.num_gpus, group=dist.group.WORLD)
    ranks = Replicas(model, accord) if case["parallel"] == "ddp" else Shards(model, accord)
    _note(phases, "load", device)
    optimizer = optimizers.make(workload.optimizer, model.parameters())
    stepper = Stepper(
        model,
        optimizer,
        micro_batch=workload.micro_batch,
        seq=workload.seq,
        precision=workload.precision,
        max_grad_norm=workload.max_grad_norm,
        ranks=ranks,
    )
    batch = make_batch(model, workload.task, "train", "ones", workload.batch, workload.seq, "cpu")
    batch["attention_mask"][:, 1] = 0  # of full length, and yet a mask that hides something
    for step in range(NUM_STEPS):
        stepper.step(batch)
        _note(phases, f"step{step}", device)
    top = head() if device.type == "cuda" else {"torch": torch.__version__}
    return {**top, "phases": phases, "num_recoveries": stepper.num_recoveries}


def workload_of(case: dict[str, Any]) -> Any:
    """The job of one rank, as the effective batch of the world."""
    from vramfit.workload import Workload

    job = json.loads(case["job"])
    batch = job["micro_batch"] * job.get("accumulate", 1) * case["num_gpus"]
    return Workload.from_keywords(
        **{**job, "batch": batch, "num_gpus": case["num_gpus"], "parallel": case["parallel"], "loop": "stepper"}
    )


def _note(phases: dict[str, dict[str, int]], name: str, device: Any) -> None:
    import torch

    if device.type != "cuda":
        phases[name] = {"requested": 0, "allocated": 0, "reserved": 0}
        return
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    phases[name] = {
        "requested": stats["requested_bytes.all.peak"],
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
    }
    torch.cuda.reset_peak_memory_stats(device)


def compare(lines: list[dict[str, Any]], results: Path) -> int:
    """Predict the measured cases, show them side by side, and write the results file."""
    from vramfit.estimator.predict import estimate

    rows = []
    for line in lines:
        if "error" in line or line["num_recoveries"]:
            print(f"left out: {line['parallel']} × {line['num_gpus']} {line['job']}: {line.get('error', 'recovered')}")
            continue
        w = workload_of(line)
        keywords = {name: getattr(w, name) for name in (*json.loads(line["job"]), "batch", "num_gpus", "parallel")}
        found = estimate(keywords.pop("model"), loop="stepper", gpu="h200", torch_version=line["torch"], **keywords)
        measured = max(phase["allocated"] for phase in line["phases"].values())
        rows.append(
            {
                "parallel": line["parallel"],
                "num_gpus": line["num_gpus"],
                **json.loads(line["job"]),
                "measured_allocated_bytes": measured,
                "predicted_allocated_bytes": found.peak_allocated_bytes,
                "error": found.peak_allocated_bytes / measured - 1,
                "measured_reserved_bytes": max(phase["reserved"] for phase in line["phases"].values()),
                "predicted_reserved_bytes": found.peak_reserved_bytes,
                "safe_reserved_bytes": found.safe_reserved_bytes,
            }
        )
    for row in rows:
        shown = {k: row[k] for k in ("model", "micro_batch", "seq", "precision", "optimizer")}
        print(
            f"{row['parallel']:4} × {row['num_gpus']}  measured {row['measured_allocated_bytes'] >> 20:6,} MiB  "
            f"predicted {row['predicted_allocated_bytes'] >> 20:6,} MiB  {row['error']:+.2%}  {shown}"
        )
    errors = [row["error"] for row in rows]
    if not errors:
        print("nothing was measured")
        return 1
    summary = {
        "num_cases": len(rows),
        "median_error": statistics.median(map(abs, errors)),
        "worst_error": max(map(abs, errors)),
        "num_below": sum(e < 0 for e in errors),
        "num_reserved_beyond_safe": sum(r["measured_reserved_bytes"] > r["safe_reserved_bytes"] for r in rows),
    }
    print(summary)
    first = next(line for line in lines if "error" not in line)
    top = {key: first[key] for key in ("gpu", "date", "torch", "transformers") if key in first}
    name = f"ranks_memory_{str(top.get('gpu', 'none')).split()[-1].lower()}_{top.get('date', 'undated')}.json"
    (results / name).write_text(json.dumps({**top, "summary": summary, "rows": rows}, indent=2) + "\n")
    print(f"wrote {results / name}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ranks_memory.jsonl"), help="file the cases are added to")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to see that the script runs")
    parser.add_argument("--quick", action="store_true", help="two cases of the smallest model")
    parser.add_argument("--max-seconds", type=float, default=540.0, help="no case is begun beyond this")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="predict the cases of a file beside them")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
