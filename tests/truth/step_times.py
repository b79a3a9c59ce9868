"""The 75 timed training workloads: what each does in a step, and how long it took on a real H200."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import correlation, median
from typing import Any

from tests.truth.cases import HERE, model_of, workload_of

from vramfit.estimator.predict import work_of
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.traced import collection_paused
from vramfit.records.stream import Work
from vramfit.trace.run import trace

KEYWORDS = (
    *("task", "mode", "batch", "accumulate", "seq", "precision", "attention", "mask"),
    *("checkpointing", "freeze", "optimizer", "gpu", "torch_version"),
)


@dataclass(frozen=True)
class TimedCase:
    """One workload."""

    case: dict[str, Any]
    work: Work
    step_s: float
    """Measured: the median of seven steps."""
    spread: float
    """(slowest − fastest) / median of those seven."""


@cache
def timed_cases() -> tuple[TimedCase, ...]:
    """Every case, traced."""
    found = json.loads((HERE / "step_times_h200.json").read_text())
    return tuple(TimedCase(f["case"], _work(f["case"]), f["step_s"], f["spread"]) for f in found)


@collection_paused()
def _work(case: dict[str, Any]) -> Work:
    workload = workload_of(case)
    return traced_work(model_of(case), **{key: getattr(workload, key) for key in KEYWORDS})


def traced_work(model: Any, **keywords: Any) -> Work:
    """What a steady step of a workload does."""
    traced, _ = resolve_workload(model, keywords)
    workload = traced.workload
    assert workload.micro_batch is not None
    # dimensions of 1 behave differently, so one sample has a trace of its own
    batch = 1 if workload.micro_batch == 1 else None
    template = trace(traced.resolved, workload, traced.profile, batch=batch)
    return work_of(template, workload, workload.micro_batch)


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    return [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return median(relative_errors(predicted, measured))


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: equal values share their rank."""
    return correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values]
