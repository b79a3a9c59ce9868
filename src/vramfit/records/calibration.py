"""`Calibration`: how fast a GPU and its machine were found to be."""

from dataclasses import dataclass

from vramfit.workload import Workload

REFERENCE = Workload(model="bert-mini", batch=1, seq=32, mask="none", optimizer="sgd")
"""A training step so small that the host limits it on any GPU: what it takes tells the host's speed."""


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
