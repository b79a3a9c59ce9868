"""What vramfit says of the cases of `bert_memory_study.py`, without a GPU."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study_cases import GPU, HEADS, MEMORY, MODELS, PLANNED_BATCH, TORCH, Case
from study_search import search

PREDICTIONS = Path(__file__).parent / "results" / "bert_memory_study_predictions.json"
ONE_PASS = {"precision": "amp-bf16", "checkpointing": "full", "optimizer": "adamw-fused", "mask": "padded"}
INFERENCE = {"precision": "bf16", "mask": "padded", "mode": "infer"}


def predict_all(chosen: list[Case], path: Path) -> None:
    """Write the predictions of all cases; those that a file has are kept."""
    from vramfit import __version__

    made = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": {}}
    made |= {
        "question": "bert_memory_study",
        "gpu": GPU,
        "torch": TORCH,
        "memory_bytes": MEMORY,
        "vramfit": __version__,
    }
    for case in chosen:
        if case.name not in made["cases"]:
            began = time.perf_counter()
            made["cases"][case.name] = PREDICTIONS_OF[case.kind](case)
            print(f"{case.name}: {made['cases'][case.name]} in {time.perf_counter() - began:.1f} s", flush=True)
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def predict_forward(case: Case) -> dict[str, Any]:
    """What is allocated at the peak and after the pass; with grad and one sample, by how it follows the length."""
    import vramfit

    keywords = case.keywords() | {"batch": case.batch}
    estimate = vramfit.estimate(MODELS[case.model], **keywords)
    found: dict[str, Any] = {
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "after_allocated_bytes": _after_pass(case, keywords),
    }
    if case.batch == 1 and case.state != "no-grad":
        found["parts"] = _parts(estimate, vramfit.estimate(MODELS[case.model], **keywords | {"seq": case.seq // 2}))
    return found


def _parts(estimate: Any, shorter: Any) -> dict[str, int]:
    """The peak as what does not follow the length, what follows it, and its square by operator."""
    from vramfit.report.sizes import compare_lengths

    parts = {"fixed": 0, "tokens": 0}
    for grown in compare_lengths(shorter, estimate):
        kept = grown.group.category in ("weights", "workspaces")
        part = "fixed" if kept else f"square {grown.group.operator}" if grown.law == "square" else "tokens"
        parts[part] = parts.get(part, 0) + grown.after_bytes
    return {name: size for name, size in parts.items() if size}


def _after_pass(case: Case, keywords: dict[str, Any]) -> int:
    """Allocated while the outputs of the first pass are held: before they, and with grad all that hangs on them, go."""
    from vramfit.estimator.resolve import resolve_workload

    traced, _ = resolve_workload(MODELS[case.model], keywords)
    stream = traced.stream(case.batch)
    end = _end_of_first_pass(stream)
    num_outputs = 1 if case.head == "classification" else 2
    last = max(index for index in range(end) if stream.events[index] > 0) + 1
    until = end - num_outputs if case.state == "no-grad" else last
    return int(_replay(stream, until, traced.options, None).allocated_bytes)


def _end_of_first_pass(stream: Any) -> int:
    phases = [mark for mark in stream.marks if mark.kind == "phase"]
    names = [mark.name for mark in phases]
    return int(phases[names.index("first_step") + 1].index)


def _replay(stream: Any, until: int, options: Any, capacity_bytes: int | None) -> Any:
    """The allocator after the first events of a stream."""
    from vramfit.allocator.caching import CachingAllocator

    allocator = CachingAllocator(capacity_bytes, options)
    driver = {mark.index: mark.name for mark in stream.marks if mark.kind == "driver"}
    held: list[Any] = []
    for index in range(until):
        if index in driver:
            allocator.placement.on_event(driver[index])  # type: ignore[arg-type]
        event = stream.events[index]
        if event > 0:
            held.append(allocator.malloc(event))
        else:
            allocator.free(held[-event])
    return allocator


def predict_one_pass(case: Case) -> dict[str, Any]:
    """The largest batch of a single pass in a process that has run a product before; beside it, of pass after pass."""
    from vramfit.allocator.caching import SimulatedOutOfMemory
    from vramfit.estimator.peaks import warm_stream
    from vramfit.estimator.resolve import resolve_workload

    traced, _ = resolve_workload(MODELS[case.model], case.keywords())

    def runs(batch: int) -> bool:
        stream = warm_stream(traced.stream(batch))
        try:
            _replay(stream, _end_of_first_pass(stream), traced.options, MEMORY)
        except SimulatedOutOfMemory:
            return False
        return True

    return {"batch": search(runs)["batch"], "batch_of_many_passes": predict_largest(case)["batch"]}


def predict_largest(case: Case, **changes: Any) -> dict[str, Any]:
    """The largest batch."""
    import vramfit
    from vramfit.records.codec import to_data

    found = vramfit.max_batch(MODELS[case.model], **case.keywords() | changes)
    return {"batch": found.batch, "workload": to_data(found.estimate.workload)}


def predict_training(case: Case) -> dict[str, Any]:
    """The plan for many samples a step on the same card."""
    import vramfit
    from vramfit.records.codec import to_data

    plan = vramfit.plan(
        MODELS[case.model], task=HEADS[case.head], seq=case.seq, batch=PLANNED_BATCH, memory=MEMORY, gpu=GPU,
        torch_version=TORCH, max_grad_norm=1.0, offload=False,
    )  # fmt: skip
    reserved = plan.estimate.peak_reserved_bytes
    return {"step_s": plan.step_time_s, "reserved_bytes": reserved, "workload": to_data(plan.workload)}


PREDICTIONS_OF: dict[str, Callable[[Case], dict[str, Any]]] = {
    "forward": predict_forward,
    "largest": predict_one_pass,
    "training": predict_training,
    "one-pass": lambda case: predict_largest(case, mode="train", dropout=True, **ONE_PASS),
    "inference": lambda case: predict_largest(case, **INFERENCE),
}
