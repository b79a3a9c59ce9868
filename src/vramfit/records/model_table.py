"""`ModelTable`: models side by side: what they take, how fast they are, and how good."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One of the models."""

    model: str
    model_class: str
    num_layers: int
    hidden_size: int
    num_parameters: int
    disk_bytes: int | None
    """Of the files that hold its weights; None where they are not in a folder."""
    training_bytes: int
    """Reserved at most by a training step, as `vramfit estimate` predicts it."""
    serving_bytes: int
    """Reserved at most by a forward pass, as `vramfit estimate --mode infer` predicts it."""
    latency_s: float
    """Seconds for one row by itself, measured: the median."""
    worst_latency_s: float
    """The same for the slowest of twenty."""
    samples_per_s: float
    """Rows a second in batches, measured."""
    quality: float
    """The value of the table's metric."""
    metrics: Mapping[str, Any]
    """As `vramfit evaluate` names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTable:
    """Models of one task, compared on one data set; the first is what others are compared with."""

    task: str
    data: str
    device: str
    """Where speed was measured, in words."""
    gpu: str | None
    """The GPU that memory was predicted for; None for any."""
    num_samples: int
    batch: int
    """Samples of a training step and of a forward pass, in predictions."""
    seq: int
    """Tokens of each."""
    metric: str
    higher_is_better: bool
    rows: tuple[ModelRow, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
