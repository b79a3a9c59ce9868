"""Is the plan the fastest? Every setting of a committed grid is tried on the GPU, beside the plan's own.

    python benchmarks/brute_force.py --plans plans.json            # on a GPU; plans.json is from planned_runs.py
    python benchmarks/brute_force.py --predict                     # on any machine: adds the predicted seconds a step

Eight cases of the grid of `planned_runs.py`. For each, the plan's settings are run, then at most 40 others: precision ×
micro-batch × checkpointing, and the 8-bit optimizer where memory is small. A setting runs eight steps on batches of
full length under the cap; one that runs out of memory does not count. One line of JSON a setting is added to the
results; settings that are there are not run again. All settings of a case share a process and a model; the allocator's
cache is emptied between them.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import capped_run
import forked
import planned_runs

CASES = (
    "bert-base-uncased 512 2GiB",
    "bert-base-uncased 512 4GiB",
    "bert-large-uncased 128 4GiB",
    "bert-large-uncased 512 8GiB",
    "roberta-large 128 8GiB",
    "xlm-roberta-base 512 8GiB",
    "bert-large-uncased 512 11.17GiB",
    "roberta-large 512 16GiB",
)
PRECISIONS = ("tf32", "amp-bf16")
MICRO_BATCHES = (32, 16, 8, 4)
SMALL_MEMORY = 4 * 2**30
"""Up to here the 8-bit optimizer is tried too."""
NUM_STEPS = 8
GOAL = 0.9
"""Of the best throughput found."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet, or add predictions; 0 when every plan reaches the goal."""
    options = _parse(arguments)
    if options.predict:
        planned_runs.use_calibration(options.calibration)
        predict(options.out)
        return summarise(forked.read_lines(options.out, "key"))
    planned = json.loads(options.plans.read_text())
    deadline = time.monotonic() + options.limit_s
    forked.import_all()
    for name in CASES:
        left_s = deadline - time.monotonic()
        if left_s > planned_runs.LEAST_S:
            answer = forked.in_child(run_case, name, planned[name]["plan"], options.out, deadline, timeout_s=left_s)
            print(f"{name}: {answer}", flush=True)
    return summarise(forked.read_lines(options.out, "key"))


def grid(num_layers: int, memory: int) -> list[dict[str, Any]]:
    """The settings of a case, the most likely first."""
    plain = [
        {"precision": precision, "micro_batch": micro_batch, "checkpointing": checkpointing, "optimizer": "adamw-fused"}
        for checkpointing in (None, num_layers // 2, "full")
        for micro_batch in MICRO_BATCHES
        for precision in PRECISIONS
    ]
    small = [
        {"precision": precision, "micro_batch": micro_batch, "checkpointing": checkpointing, "optimizer": "adamw-8bit"}
        for checkpointing in (num_layers // 2, "full")
        for micro_batch in (32, 8)
        for precision in PRECISIONS
    ]
    return plain + small if memory <= SMALL_MEMORY else plain


def run_case(name: str, plan_data: dict[str, Any], out: Path, deadline: float) -> dict[str, Any]:
    """All settings of a case in this process; lines are written as they come."""
    from dataclasses import replace

    from vramfit.models.anatomy import encoder_layers
    from vramfit.records.codec import from_data
    from vramfit.records.plan import Plan

    plan = from_data(Plan, plan_data)
    w = plan.workload
    model = capped_run.make_model(replace(w, checkpointing=None)).cuda()
    num_layers = len(encoder_layers(model))
    chosen = {n: getattr(w, n) for n in ("precision", "micro_batch", "checkpointing", "optimizer")}
    done = {line["key"] for line in forked.read_lines(out, "key") if "error" not in line}
    settings = [("plan", chosen), *(("grid", s) for s in grid(num_layers, plan.budget_bytes) if s != chosen)]
    num_run = 0
    for origin, setting in settings:
        key = f"{name} {origin} {json.dumps(setting)}"
        if key in done or time.monotonic() > deadline - 10:
            continue
        tried = replace(w, **setting, accumulate=-(-w.batch // setting["micro_batch"]))
        line = {"key": key, "name": name, "origin": origin, **setting, **_try(model, tried, plan.budget_bytes)}
        num_run += 1
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return {"settings run": num_run, "of": len(settings)}


def _try(model: Any, workload: Any, memory: int) -> dict[str, Any]:
    import torch

    from vramfit.settings import checkpointing

    model.gradient_checkpointing_disable()
    checkpointing.apply(model, workload.checkpointing)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    made = capped_run.run_steps(model, workload, memory, NUM_STEPS, stop_at_recovery=True)
    fits = not made.get("failed") and not made["num_recoveries"]
    return {**made, "fits": fits, "step_s": made["step_s"] if fits else None}


def predict(path: Path) -> None:
    """Add the predicted seconds a step to the settings that ran."""
    import vramfit

    lines = forked.read_lines(path, "key")
    for line in lines:
        if line["fits"] and "predicted_step_s" not in line:
            model, seq, _ = line["name"].split()
            made = vramfit.estimate(
                model, batch=planned_runs.BATCH, seq=int(seq), micro_batch=line["micro_batch"],
                precision=line["precision"], optimizer=line["optimizer"], checkpointing=line["checkpointing"],
                max_grad_norm=1.0, loop="stepper", allocator="expandable", gpu="h200",
            )  # fmt: skip
            line["predicted_step_s"] = made.step_time_s
            line["predicted_allocated_bytes"] = made.peak_allocated_bytes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def summarise(lines: list[dict[str, Any]]) -> int:
    """Each plan beside the best of its grid."""
    reached = []
    for name in CASES:
        ran = [line for line in lines if line["name"] == name and line["fits"]]
        own = next((line for line in ran if line["origin"] == "plan"), None)
        if own is None:
            print(f"{name:<34} the plan has not run")
            continue
        best = min(ran, key=lambda line: float(line["step_s"]))
        reached.append(best["step_s"] / own["step_s"])
        print(
            f"{name:<34} {len(ran):3} settings fit; plan {own['step_s']:.4f} s ({_words(own)}), best "
            f"{best['step_s']:.4f} s ({_words(best)}): {reached[-1]:.1%} of the best throughput"
        )
    print("step times:", capped_run.time_errors([line for line in lines if line["fits"]]))
    return 0 if len(reached) == len(CASES) and min(reached) >= GOAL else 1


def _words(line: dict[str, Any]) -> str:
    return f"{line['precision']}, {line['optimizer']}, checkpointing {line['checkpointing']}, {line['micro_batch']}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=Path, metavar="FILE", help="plans that planned_runs.py made")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="a profile of the GPU, for --predict")
    parser.add_argument("--predict", action="store_true", help="add predicted step times; needs no GPU")
    parser.add_argument("--out", type=Path, default=Path("brute_force.jsonl"), help="file the settings are added to")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no setting is begun after this")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
