"""What was measured: a workload beside its prediction, how fast a GPU and its machine are, and models side by side."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, get_args

from vramfit.records.estimate import Estimate
from vramfit.records.finding import Displayed
from vramfit.workload import Workload

Figure = Literal["requested", "allocated", "reserved"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
JUDGED_FIGURES: tuple[Figure, ...] = ("allocated", "reserved")
"""What a tolerance is held against: the figures that users see and that run out."""
REFERENCE = Workload(model="bert-mini", batch=1, seq=32, mask="none", optimizer="sgd")
"""A training step so small that the host limits it on any GPU: what it takes tells the host's speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMeasurement:
    """The peaks of one phase, as PyTorch's allocator counted them."""

    peak_requested_bytes: int
    """`requested_bytes.all.peak` of `torch.cuda.memory_stats()`."""
    peak_allocated_bytes: int
    """`torch.cuda.max_memory_allocated()`."""
    peak_reserved_bytes: int
    """`torch.cuda.max_memory_reserved()`, the most since the start."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Measurement(Displayed):
    """A workload run for real, in a process of its own."""

    workload: Workload
    gpu: str
    """As the driver reports it."""
    compute_capability: tuple[int, int]
    total_memory_bytes: int
    """As CUDA reports it."""
    torch_version: str
    transformers_version: str
    driver_version: str | None
    """None where NVML is not installed."""
    phases: Mapping[str, PhaseMeasurement]
    """load (the model has come to the device) | inputs (the batch too) | first_step | steady_step (the
    highest of all later steps); those that were finished, where memory ran out."""
    steps: tuple[PhaseMeasurement, ...]
    """Every step that was finished."""
    step_times_s: tuple[float, ...]
    """Seconds of each, the first with everything that is loaded late."""
    num_retries: int
    """How often the allocator freed its cache and tried again (`num_alloc_retries`)."""
    num_ooms: int
    reserved_bytes: int
    """At the end."""
    process_bytes: int | None
    """What the driver charged the process with at the end; None where it does not say."""
    out_of_memory: str | None
    """PyTorch's message, where memory ran out."""

    @property
    def context_bytes(self) -> int | None:
        """What the process held outside the allocator's segments: the CUDA context."""
        return None if self.process_bytes is None else self.process_bytes - self.reserved_bytes

    @property
    def step_time_s(self) -> float | None:
        """The median step, the first left out; None with fewer than two steps."""
        return median(self.step_times_s[1:]) if len(self.step_times_s) > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseDifference:
    """One figure of one phase, predicted and measured."""

    phase: str
    figure: Figure
    predicted_bytes: int
    measured_bytes: int
    error_bytes: int
    """Predicted less measured: negative where the prediction was too low."""
    error: float
    """The same as a fraction of what was measured."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Comparison(Displayed):
    """A prediction beside its measurement."""

    measurement: Measurement
    predicted_gpu: str | None
    """The catalogue's GPU that was predicted for."""
    basis: str
    predicted_fits: bool | None
    differences: tuple[PhaseDifference, ...]
    tolerance: float
    """The largest error allowed, as a fraction of what was measured."""
    worst_error: float
    """Of the allocated and reserved peaks, without its sign."""
    agrees: bool
    """Whether it is within the tolerance and both say the same about fitting."""


def compare(estimate: Estimate, measurement: Measurement, *, tolerance: float = 0.01) -> Comparison:
    """The prediction beside the measurement, phase by phase.

    A run that went out of memory has fewer phases: those it finished are compared, and it agrees when the
    prediction said that it does not fit.
    """
    measured_phases = _like_predicted(measurement.phases)
    differences = tuple(
        _difference(
            phase,
            figure,
            getattr(predicted, f"peak_{figure}_bytes"),
            getattr(measured_phases[phase], f"peak_{figure}_bytes"),
        )
        for phase, predicted in estimate.phases.items()
        if phase in measured_phases
        for figure in FIGURES
    )
    worst = max((abs(d.error) for d in differences if d.figure in JUDGED_FIGURES), default=0.0)
    ran_out = measurement.out_of_memory is not None
    return Comparison(
        measurement=measurement,
        predicted_gpu=estimate.gpu,
        basis=estimate.basis,
        predicted_fits=estimate.fits,
        differences=differences,
        tolerance=tolerance,
        worst_error=worst,
        agrees=worst <= tolerance and not (ran_out and estimate.fits),
    )


def _like_predicted(phases: Mapping[str, PhaseMeasurement]) -> dict[str, PhaseMeasurement]:
    """Phases as an estimate cuts them: loading ends when the first batch is on the device too."""
    loaded = phases.get("inputs")
    return {name: peaks for name, peaks in phases.items() if name != "inputs"} | ({"load": loaded} if loaded else {})


def _difference(phase: str, figure: Figure, predicted_bytes: int, measured_bytes: int) -> PhaseDifference:
    error_bytes = predicted_bytes - measured_bytes
    return PhaseDifference(
        phase=phase,
        figure=figure,
        predicted_bytes=predicted_bytes,
        measured_bytes=measured_bytes,
        error_bytes=error_bytes,
        error=error_bytes / measured_bytes if measured_bytes else float(error_bytes != 0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductRate:
    """One matrix product, as measured."""

    dtype: str
    """float32 | tf32 | float16 | bfloat16."""
    m: int
    n: int
    k: int
    flops_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The figures of one GPU in one machine, measured with eager PyTorch."""

    gpu: str
    """Catalogue name; the driver's name where the catalogue has none."""
    reported_name: str
    """What the driver calls it."""
    total_memory_bytes: int
    """As CUDA reports it."""
    num_multiprocessors: int
    torch_version: str
    measured_at: str
    """Date and time, ISO 8601, UTC."""
    products: tuple[ProductRate, ...]
    """Matrix products of a BERT-class layer, by type and size."""
    bytes_per_s: float
    """Over the kernels between the products of a layer, large tensors."""
    transfer_bytes_per_s: float
    """From page-locked host memory to the device."""
    launch_s: float
    """Host seconds of the smallest operator, autograd off."""
    forward_operator_s: float
    """Host seconds of a small operator that autograd records."""
    backward_operator_s: float
    """Host seconds of its gradient."""
    reference_step_s: float
    """`REFERENCE`, as measured."""
    host_factor: float = 1.0
    """How many times slower this host is than the one that the step-time model was fitted on."""


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
    training_bytes: int | None
    """Reserved at most by a training step, as `vramfit estimate` predicts it; None for an exported model."""
    serving_bytes: int | None
    """The same of a forward pass, as `vramfit estimate --mode infer` predicts it."""
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
