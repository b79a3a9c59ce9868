"""The GPU present, measured in about a minute: products, bandwidth, and what the host costs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
import torch.nn.functional as F

from vramfit.devices.catalogue import match_gpu
from vramfit.records.measurement import REFERENCE, Calibration, ProductRate
from vramfit.runtime.measurement import DEVICE, MeasurementError, run_workload

TYPES = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SINCE_AMPERE = ("tf32", "bfloat16")
PRODUCTS = (
    *((2048, 768, 768), (2048, 3072, 768), (8192, 768, 3072), (8192, 3072, 768)),
    *((16384, 1024, 1024), (16384, 4096, 1024), (3072, 768, 16384)),
)
"""m, n, k of a BERT-class layer: outputs of base and large, and a gradient of weights."""
NUM_ELEMENTS = 16384 * 3072
"""Of the tensors that bandwidth is measured with: 192 MiB in float32, beyond any cache."""
NUM_OPERATORS = 500
NUM_REFERENCE_STEPS = 31
ENOUGH_S = 0.15
"""A measurement repeats its action for about this long."""
MAX_RUNS = 200


@dataclass(frozen=True, slots=True)
class Bench:
    """A device to measure and a clock to measure it with."""

    device: torch.device
    synchronize: Callable[[], object]
    now: Callable[[], float] = time.perf_counter

    def seconds(self, action: Callable[[], object]) -> float:
        """Seconds of one run until the device is through; the first run, which loads kernels, is left out."""
        action()
        once = self._run(action, 1)
        return self._run(action, max(3, min(MAX_RUNS, int(ENOUGH_S / once)))) if once > 0 else once

    def host_seconds(self, action: Callable[[], object]) -> float:
        """Seconds of one run until the program goes on, the queue empty at its start; the fastest of five."""
        action()
        times = []
        for _ in range(5):
            self.synchronize()
            began = self.now()
            action()
            times.append(self.now() - began)
        self.synchronize()
        return min(times)

    def _run(self, action: Callable[[], object], num_runs: int) -> float:
        self.synchronize()
        began = self.now()
        for _ in range(num_runs):
            action()
        self.synchronize()
        return (self.now() - began) / num_runs


def calibrate() -> Calibration:
    """Measure the first GPU; the host's factor is left to be worked out from `reference_step_s`.

    Raises:
        MeasurementError: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise MeasurementError(
            f"no CUDA device to calibrate: torch {torch.__version__} sees none",
            hint="run it on a machine with an NVIDIA GPU; without a calibration, estimates use the catalogue's rates",
        )
    reference_step_s = run_workload(REFERENCE, NUM_REFERENCE_STEPS).step_time_s
    assert reference_step_s is not None
    properties = torch.cuda.get_device_properties(DEVICE)
    gpu = match_gpu(properties.name, properties.total_memory)
    types = [name for name in TYPES if name not in SINCE_AMPERE or properties.major >= 8]
    bench = Bench(DEVICE, lambda: torch.cuda.synchronize(DEVICE))
    forward_s, backward_s = operator_seconds(bench, NUM_OPERATORS)
    return Calibration(
        gpu=gpu.name if gpu else properties.name,
        reported_name=properties.name,
        total_memory_bytes=properties.total_memory,
        num_multiprocessors=properties.multi_processor_count,
        torch_version=str(torch.__version__),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        products=tuple(product_rates(bench, types, PRODUCTS)),
        bytes_per_s=stream_rate(bench, NUM_ELEMENTS),
        transfer_bytes_per_s=transfer_rate(bench, NUM_ELEMENTS),
        launch_s=launch_seconds(bench, NUM_OPERATORS),
        forward_operator_s=forward_s,
        backward_operator_s=backward_s,
        reference_step_s=reference_step_s,
    )


def product_rates(bench: Bench, types: list[str], sizes: tuple[tuple[int, int, int], ...]) -> Iterator[ProductRate]:
    """What linear layers reach, bias and all, by type and size."""
    for name in types:
        with _tf32(name == "tf32"), torch.no_grad():
            for m, n, k in sizes:
                x, weight, bias = (
                    torch.randn(shape, device=bench.device, dtype=TYPES[name]) for shape in ((m, k), (n, k), (n,))
                )
                seconds = bench.seconds(lambda x=x, w=weight, b=bias: F.linear(x, w, b))  # type: ignore[misc]
                yield ProductRate(dtype=name, m=m, n=n, k=k, flops_per_s=2 * m * n * k / seconds)


def stream_rate(bench: Bench, num_elements: int, width: int = 1024) -> float:
    """Bytes a second over the kernels between the products of a layer: each reads and writes large tensors."""
    x, y = (torch.randn(num_elements // width, width, device=bench.device, requires_grad=True) for _ in range(2))
    weight, bias = (torch.ones(width, device=bench.device, requires_grad=True) for _ in range(2))
    size = x.numel() * x.element_size()
    normal = F.layer_norm(x, (width,), weight, bias)
    kernels: list[tuple[float, Callable[[], object]]] = [
        (2.0, lambda: F.gelu(x)),
        (3.0, lambda: x + y),
        (2.25, lambda: torch.native_dropout(x, 0.1, True)),
        (2.0, lambda: F.layer_norm(x, (width,), weight, bias)),
        (3.0, lambda: torch.autograd.grad(normal, (x, weight, bias), y, retain_graph=True)),
        (1.5, lambda: x.to(torch.float16)),
        (1.0, lambda: x.detach().sum(0)),
    ]
    seconds = [bench.seconds(action) for _, action in kernels]
    return sum(passes for passes, _ in kernels) * size / sum(seconds)


def transfer_rate(bench: Bench, num_elements: int) -> float:
    """Bytes a second from page-locked host memory to the device."""
    source = torch.empty(num_elements, pin_memory=bench.device.type == "cuda")
    target = torch.empty(num_elements, device=bench.device)
    return source.numel() * source.element_size() / bench.seconds(lambda: target.copy_(source, non_blocking=True))


def launch_seconds(bench: Bench, num_operators: int) -> float:
    """Host seconds of the smallest operator."""
    x = torch.zeros(1, device=bench.device)

    @torch.no_grad()
    def many() -> None:
        for _ in range(num_operators):
            x.add_(1.0)

    return bench.host_seconds(many) / num_operators


def operator_seconds(bench: Bench, num_operators: int) -> tuple[float, float]:
    """Host seconds of a small operator that autograd records, and of its gradient."""
    x = torch.ones(8, device=bench.device, requires_grad=True)
    made: list[torch.Tensor] = []

    def forward() -> None:
        y = x
        for _ in range(num_operators):
            y = y * 1.0001
        made[:] = [y.sum()]

    def both() -> None:
        forward()
        made[0].backward()

    forward_s, both_s = bench.host_seconds(forward), bench.host_seconds(both)
    return forward_s / num_operators, max(both_s - forward_s, 0.0) / num_operators


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
