"""A well-known study of BERT's memory, run again: its tables beside predictions made without the GPU, and plans.

    python benchmarks/bert_memory_study.py --predict                        # on any machine, some minutes: predictions
    python benchmarks/bert_memory_study.py --out bert_memory_study.jsonl    # on a GPU, about 6 minutes in all
    python benchmarks/bert_memory_study.py --tables                         # from results/: docs/study.md, the picture

PyTorch's allocator is capped at the study's 11.17 GiB. `forward`: what is allocated after a pass and at its peak, with
dropout and grad, with grad in eval mode, and without grad. `largest`: the largest batch, searched on the GPU (doubling,
bisection, then sizes above the edge one by one) without a look at the prediction, and run once more in a fresh process.
`training`: what `vramfit.plan` makes of the same card for 256 samples a step, run with `Stepper`. `one-pass` and
`inference`: the largest batch that `vramfit.max_batch` gives for training in one pass (bf16 autocast, checkpointing,
fused AdamW) and for inference in bf16, run. Cases that are in the file are not run again, and `--limit-s` ends a slice.
Keep the file as `results/bert_memory_study_<gpu>_<date>.jsonl`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import capped_run
import forked
import study_tables
from study_cases import MEMORY, MODELS, PLANNED_BATCH, Case, cases
from study_predictions import PREDICTIONS, predict_all
from study_search import search

NUM_STEPS = 8
SIDE_BY_SIDE = {"forward": 4, "largest": 4}
"""Cases of a kind that run at once: PyTorch counts and caps memory by process. The others are timed, one by one."""
TIMEOUT_S = 240.0
LEAST_S = 30.0
"""A case is not begun with less time than this left."""


def main(arguments: list[str] | None = None) -> int:
    """Predict, run or show; 0 when every case asked for is there."""
    options = _parse(arguments)
    if options.tables:
        return study_tables.write()
    chosen = [case for case in cases() if options.only in case.name]
    if options.predict:
        predict_all(chosen, options.predictions)
        return 0
    predicted = json.loads(options.predictions.read_text(encoding="utf-8"))["cases"]
    forked.import_all()
    head = forked.in_child(forked.head, timeout_s=TIMEOUT_S)
    deadline = time.monotonic() + options.limit_s
    done = {line["name"] for line in forked.read_lines(options.out, "name") if "error" not in line}
    waiting = [case for case in chosen if case.name not in done]
    print(f"{len(chosen)} cases, {len(chosen) - len(waiting)} done before", flush=True)
    begun: list[tuple[Case, forked.Child]] = []
    while waiting or begun:
        while waiting and deadline - time.monotonic() > LEAST_S and _may_begin(waiting[0], begun):
            case = waiting.pop(0)
            begun.append((case, forked.Child(RUNS[case.kind], case, predicted[case.name])))
        if not begun:
            break
        case, child = begun.pop(0)
        measured = child.result(max(1.0, min(TIMEOUT_S, deadline - time.monotonic())))
        if case.kind == "largest" and "error" not in measured:
            measured |= forked.in_child(run_once, case, measured["batch"], timeout_s=TIMEOUT_S)
        line = {"name": case.name, **vars(case), "original": case.original, "predicted": predicted[case.name]}
        line |= {"error": measured["error"]} if "error" in measured else {"measured": measured}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | head) + "\n")
        print(case.name, json.dumps(line.get("measured") or line["error"][-300:]), flush=True)
    lines = [line for line in forked.read_lines(options.out, "name") if "error" not in line]
    missing = {case.name for case in chosen} - {line["name"] for line in lines}
    print(f"{len(missing)} cases are missing; a later call runs them" if missing else "all cases are there", flush=True)
    return int(bool(missing))


def _may_begin(case: Case, begun: list[tuple[Case, forked.Child]]) -> bool:
    """Whether it may run beside what runs."""
    kinds = {other.kind for other, _ in begun} | {case.kind}
    return len(begun) < min(SIDE_BY_SIDE.get(kind, 1) for kind in kinds)


def run_forward(case: Case, predicted: dict[str, Any]) -> dict[str, Any]:
    """One pass as the study did it, in this process."""
    import torch

    model = _model(case)
    _cap()
    model.cuda()
    loaded = torch.cuda.memory_allocated()
    ids = _ids(case.batch, case.seq)
    if case.frozen_input:
        ids.requires_grad = False
    on_device = ids.cuda()
    outputs = _forward(model, on_device, case)
    after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    requires_grad = outputs[0].requires_grad
    return {
        "loaded_bytes": loaded, "after_allocated_bytes": after, "peak_allocated_bytes": peak,
        "reserved_bytes": torch.cuda.max_memory_reserved(), "output_requires_grad": requires_grad,
    }  # fmt: skip


def run_largest(case: Case, predicted: dict[str, Any]) -> dict[str, Any]:
    """The largest batch that runs under the cap, searched for in this process."""
    import torch

    model = _model(case)
    _cap()
    _warm_up()
    model.cuda()
    return search(lambda batch: _runs(model, batch, case)) | {"reserved_bytes": torch.cuda.max_memory_reserved()}


def run_once(case: Case, batch: int) -> dict[str, Any]:
    """Whether a batch runs in this process, which has done nothing before."""
    model = _model(case)
    _cap()
    _warm_up()
    model.cuda()
    return {"ran_in_fresh_process": _runs(model, batch, case)}


def run_training(case: Case, predicted: dict[str, Any]) -> dict[str, Any]:
    """Steps of the plan."""
    workload = _workload(predicted)
    model = capped_run.make_model(workload).cuda()
    return _told(capped_run.run_steps(model, workload, MEMORY, NUM_STEPS, stop_at_recovery=False))


def run_batch(case: Case, predicted: dict[str, Any]) -> dict[str, Any]:
    """Three steps or passes at the batch predicted."""
    from vramfit.runtime.measurement import run_workload

    _warm_up(trains=case.kind == "one-pass")
    found = run_workload(_workload(predicted))
    return {
        "batch": found.workload.batch, "ran": found.out_of_memory is None, "num_alloc_retries": found.num_retries,
        "reserved_bytes": max((step.peak_reserved_bytes for step in found.steps), default=None),
        "step_s": found.step_times_s[-1] if found.step_times_s else None,
    }  # fmt: skip


def _model(case: Case) -> Any:
    """On the CPU, with small random weights: memory does not depend on their values."""
    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.workload import Workload

    workload = Workload(model=MODELS[case.model], **case.keywords())
    return prepare(resolve(workload.model, task=workload.task), workload)


def _cap() -> None:
    import torch

    from vramfit.runtime.device import enforce

    torch.cuda.init()
    torch.set_float32_matmul_precision("highest")
    enforce(MEMORY, torch.device("cuda", 0))


def _warm_up(*, trains: bool = False) -> None:
    """One product with a bias: cuBLAS's workspaces lie in segments of their own, another one for backward passes."""
    import torch

    layer = torch.nn.Linear(8, 8).cuda()
    made = layer(torch.ones(8, 8, device="cuda")).sum()
    if trains:
        made.backward()


def _forward(model: Any, ids: Any, case: Case) -> Any:
    import torch

    with torch.set_grad_enabled(case.state != "no-grad"):
        return model(ids)


def _ids(batch: int, seq: int) -> Any:
    import torch

    return torch.randint(1000, 30000, (batch, seq), generator=torch.Generator().manual_seed(0))


def _runs(model: Any, batch: int, case: Case) -> bool:
    """Whether a pass of that many samples runs, with nothing cached before."""
    import gc

    import torch

    from vramfit.step.recovery import is_out_of_memory

    gc.collect()
    torch.cuda.empty_cache()
    try:
        _forward(model, _ids(batch, case.seq).cuda(), case)
        torch.cuda.synchronize()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _workload(predicted: dict[str, Any]) -> Any:
    from vramfit.records.codec import from_data
    from vramfit.workload import Workload

    return from_data(Workload, predicted["workload"])


def _told(outcome: dict[str, Any]) -> dict[str, Any]:
    """With what the allocator had to do, and samples a second."""
    import torch

    stats = torch.cuda.memory_stats()
    rate = PLANNED_BATCH / outcome["step_s"] if outcome["step_s"] else None
    counts = {name: stats[name] for name in ("num_alloc_retries", "num_ooms")}
    return outcome | counts | {"samples_per_s": rate}


RUNS: dict[str, Callable[[Case, dict[str, Any]], dict[str, Any]]] = {
    "forward": run_forward,
    "largest": run_largest,
    "training": run_training,
    "one-pass": run_batch,
    "inference": run_batch,
}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="make the predictions; needs no GPU")
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS, help="file of the predictions")
    parser.add_argument("--out", type=Path, default=Path("bert_memory_study.jsonl"), help="file the cases are added to")
    parser.add_argument(
        "--tables", action="store_true", help="write the page and the picture from the results kept here"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no case is begun after this")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
