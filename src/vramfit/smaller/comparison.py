"""`compare`: models of one task side by side on one data set: size, memory, speed and quality."""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.models.anatomy import num_layer_applications
from vramfit.models.build import build_meta
from vramfit.models.hub import exported_file
from vramfit.models.resolve import resolve
from vramfit.records.measurement import ModelRow, ModelTable
from vramfit.runtime.data.samples import Samples, make_metrics
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.device import RunDevice
from vramfit.runtime.inference import Inference
from vramfit.runtime.trained import TrainedModel, open_model
from vramfit.runtime.training.outcome import environment_of
from vramfit.smaller.folder import weights_bytes
from vramfit.stages import tell

NUM_ALONE = 40
"""Rows that are timed one by one, of all lengths."""
SLOW_SHARE = 0.95
DEFAULT_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """What is compared, and where."""

    models: tuple[str, ...]
    data: str
    task: str | None = None
    """None takes the head that each model has."""
    text_columns: tuple[str, ...] = ()
    label_column: str | None = None
    skip_bad_rows: bool = False
    max_rows: int | None = None
    batch: int = DEFAULT_BATCH
    """Samples of a step in predictions."""
    seq: int | None = None
    """Cut texts at so many tokens; None takes what each model allows."""
    device: str | None = None
    memory: str | int | None = None
    gpu: str | None = None
    """The GPU that memory is predicted for."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problems = []
        if len(self.models) < 2:
            problems.append("there is nothing to compare with: give two models or more")
        if len(set(self.models)) < len(self.models):
            problems.append("a model is named twice")
        if problems:
            raise WorkloadError(problems, hint="vramfit compare MODEL MODEL … --data FILE")


def compare(models: Sequence[str], data: str, **options: Any) -> ModelTable:
    """Put models of one task side by side.

    Quality, latency and throughput are measured on the rows of `data`, on one device, a model at a time; memory in
    training and in serving is predicted, for a GPU.

    Args:
        models: two or more folders that `train`, `distill` or transformers saved.
        data: with labels.
        options: of `CompareRequest`: `device`, `memory`, `gpu`, `batch`, `seq`, `max_rows`, columns.

    Raises:
        WorkloadError: models of different tasks or labels, or options that contradict.
        UnknownModel, CheckpointError, DataError: as `evaluate` raises them.
    """
    request = CompareRequest(models=tuple(models), data=data, **options)
    opened = [_open(request, name) for name in request.models]
    _check_alike(opened)
    asked = ("text_columns", "label_column", "skip_bad_rows", "max_rows")
    columns: dict[str, Any] = {name: getattr(request, name) for name in asked}
    source = DataSource(path=request.data, task=opened[0].task, **columns)
    read = [trained.read(source) for trained in opened]
    seq = max(max(samples.lengths) for samples in read)
    rows = [_row(request, trained, samples, seq) for trained, samples in zip(opened, read, strict=True)]
    metrics, run_device = make_metrics(read[0]), RunDevice(request.device, memory=request.memory)
    environment = environment_of(run_device)
    notes = [note for t, s in zip(opened, read, strict=True) for note in t.notes_on(s)]
    if exported := [t.model for t in opened if exported_file(t.model) is not None]:
        notes.append(f"exported (ONNX), which only a CPU runs: no GPU memory is predicted of {', '.join(exported)}")
    return ModelTable(
        task=opened[0].task,
        data=request.data,
        device=device_name(run_device, environment),
        gpu=request.gpu,
        num_samples=read[0].num_samples,
        batch=request.batch,
        seq=seq,
        metric=metrics.best_metric,
        higher_is_better=metrics.higher_is_better,
        rows=tuple(rows),
        environment=environment,
        notes=tuple(dict.fromkeys(notes)),
    )


def _open(request: CompareRequest, name: str) -> TrainedModel:
    trained = open_model(name, task=request.task, seq=request.seq, trust_remote_code=request.trust_remote_code)
    trained.check_head()
    return trained


def _check_alike(opened: Sequence[TrainedModel]) -> None:
    """Refuse models whose scores are not of the same thing."""
    first, *others = opened
    problems = []
    for other in others:
        if other.task != first.task:
            problems.append(f"{other.model} has task {other.task}, and {first.model} {first.task}")
        elif set(other.label_names) != set(first.label_names) or other.problem != first.problem:
            problems.append(f"{other.model} was trained on other labels than {first.model}")
    if problems:
        raise WorkloadError(problems, hint="compare models of one task that were trained on the same labels")


def _row(request: CompareRequest, trained: TrainedModel, samples: Samples, seq: int) -> ModelRow:
    tell(f"measuring {trained.model}")
    run_device = RunDevice(request.device, memory=request.memory)
    given: dict[str, Any] = {} if request.memory is None else {"memory": request.memory}
    inference = trained.load(run_device, samples, **trained.suited(run_device, **given))
    model: Any = inference.model
    alone = time_alone(inference, samples)
    metrics = make_metrics(samples)
    began = time.perf_counter()
    inference.run(
        samples, lambda output, batch, rows: metrics.update(output, batch, [samples.references[i] for i in rows])
    )
    took_s = time.perf_counter() - began
    found = metrics.result()
    config, name, num_layers = model.config, type(model).__name__, num_layer_applications(model)
    if exported_file(trained.model) is not None:  # its weights are inside the file: count those of its configuration
        model = build_meta(resolve(trained.model, task=trained.task, trust_remote_code=trained.trust_remote_code))
    num_parameters = sum(p.numel() for p in model.parameters())
    del inference, model
    gc.collect()
    if run_device.device.type == "cuda":
        torch.cuda.empty_cache()
    tell(f"predicting the memory of {trained.model}")
    return ModelRow(
        model=trained.model,
        model_class=name,
        num_layers=num_layers,
        hidden_size=int(config.hidden_size),
        num_parameters=num_parameters,
        disk_bytes=weights_bytes(trained.model) or None,
        training_bytes=_predicted_bytes(request, trained, seq, "train"),
        serving_bytes=_predicted_bytes(request, trained, seq, "infer"),
        latency_s=statistics.median(alone),
        worst_latency_s=sorted(alone)[int(SLOW_SHARE * (len(alone) - 1))],
        samples_per_s=len(samples) / took_s,
        quality=float(found[metrics.best_metric]),
        metrics={name: value for name, value in found.items() if isinstance(value, int | float)},
    )


def time_alone(inference: Inference, samples: Samples) -> list[float]:
    """Seconds of rows that go through by themselves, of all lengths; the first ones are for warming up."""
    by_length = sorted(range(len(samples)), key=lambda i: samples.lengths[i])
    step = max(len(by_length) // NUM_ALONE, 1)
    chosen = by_length[::step]
    taken = []
    for row in [*chosen[-2:], *chosen]:
        began = time.perf_counter()
        inference.run(samples, lambda output, batch, rows: None, rows=[row])
        taken.append(time.perf_counter() - began)
    return taken[2:]


def _predicted_bytes(request: CompareRequest, trained: TrainedModel, seq: int, mode: str) -> int | None:
    """None for an exported model."""
    if exported_file(trained.model) is not None:
        return None
    labels = {"num_labels": len(trained.label_names)} if trained.label_names else {}
    predicted = estimate(
        trained.model,
        task=trained.task,
        mode=mode,
        batch=request.batch,
        seq=seq,
        gpu=request.gpu,
        trust_remote_code=request.trust_remote_code,
        **labels,
    )
    return predicted.safe_reserved_bytes


def device_name(run_device: RunDevice, environment: dict[str, str]) -> str:
    if "gpu" in environment:
        return environment["gpu"]
    cores = torch.get_num_threads()
    threads = f"{cores} thread{'s' if cores > 1 else ''}"
    return f"an emulated GPU (the CPU computes, {threads})" if run_device.emulated else f"CPU, {threads}"
