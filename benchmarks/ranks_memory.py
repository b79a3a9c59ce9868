"""What does one rank of a world take? DDP and FSDP2 at world sizes 2, 4 and 8, on one GPU, beside the prediction.

PyTorch's `fake` process group stands for the other ranks: this process is rank 0, every collective returns at once, and
what the rank allocates is what it would allocate among real ones, but for the buffers that NCCL takes from the driver.

On a machine with a GPU:     python benchmarks/ranks_memory.py --out ranks.jsonl --processes 6
On any machine, afterwards:  python benchmarks/ranks_memory.py --compare ranks.jsonl
Without a GPU, as a check:   python benchmarks/ranks_memory.py --device cpu --quick --out /tmp/ranks.jsonl

Each case runs in a process of its own, several at once since nothing is timed. One line of JSON a case is added as it
ends; a later call goes on where an earlier one stopped, and tries again what failed. Worlds of two also leave what they
asked of the allocator, event by event, in a folder beside the file (`ranks_events`).
"""

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forked import head, import_all, in_children, read_lines

CASE_TIMEOUT_S = 90.0
NUM_STEPS = 3
MAX_EVENTS = 1_000_000
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
PHASES = {"load": ("weights", "load"), "first_step": ("step0",), "steady_step": ("step1", "step2")}
"""What is predicted, and which measured ones it stands for."""


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
    done = {tuple(line[k] for k in KEY) for line in read_lines(options.out, *KEY) if "error" not in line}
    waiting = [case for case in cases(quick=options.quick) if tuple(case[k] for k in KEY) not in done]
    print(f"{len(waiting)} cases to run, {len(done)} done before", flush=True)
    num_missing = len(waiting)
    start = time.monotonic()
    in_time = ((case, options.device, _events_path(case, options.out)) for case in waiting if _has_time(start, options))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        for (case, *_), found in in_children(
            measure, in_time, num_processes=options.processes, timeout_s=CASE_TIMEOUT_S
        ):
            file.write(json.dumps({**case, **found}) + "\n")
            file.flush()
            num_missing -= "error" not in found
            shown = found.get("error") or {k: v["allocated"] >> 20 for k, v in found["phases"].items()}
            print(f"{case['parallel']} × {case['num_gpus']} {case['job']} → MiB {shown}", flush=True)
    print(f"{num_missing} are missing, after {time.monotonic() - start:.0f} s: a later call goes on", flush=True)
    return 1 if num_missing else 0


def _has_time(start: float, options: argparse.Namespace) -> bool:
    return time.monotonic() - start < options.max_seconds


def _events_path(case: dict[str, Any], out: Path) -> Path | None:
    """Where the allocator's events of a case go; one world is enough to see in which order things are asked for."""
    if case["num_gpus"] != WORLDS[0]:
        return None
    job = json.loads(case["job"])
    name = "_".join(str(job[k]) for k in ("model", "seq", "precision", "optimizer"))
    return out.with_name(f"{out.stem}_events") / f"{case['parallel']}_{name}.json.gz"


def measure(case: dict[str, Any], device_name: str, events_path: Path | None = None) -> dict[str, Any]:
    """Rank 0 of a world: load, make the ranks, step; peaks of each phase."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from vramfit.models.resolve import resolve
    from vramfit.runtime.distributed.parallel import Replicas, Shards
    from vramfit.runtime.distributed.votes import RankVotes
    from vramfit.runtime.measurement import prepare
    from vramfit.runtime.stepper import Stepper
    from vramfit.step.plain import make_batch
    from vramfit.techniques import optimizers

    workload = workload_of(case)
    device = torch.device(device_name)
    noted = Phases(device, records=events_path is not None)
    dist.init_process_group("fake", rank=0, world_size=workload.num_gpus, store=FakeStore())
    resolved = resolve(workload.model, task=workload.task)
    torch.manual_seed(0)
    model = prepare(resolved, workload).to(device)
    noted.end("weights")
    votes = RankVotes(0, workload.num_gpus, group=dist.group.WORLD)
    ranks = Replicas(model, votes) if case["parallel"] == "ddp" else Shards(model, votes)
    noted.end("load")
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
        noted.end(f"step{step}")
    top = head() if device.type == "cuda" else {"torch": torch.__version__}
    found = {**top, "phases": noted.phases, "num_recoveries": stepper.num_recoveries}
    if events_path is not None:
        noted.save(events_path, {**case, **found})
    return found


class Phases:
    """Peaks of the allocator from one moment to the next, and its events if asked for."""

    def __init__(self, device: Any, *, records: bool) -> None:
        import torch

        self.phases: dict[str, dict[str, int]] = {}
        self._device = device
        self._records = records and device.type == "cuda"
        self._num_events: dict[str, int] = {}
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.set_device(device)
        if self._records:
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MAX_EVENTS)

    def end(self, name: str) -> None:
        """Note the peaks since the last call; nothing but zeros without a GPU."""
        import torch

        if self._device.type != "cuda":
            self.phases[name] = {"requested": 0, "allocated": 0, "reserved": 0}
            return
        torch.cuda.synchronize(self._device)
        stats = torch.cuda.memory_stats(self._device)
        kinds = ("requested", "allocated", "reserved")
        self.phases[name] = {kind: stats[f"{kind}_bytes.all.peak"] for kind in kinds}
        if self._records:
            self._num_events[name] = len(self._events())
        torch.cuda.reset_peak_memory_stats(self._device)

    def save(self, path: Path, top: dict[str, Any]) -> None:
        """All events: [action, address, bytes, number of its CUDA stream]; and how many there were as a phase ended."""
        if not self._records:
            return
        streams: dict[int, int] = {}
        events = [
            [e["action"], e.get("addr", 0), e["size"], streams.setdefault(e.get("stream", 0), len(streams))]
            for e in self._events()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**top, "num_events": self._num_events, "events": events}
        path.write_bytes(gzip.compress(json.dumps(content).encode()))

    def _events(self) -> list[dict[str, Any]]:
        import torch

        traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot(self._device)["device_traces"]
        return traces[self._device.index or 0]


def workload_of(case: dict[str, Any]) -> Any:
    """The job of one rank, as the effective batch of the world."""
    from vramfit.workload import Workload

    job = json.loads(case["job"])
    batch = job["micro_batch"] * job.get("accumulate", 1) * case["num_gpus"]
    return Workload.from_keywords(
        **{**job, "batch": batch, "num_gpus": case["num_gpus"], "parallel": case["parallel"], "loop": "stepper"}
    )


def compare(lines: list[dict[str, Any]], results: Path) -> int:
    """Predict the measured cases, show them side by side, and write the results file."""
    rows = []
    for line in lines:
        if "error" in line or line["num_recoveries"]:
            print(f"left out: {line['parallel']} × {line['num_gpus']} {line['job']}: {line.get('error', 'recovered')}")
            continue
        rows.append(_row(line))
        _show(rows[-1])
    if not rows or not rows[0]["measured_allocated_bytes"]:
        print("nothing was measured")
        return 1
    summary = _summary(rows)
    print(json.dumps(summary, indent=2))
    first = next(line for line in lines if "error" not in line)
    top = {key: first[key] for key in ("gpu", "date", "torch", "transformers") if key in first}
    name = f"ranks_memory_{str(top.get('gpu', 'none')).split()[-1].lower()}_{top.get('date', 'undated')}.json"
    (results / name).write_text(json.dumps({**top, "summary": summary, "rows": rows}, indent=2) + "\n")
    print(f"wrote {results / name}")
    return 0


def _row(line: dict[str, Any]) -> dict[str, Any]:
    """A measured case beside its prediction, in all and by phase."""
    from vramfit.estimator.predict import estimate

    w = workload_of(line)
    keywords = {name: getattr(w, name) for name in (*json.loads(line["job"]), "batch", "num_gpus", "parallel")}
    found = estimate(keywords.pop("model"), loop="stepper", gpu="h200", torch_version=line["torch"], **keywords)
    phases = line["phases"]
    measured = max(phase["allocated"] for phase in phases.values())
    return {
        "parallel": line["parallel"],
        "num_gpus": line["num_gpus"],
        **json.loads(line["job"]),
        "measured_allocated_bytes": measured,
        "predicted_allocated_bytes": found.peak_allocated_bytes,
        "error": found.peak_allocated_bytes / max(measured, 1) - 1,
        "measured_requested_bytes": max(phase["requested"] for phase in phases.values()),
        "predicted_requested_bytes": found.peak_requested_bytes,
        "measured_reserved_bytes": max(phase["reserved"] for phase in phases.values()),
        "predicted_reserved_bytes": found.peak_reserved_bytes,
        "safe_reserved_bytes": found.safe_reserved_bytes,
        "phases": {
            name: {
                "measured_allocated_bytes": max(phases[one]["allocated"] for one in ones),
                "predicted_allocated_bytes": found.phases[name].peak_allocated_bytes,
            }
            for name, ones in PHASES.items()
        },
    }


def _show(row: dict[str, Any]) -> None:
    shown = {k: row[k] for k in ("model", "micro_batch", "seq", "precision", "optimizer")}
    by_phase = {
        name: f"{p['predicted_allocated_bytes'] / max(p['measured_allocated_bytes'], 1) - 1:+.2%}"
        for name, p in row["phases"].items()
    }
    print(
        f"{row['parallel']:4} × {row['num_gpus']}  measured {row['measured_allocated_bytes'] >> 20:6,} MiB  "
        f"predicted {row['predicted_allocated_bytes'] >> 20:6,} MiB  {row['error']:+.2%}  {by_phase}  {shown}",
        flush=True,
    )


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far predictions are off, of all cases and of each way of sharing."""
    return {
        name: {
            "num_cases": len(some),
            "median_error": statistics.median(abs(row["error"]) for row in some),
            "worst_error": max((row["error"] for row in some), key=abs),
            "num_exact": sum(row["error"] == 0 for row in some),
            "num_below": sum(row["error"] < 0 for row in some),
            "num_reserved_beyond_safe": sum(r["measured_reserved_bytes"] > r["safe_reserved_bytes"] for r in some),
        }
        for name in ("all", *PARALLELS)
        if (some := [row for row in rows if name in ("all", row["parallel"])])
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ranks_memory.jsonl"), help="file the cases are added to")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to see that the script runs")
    parser.add_argument("--quick", action="store_true", help="two cases of the smallest model")
    parser.add_argument("--processes", type=int, default=1, help="cases that run at once on the one GPU")
    parser.add_argument("--max-seconds", type=float, default=540.0, help="no case is begun beyond this")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="predict the cases of a file beside them")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
