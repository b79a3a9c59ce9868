"""Do plans hold? Each plan of a grid is run for real under its memory cap, and each refusal is tried.

    python benchmarks/planned_runs.py --plans-only plans.json      # on any machine: makes the plans
    python benchmarks/planned_runs.py --plans plans.json           # on a GPU: runs them

The grid is memory {2, 4, 8, 11.17, 16} GiB × four models × 128 and 512 tokens, at an effective batch of 32. A plan runs
in a process of its own: N steps with `Stepper` on batches of full length, then two evaluation batches, with the
allocator capped at the budget. Written down are allocated and reserved peaks, retries, out-of-memory errors and seconds
a step, beside what was predicted. Where no plan fits, the settings that take least are run, and should fail. One line
of JSON a case is added to the results; cases that are there are not run again.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import capped_run
import forked

GIB = 2**30
MEMORIES = (2.0, 4.0, 8.0, 11.17, 16.0)
MODELS = ("bert-base-uncased", "bert-large-uncased", "roberta-large", "xlm-roberta-base")
SEQS = (128, 512)
BATCH = 32
CASE_TIMEOUT_S = 180
NUM_SIDE_BY_SIDE = 4
"""Cases that make their models at once; they have the GPU one after another."""
LEAST_S = 30.0
"""A case is not begun with less time than this left."""


def main(arguments: list[str] | None = None) -> int:
    """Make plans, or run them; 0 when everything that ran did what was predicted."""
    options = _parse(arguments)
    cases = [case for case in grid() if options.only in case["name"]]
    if options.plans_only:
        use_calibration(options.calibration)
        make_plans(cases, options.plans_only, options)
        return 0
    planned = json.loads(options.plans.read_text()) if options.plans else {}
    done = {line["name"] for line in forked.read_lines(options.out, "name") if "error" not in line}
    deadline = time.monotonic() + options.limit_s
    forked.import_all()
    waiting = [case for case in cases if case["name"] not in done]
    begun: list[tuple[dict[str, Any], forked.Child]] = []
    while waiting or begun:
        while waiting and len(begun) < NUM_SIDE_BY_SIDE and deadline - time.monotonic() > LEAST_S:
            case = waiting.pop(0)
            entry = planned.get(case["name"]) or make_plan(case, options)
            shown = {"answer": entry["answer"], "plan_s": entry["plan_s"], "is_plan": entry["plan"] is not None}
            begun.append(({**case, **shown}, forked.Child(run_case, entry, options.steps)))
        if not begun:
            break
        shown, child = begun.pop(0)
        line = {**shown, **child.result(min(CASE_TIMEOUT_S, deadline - time.monotonic()))}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(_short(line), flush=True)
    return summarise(forked.read_lines(options.out, "name"), cases)


def grid() -> list[dict[str, Any]]:
    """Every case, with its name."""
    return [
        {"name": f"{model} {seq} {memory:g}GiB", "model": model, "seq": seq, "memory": int(memory * GIB)}
        for memory in MEMORIES
        for model in MODELS
        for seq in SEQS
    ]


def use_calibration(path: Path | None) -> None:
    """Step times are those of a profile that `vramfit calibrate` wrote; None: of the one kept here, if any."""
    if path is not None:
        from vramfit.records.codec import from_json
        from vramfit.records.measurement import Calibration
        from vramfit.timing.model import save_profile

        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
        save_profile(from_json(Calibration, path.read_text(encoding="utf-8")))


def make_plans(cases: list[dict[str, Any]], path: Path, options: argparse.Namespace) -> None:
    """Write the plans of all cases; those that a file has are kept."""
    made = json.loads(path.read_text()) if path.exists() else {}
    for case in cases:
        if case["name"] not in made:
            made[case["name"]] = make_plan(case, options)
            path.write_text(json.dumps(made) + "\n")
        entry = made[case["name"]]
        print(f"{case['name']:<34} {entry['plan_s']:5.1f} s  {entry['answer']}", flush=True)


def make_plan(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The plan of a case, or the settings that take least where none fits."""
    from vramfit.errors import NoPlanFits
    from vramfit.planner.plan import plan
    from vramfit.records.codec import to_data

    keywords = {"gpu": options.gpu, "torch_version": options.torch_version, "max_grad_norm": 1.0, "offload": False}
    began = time.perf_counter()
    try:
        made = plan(case["model"], batch=BATCH, seq=case["seq"], memory=case["memory"], **keywords)
    except NoPlanFits as error:
        w = error.best.workload
        answer = f"nothing fits, {error.shortfall_bytes / GIB:.2f} GiB short"
        entry: dict[str, Any] = {"plan": None, "best": to_data(error.best), "allow": list(error.allow)}
    else:
        w = made.workload
        answer = f"{made.step_time_s:.3f} s, {made.estimate.safe_reserved_bytes / GIB:.2f} GiB"
        entry = {"plan": to_data(made), "best": None}
    settings = f"{w.precision}, {w.optimizer}, checkpointing {w.checkpointing}, {w.micro_batch} × {w.accumulate}"
    return {**entry, "plan_s": time.perf_counter() - began, "answer": f"{settings}: {answer}"}


def run_case(entry: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Steps and an evaluation under the cap, in this process."""
    from vramfit.records.codec import from_data
    from vramfit.records.estimate import Estimate
    from vramfit.records.plan import Plan

    plan = from_data(Plan, entry["plan"]) if entry["plan"] is not None else None
    training = plan.estimate if plan is not None else from_data(Estimate, entry["best"])
    model = capped_run.make_model(training.workload)
    with forked.GPU:
        return _run(model.cuda(), training, plan, num_steps)


def _run(model: Any, training: Any, plan: Any, num_steps: int) -> dict[str, Any]:
    import torch

    w = training.workload
    memory = plan.budget_bytes if plan is not None else w.memory
    outcome = capped_run.run_steps(model, w, memory, num_steps, stop_at_recovery=plan is None)
    if plan is not None and not outcome.get("failed"):
        try:
            _evaluate(model, plan.evaluation_batch, w)
        except torch.OutOfMemoryError as error:
            outcome["failed"] = type(error).__name__
        outcome |= capped_run.peaks("evaluation") | {"evaluation_batch": plan.evaluation_batch}
    stats = torch.cuda.memory_stats()
    return {
        **outcome,
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
        "predicted_allocated_bytes": training.peak_allocated_bytes,
        "predicted_reserved_bytes": training.peak_reserved_bytes,
        "safe_reserved_bytes": training.safe_reserved_bytes,
        "evaluation_safe_reserved_bytes": plan.evaluation.safe_reserved_bytes if plan is not None else None,
        "budget_bytes": memory,
        "predicted_step_s": plan.step_time_s if plan is not None else training.step_time_s,
        **forked.head(),
    }


def _evaluate(model: Any, size: int, workload: Any) -> None:
    import torch

    dtype = workload.autocast_dtype
    model.eval()
    for seed in range(2):
        batch = capped_run.full_batch(size, workload.seq, seed)
        batch = {name: value.cuda() for name, value in batch.items() if name != "labels"}
        with torch.no_grad(), torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            model(**batch)
    model.train()


def summarise(lines: list[dict[str, Any]], cases: list[dict[str, Any]]) -> int:
    """Counts to read at a glance; 0 when nothing went other than predicted."""
    plans = [line for line in lines if line["is_plan"] and "error" not in line]
    held = [p for p in plans if not (p["num_alloc_retries"] or p["num_ooms"] or p.get("failed"))]
    refused = [line for line in lines if not line["is_plan"] and "error" not in line]
    confirmed = [r for r in refused if r.get("failed") or r["num_ooms"]]
    off = capped_run.time_errors(plans)
    num_errors = sum("error" in line for line in lines)
    print(
        f"{len(lines)} of {len(cases)} cases: {len(held)} of {len(plans)} plans held, {len(confirmed)} of "
        f"{len(refused)} refusals confirmed, {num_errors} errors; step times: {off}"
    )
    return 0 if len(held) == len(plans) and len(confirmed) == len(refused) and not num_errors else 1


def _short(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"{line['name']:<34} ERROR {line['error'][-200:]}"
    reserved = max(line.get("training_reserved_bytes", 0), line.get("evaluation_reserved_bytes", 0))
    step = f"{line['step_s']:.3f} s (predicted {line['predicted_step_s']:.3f})" if line.get("step_s") else "no step"
    verdict = line.get("failed") or f"{line['num_alloc_retries']} retries, {line['num_ooms']} out of memory"
    return f"{line['name']:<34} {line['answer']} → {reserved / GIB:.2f} GiB reserved, {step}, {verdict}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans-only", type=Path, metavar="FILE", help="make the plans and write them; needs no GPU")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="plans made before")
    parser.add_argument("--out", type=Path, default=Path("planned_runs.jsonl"), help="file the cases are added to")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=540.0, help="no case is begun after this")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="a profile of that GPU, for step times")
    parser.add_argument("--gpu", default="h200", help="the GPU that plans are made for")
    parser.add_argument("--torch-version", help="the torch of that machine; None for the one here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
