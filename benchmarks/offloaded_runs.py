"""How small may a GPU be? Large encoders train with all parameters inside budgets that their state alone exceeds.

    python benchmarks/offloaded_runs.py --plans-only offloaded_plans.json     # on any machine: makes the plans
    python benchmarks/offloaded_runs.py --plans offloaded_plans.json          # on a GPU: runs them
    python benchmarks/offloaded_runs.py --plans offloaded_plans.json --steps 200 --only "curve *"     # the loss curves
    python benchmarks/offloaded_runs.py --device emulated --model bert-mini   # a rehearsal of all this without a GPU

An effective batch of 32 samples of 512 tokens, clipping on. Cases: BERT-large without a budget, in 2.5 GiB without
host memory and in 1 GiB with it; the same three over many steps without dropout, whose losses are compared, and the
first once more in passes of half the size, which differs by rounding alone;
XLM-RoBERTa-large in 2 GiB; the smallest budget of six models, found by planning; and a step of 8 samples with the
optimizer in host memory beside torchao's `CPUOffloadOptimizer`, which neither clips nor accumulates, three times. Each
runs in a
process of its own, with the allocator capped at the budget; written down are peaks beside what was predicted, retries,
out-of-memory errors, seconds a step, host memory and losses. One line of JSON a case is added to the results; cases
that are there are not run again.
"""

import argparse
import json
import os
import resource
import sys
import time
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

import capped_run
import forked

GIB, MIB = 2**30, 2**20
BATCH, SEQ = 32, 512
LR = 2e-5
SIX = (
    "distilbert-base-uncased",
    "bert-base-uncased",
    "xlm-roberta-base",
    "bert-large-uncased",
    "roberta-large",
    "xlm-roberta-large",
)
BESIDE = {"batch": 8, "precision": "bf16", "checkpointing": "full", "max_grad_norm": None}
"""What torchao's optimizer can do too: one pass, no clipping."""
NUM_ROUNDS = 3
"""In turns: what happens in host memory takes another time on another day's machine."""
NUM_WARMING = 50
"""Steps over which the learning rate of the curves rises: else random weights jump, and show how rounding grows."""
LEARNED_TOKENS = 2000
"""Of the curves' samples, every second has some of the first words of the vocabulary: what there is to learn."""
CASE_TIMEOUT_S = 560
LEAST_S = 30.0


def grid(model: str | None) -> list[dict[str, Any]]:
    """Every case, with its name; `model` in place of all others makes a small rehearsal."""
    large, xlm, six = (model, model, (model,)) if model else ("bert-large-uncased", "xlm-roberta-large", SIX)
    alone = {"offload": False, "allow": ["bf16"]}
    three = [
        ("free", None, {"precision": "amp-bf16", "optimizer": "adamw-fused", "offload": False}),
        ("2.5GiB", 2.5, alone),
        ("1GiB", 1.0, {}),
    ]
    cases = [{"name": f"{large} {name}", "model": large, "memory_gib": gib, "plan": p} for name, gib, p in three]
    cases += [{**case, "name": f"curve {case['name']}", "curve": True} for case in cases]
    halves = {**three[0][2], "micro_batch": BATCH // 2}
    cases.append({"name": f"curve {large} halves", "model": large, "memory_gib": None, "plan": halves, "curve": True})
    cases.append({"name": f"{xlm} 2GiB", "model": xlm, "memory_gib": 2.0, "plan": {}})
    least = {"offload": "weights", "precision": "bf16"}  # what plans come to in the end
    cases += [{"name": f"smallest {name}", "model": name, "memory_gib": "smallest", "plan": least} for name in six]
    beside = {"model": large, "memory_gib": None, "plan": {**BESIDE, "offload": "optimizer"}}
    sides = [(number, whose) for number in range(1, NUM_ROUNDS + 1) for whose in ("ours", "torchao")]
    return cases + [{**beside, "name": f"beside {whose} {number}", "whose": whose} for number, whose in sides]


def main(arguments: list[str] | None = None) -> int:
    """Make plans, or run them; 0 when everything that ran stayed inside what was predicted."""
    options = _parse(arguments)
    cases = [case for case in grid(options.model) if fnmatch(case["name"], options.only)]
    planned = json.loads(options.plans.read_text()) if options.plans else {}
    if options.plans_only:
        for case in cases:
            planned[case["name"]] = make_plan(case, options)
            options.plans_only.write_text(json.dumps(planned) + "\n")
            print(f"{case['name']:<36} {planned[case['name']]['answer']}", flush=True)
        return 0
    done = {line["name"] for line in forked.read_lines(options.out, "name") if "error" not in line}
    deadline = time.monotonic() + options.limit_s
    forked.import_all()
    for case in cases:
        if case["name"] in done or deadline - time.monotonic() < LEAST_S:
            continue
        entry = planned.get(case["name"]) or make_plan(case, options)
        child = forked.Child(run_case, case, entry, options.steps, options.device)
        line = {**case, "answer": entry["answer"], **child.result(min(CASE_TIMEOUT_S, deadline - time.monotonic()))}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(_short(line), flush=True)
    return summarise(forked.read_lines(options.out, "name"))


def make_plan(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The plan of a case: of its budget, of the smallest one that has a plan, or without any."""
    from vramfit.records.codec import to_data

    gib = case["memory_gib"]
    keywords = {"batch": BATCH, "seq": options.seq, "max_grad_norm": 1.0}
    keywords |= {"gpu": options.gpu, "torch_version": options.torch_version, **case["plan"]}
    if gib == "smallest":
        made = smallest_plan(case["model"], keywords)
    else:
        made = _plan(case["model"], keywords, None if gib is None else int(gib * GIB))
    w, e = made.workload, made.estimate
    answer = (
        f"{w.precision}, {w.optimizer}, offload {w.offload}, checkpointing {w.checkpointing}, {w.micro_batch} × "
        f"{w.accumulate}: {e.safe_reserved_bytes / GIB:.3f} of {made.budget_bytes / GIB:.3f} GiB, "
        f"{e.host_bytes / GIB:.2f} GiB on the host, {made.step_time_s:.2f} s"
    )
    return {"plan": to_data(made), "answer": answer}


def _plan(model: str, keywords: dict[str, Any], memory: int | None) -> Any:
    from vramfit.planner.plan import plan

    return plan(model, **keywords, memory=memory)


def smallest_plan(model: str, keywords: dict[str, Any], step: int = 10 * MIB) -> Any:
    """The plan of the smallest budget that has one, in steps of 10 MiB."""
    from vramfit.errors import NoPlanFits

    low, high = 0, 4 * GIB // step
    best = _plan(model, keywords, high * step)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            best, high = _plan(model, keywords, middle * step), middle
        except NoPlanFits:
            low = middle
    return best


def run_case(case: dict[str, Any], entry: dict[str, Any], num_steps: int, device: str) -> dict[str, Any]:
    """Steps under the cap, in this process; what is in host memory is computed on all cores."""
    import torch

    from vramfit.records.codec import from_data
    from vramfit.records.plan import Plan

    torch.set_num_threads(os.cpu_count() or 1)
    plan = from_data(Plan, entry["plan"])
    w = plan.workload
    torch.manual_seed(0)
    model = capped_run.make_model(w) if device == "cuda" else _model_on_host(w)
    if "curve" in case:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # in training mode all the same, which checkpointing wants
    with ExitStack() as stack:
        gpu = None
        if device == "cuda":
            stack.enter_context(forked.GPU)
        else:
            from vramfit.emulator.gpu import EmulatedGPU

            gpu = stack.enter_context(EmulatedGPU(plan.budget_bytes, allocator="expandable"))
        outcome = _train(case, model, plan, num_steps, torch.device("cuda" if gpu is None else "cpu"))
        outcome |= _peaks(gpu)
    e = plan.estimate
    return {
        **outcome,
        "predicted_allocated_bytes": e.peak_allocated_bytes,
        "predicted_reserved_bytes": e.peak_reserved_bytes,
        "safe_reserved_bytes": e.safe_reserved_bytes,
        "predicted_host_bytes": e.host_bytes,
        "predicted_step_s": plan.step_time_s,
        "budget_bytes": plan.budget_bytes,
        "process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "num_threads": torch.get_num_threads(),
        **(forked.head() if gpu is None else {"gpu": "emulated", "torch": torch.__version__}),
    }


def _model_on_host(workload: Any) -> Any:
    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare

    return prepare(resolve(workload.model, task=workload.task, num_labels=workload.num_labels), workload)


def _train(case: dict[str, Any], model: Any, plan: Any, num_steps: int, device: Any) -> dict[str, Any]:
    import torch

    from vramfit.errors import RecoveryExhausted

    w, losses, times, outcome = plan.workload, [], [], {}
    try:
        step = _torchao_step(model, w) if case.get("whose") == "torchao" else _our_step(model, plan, device)
        for index in range(num_steps):
            if "curve" in case:
                for group in step.__self__.optimizer.param_groups:
                    group["lr"] = LR * min(1.0, (index + 1) / NUM_WARMING)
            batch = make_batch(w.batch, w.seq, index, learnable="curve" in case)
            began = time.perf_counter()
            losses.append(step(batch))  # gives a number: the device is through
            times.append(time.perf_counter() - began)
    except (torch.OutOfMemoryError, RecoveryExhausted) as error:
        outcome["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    steady = times[capped_run.NUM_WARM :] or times
    return outcome | {
        "num_steps": len(times),
        "step_s": median(steady) if steady else None,
        "tokens_per_s": w.batch * w.seq / median(steady) if steady else None,
        "losses": losses,
        "num_recoveries": getattr(getattr(step, "__self__", None), "num_recoveries", 0) if times else None,
    }


def _our_step(model: Any, plan: Any, device: Any) -> Any:
    from vramfit.runtime.stepper import Stepper
    from vramfit.techniques import offloading, optimizers

    w = plan.workload
    if w.offload == "weights":
        offloading.apply(model, 0, device, trains=True)
    else:
        model.to(device)
    optimizer = optimizers.make(w.optimizer, model.parameters(), lr=LR)
    return Stepper(model, optimizer, plan=plan).step


def _torchao_step(model: Any, workload: Any) -> Any:
    """One pass, and its optimizer in host memory: gradients leave in backward, and the step is taken as they come."""
    import torch
    from torchao.optim import CPUOffloadOptimizer

    model.cuda()
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = CPUOffloadOptimizer(learned, torch.optim.AdamW, offload_gradients=True, fused=True, lr=LR)

    def step(batch: dict[str, Any]) -> float:
        loss = model(**{name: value.cuda(non_blocking=True) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return float(loss)

    return step


def make_batch(size: int, seq: int, seed: int, *, learnable: bool) -> dict[str, Any]:
    """Samples of full length; the labels of learnable ones say whether words of the first few thousand are in them."""
    batch = capped_run.full_batch(size, seq, seed)
    if learnable:
        marked = batch["labels"].bool()
        batch["input_ids"][marked, 1 : seq // 8] = batch["input_ids"][marked, 1 : seq // 8] % LEARNED_TOKENS + 1000
    return batch


def _peaks(gpu: Any) -> dict[str, Any]:
    import torch

    if gpu is not None:
        counts = {"num_alloc_retries": gpu.num_retries, "num_ooms": gpu.num_failures}
        return {"allocated_bytes": gpu.max_allocated_bytes, "reserved_bytes": gpu.max_reserved_bytes, **counts}
    stats = torch.cuda.memory_stats()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
    }


def summarise(lines: list[dict[str, Any]]) -> int:
    """What there is to read at a glance; 0 when nothing went other than predicted."""
    ran = [line for line in lines if "error" not in line and not line.get("failed")]
    ours = [line for line in ran if line.get("whose") != "torchao"]
    over = [line["name"] for line in ours if line["allocated_bytes"] > line["predicted_allocated_bytes"]]
    off = [abs(line["predicted_allocated_bytes"] / line["allocated_bytes"] - 1) for line in ours]
    print(f"{len(ran)} of {len(lines)} ran; {len(over)} took more than predicted {over or ''}", end="")
    print(f"; allocated peaks off by {max(off):.2%} at most" if off else "")
    curves = {line["name"].rpartition(" ")[2]: line["losses"] for line in ran if line["name"].startswith("curve ")}
    for name, losses in curves.items():
        if name != "free" and "free" in curves:
            apart = [abs(a - b) for a, b in zip(losses, curves["free"], strict=False)]
            print(f"losses in {name}: at most {max(apart):.2e} from those without a budget, {len(apart)} steps")
    return 0 if len(ran) == len(lines) and not over else 1


def _short(line: dict[str, Any]) -> str:
    if "error" in line or line.get("failed"):
        return f"{line['name']:<36} {line['answer']} → {line.get('failed') or line['error'][-300:]}"
    return (
        f"{line['name']:<36} {line['answer']} → {line['allocated_bytes'] / GIB:.3f} GiB allocated (predicted "
        f"{line['predicted_allocated_bytes'] / GIB:.3f}), {line['reserved_bytes'] / GIB:.3f} reserved, "
        f"{line['step_s']:.3f} s (predicted {line['predicted_step_s']:.3f}), {line['num_alloc_retries']} retries"
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans-only", type=Path, metavar="FILE", help="make the plans and write them; needs no GPU")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="plans made before")
    parser.add_argument("--out", type=Path, default=Path("offloaded_runs.jsonl"), help="file the cases are added to")
    parser.add_argument("--only", default="*", help="cases whose name is like this")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq", type=int, default=SEQ)
    parser.add_argument("--model", help="in place of all models: a rehearsal")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no case is begun after this")
    parser.add_argument("--gpu", default="h200", help="the GPU that plans are made for")
    parser.add_argument("--torch-version", help="the torch of that machine; None for the one here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
