"""Estimates made by hand, in the proportions of BERT-base fine-tuning, for tests of what is drawn."""

from typing import Any

from rich.console import Console

from vramfit.records.estimate import (
    Advice,
    Estimate,
    MaxBatch,
    PeakMoment,
    PhaseEstimate,
    TensorGroup,
    TimelinePoint,
)
from vramfit.units import GIB, MIB
from vramfit.workload import Workload

LAYER = "bert.encoder.layer.*"
CONTEXT_BYTES = 550 * MIB
K80_BYTES = 11_996_954_624


def groups(batch: int, seq: int) -> tuple[TensorGroup, ...]:
    """What is live at the peak: eager attention keeps the square of the length."""
    square, line = 12 * 12 * batch * seq * seq * 4, 12 * batch * seq * 768 * 4
    made = [
        TensorGroup(category=c, operator=o, module=m, num_blocks=n, allocated_bytes=b)  # type: ignore[arg-type]
        for c, o, m, n, b in (
            ("weights", "parameter", "bert.embeddings.word_embeddings", 1, 94 * MIB),
            ("weights", "parameter", f"{LAYER}.intermediate.dense", 24, 324 * MIB),
            ("gradients", "mm", f"{LAYER}.intermediate.dense", 24, 418 * MIB),
            ("optimizer", "zeros_like", "", 400, 836 * MIB),
            ("activations", "_softmax", f"{LAYER}.attention.self", 12, square),
            ("activations", "native_dropout", f"{LAYER}.attention.self", 24, square * 5 // 4),
            ("activations", "bmm", f"{LAYER}.attention.self", 24, square + line),
            ("activations", "addmm", f"{LAYER}.intermediate.dense", 12, 4 * line),
            ("activations", "gelu", f"{LAYER}.intermediate.intermediate_act_fn", 12, 4 * line),
            ("temporaries", "_softmax_backward_data", "bert.encoder.layer.11.attention.self", 1, square // 12),
            ("workspaces", "cublas_workspace", "", 2, 17 * MIB),
            ("inputs", "zeros", "", 3, 3 * batch * seq * 8),
        )
    ]
    return tuple(sorted(made, key=lambda g: -g.allocated_bytes))


def timeline(low: int, high: int) -> tuple[TimelinePoint, ...]:
    """Up in forward, down in backward, a bump at the optimizer."""
    up = [TimelinePoint(part="forward", allocated_bytes=low + (high - low) * i // 40) for i in range(40)]
    down = [TimelinePoint(part="backward", allocated_bytes=high - (high - low) * i // 70) for i in range(60)]
    step = [TimelinePoint(part="optimizer", allocated_bytes=low + (high - low) // 4)] * 20
    return (*up, *down, *step)


def estimate(**changes: Any) -> Estimate:
    """A training step; keywords of `Workload` and fields of `Estimate` both change it."""
    own = {name: changes.pop(name) for name in list(changes) if name in Estimate.__slots__ and name != "gpu"}
    settings = {"model": "bert-base-uncased", "batch": 8, "seq": 512, "attention": "eager", "gpu": "k80"}
    workload = Workload(**{**settings, **changes})
    live = own.get("groups", groups(workload.micro_batch or workload.batch, workload.seq))
    breakdown: dict[str, int] = {}
    for group in live:
        breakdown[group.category] = breakdown.get(group.category, 0) + group.allocated_bytes
    peak = sum(breakdown.values())
    total = K80_BYTES if workload.gpu else None
    capacity = workload.memory or (total - CONTEXT_BYTES if total else None)
    reserved = peak + 150 * MIB
    fields: dict[str, Any] = {
        "workload": workload,
        "gpu": workload.gpu,
        "compute_capability": (3, 7) if workload.gpu else (8, 0),
        "torch_version": "2.11.0",
        "basis": "derived",
        "peak_requested_bytes": peak - 40 * MIB,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": reserved,
        "peak_process_bytes": reserved + CONTEXT_BYTES,
        "context_bytes": CONTEXT_BYTES,
        "safe_reserved_bytes": reserved + 20 * MIB,
        "capacity_bytes": capacity,
        "total_memory_bytes": total,
        "fits": None if capacity is None else reserved + 20 * MIB <= capacity,
        "fits_cold": None if capacity is None else reserved + 20 * MIB <= capacity,
        "num_retries": 0,
        "phases": {
            "load": phase(418 * MIB),
            "first_step": phase(peak - 2 * MIB),
            "steady_step": phase(peak),
        },
        "peak": PeakMoment(
            phase="steady_step",
            part="backward",
            module="bert.encoder.layer.11.attention.self",
            operator="_softmax_backward_data",
        ),
        "breakdown": breakdown,
        "modules": {"bert": peak},
        "groups": live,
        "timeline": timeline(1254 * MIB, peak),
    }
    return Estimate(**{**fields, **own})


def phase(peak: int) -> PhaseEstimate:
    return PhaseEstimate(
        peak_requested_bytes=peak - MIB, peak_allocated_bytes=peak, peak_reserved_bytes=peak + 20 * MIB
    )


def max_batch(batch: int = 14, **changes: Any) -> MaxBatch:
    limited_by = "the backward pass of the steady step runs out, 212 MiB short"
    return MaxBatch(
        **{
            "batch": batch,
            "cold_batch": batch,
            "estimate": estimate(batch=max(batch, 1)),
            "limited_by": limited_by,
            **changes,
        }
    )


ADVICE = [
    Advice(
        change="precision amp-fp16",
        kind="numeric",
        saved_bytes=3 * GIB,
        peak_allocated_bytes=6 * GIB,
        fits=True,
    ),
    Advice(
        change="attention sdpa",
        kind="free",
        saved_bytes=2 * GIB,
        peak_allocated_bytes=7 * GIB,
        fits=True,
    ),
    Advice(
        change="freeze embeddings",
        kind="different training",
        saved_bytes=356 * MIB,
        peak_allocated_bytes=9 * GIB,
        fits=False,
    ),
    Advice(
        change="optimizer adamw-fused",
        kind="free",
        saved_bytes=0,
        peak_allocated_bytes=9 * GIB,
        fits=False,
    ),
]


def drawn(renderable: Any, width: int = 80) -> str:
    """What a reader without colours sees."""
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, highlight=False)
        console.print(renderable)
        return console.export_text()
