"""`DeviceSpeed`: how fast a GPU and its host are, from the catalogue or from a calibration.

Constants marked *fitted* come from the step times of 75 training workloads and six large jobs on one H200
(torch 2.11; `tests/truth/step_times_h200.json`). `benchmarks/step_time_fit.py` fits them again, and says how well
they hold on workloads that were left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from vramfit.devices.catalogue import GPU

TILE = 128
"""Rows and columns of the piece of the result that a thread block computes; cuBLAS's large kernels take 128 × 128
to 128 × 256, and smaller ones lose about what they save in waves."""
MAX_SPLITS = 8
MIN_SPLIT_K = 256
"""Few tiles with a long inner dimension are split along it (split-K): the gradients of weights."""


@lru_cache(maxsize=2**14)
def product_share(product: tuple[int, int, int, int], num_multiprocessors: int) -> float:
    """The share of a GPU's rate that a product of this shape can have: edges of tiles and the last wave are lost.

    Args:
        product: count, m, n and k.
        num_multiprocessors: of the GPU.

    >>> product_share((1, 8192, 8192, 8192), 128), product_share((1, 128, 128, 64), 128)
    (1.0, 0.0078125)
    """
    count, m, n, k = product
    if not count * m * n * k:
        return 1.0
    num_tiles = count * -(-m // TILE) * -(-n // TILE)
    useful = count * m * n / (num_tiles * TILE * TILE)
    num_splits, best = 1, 0.0
    while num_splits <= MAX_SPLITS and (num_splits == 1 or k >= num_splits * MIN_SPLIT_K):
        num_units = num_tiles * num_splits
        num_waves = -(-num_units // num_multiprocessors)
        best = max(best, num_units / (num_waves * num_multiprocessors))
        num_splits *= 2
    return useful * best


NVLINK_BYTES_PER_S = {
    "v100-16gb": 150e9,
    "v100-32gb": 150e9,
    "a100-40gb": 300e9,
    "a100-80gb": 300e9,
    "h100-sxm": 450e9,
    "h200": 450e9,
    "b200": 900e9,
}
"""One direction, all links of a GPU, as NVIDIA publishes them; other GPUs are taken to talk over PCIe."""
REACHED = 0.7
"""What collectives reach of it."""
NETWORK_BYTES_PER_S = 12.5e9
"""Between machines: 100 Gbit/s for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """GPUs of one kind, and how they are joined."""

    num_gpus: int
    num_nodes: int
    inside_bytes_per_s: float
    between_bytes_per_s: float = NETWORK_BYTES_PER_S * REACHED

    @staticmethod
    def of(gpu: GPU, num_gpus: int, num_nodes: int) -> "Links":
        """The links of a catalogue GPU."""
        nvlink = NVLINK_BYTES_PER_S.get(gpu.name)
        inside = link_bytes_per_s(gpu) if nvlink is None else nvlink * REACHED
        return Links(num_gpus=num_gpus, num_nodes=num_nodes, inside_bytes_per_s=inside)

    def gather_s(self, num_bytes: int) -> float:
        """Every GPU gets what the others have of so many bytes; to scatter sums takes as long."""
        each = self.num_gpus / self.num_nodes
        inside = (each - 1) / each * num_bytes / self.inside_bytes_per_s
        between = (self.num_nodes - 1) / self.num_nodes * num_bytes / self.between_bytes_per_s
        return max(inside, 0.0) + between

    def add_up_s(self, num_bytes: int) -> float:
        """Every GPU gets the sum: scattered, then gathered."""
        return 2 * self.gather_s(num_bytes)

    def in_words(self) -> str:
        """What is assumed."""
        inside = f"{self.inside_bytes_per_s / 1e9:.0f} GB/s between GPUs of a machine"
        nodes = f", {self.between_bytes_per_s / 1e9:.1f} GB/s between {self.num_nodes} machines"
        return f"talk between GPUs is timed with {inside}{nodes if self.num_nodes > 1 else ''}; not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What of a GPU's peak figures kernels reach inside a step; carried over from the H200 to every GPU."""

    fp32_product: float = 0.75
    """Large products on CUDA cores; *fitted*."""
    tensor_core_product: float = 0.60
    """Large products on tensor cores, half precision; *fitted*; TF32 has no measurement and is taken to be alike."""
    bandwidth: float = 0.60
    """Kernels that stream tensors: a plain copy reaches more, dropout and normalisation less; *fitted*."""
    attention: float = 0.5
    """Fused attention, of what a large product reaches; FlashAttention-2 and cuDNN publish 0.4 to 0.75. Not fitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpeed:
    """What eager PyTorch costs on the host: a property of the machine and of Python, not of the GPU.

    The defaults are those of the machine that the H200 stood in; `vramfit calibrate` finds the factor of another.
    """

    operator_s: float = 24e-6
    """An operator of a forward or a backward pass: Python, dispatch, autograd, the launch; *fitted*."""
    light_share: float = 0.5
    """A view, which launches nothing, and operators of an optimizer and of compiled layers, which autograd does not
    record, as a share of `operator_s`; *fitted* for views, rounded. The 75 hold no optimizer that goes tensor by
    tensor: that it is about half there too was seen in `benchmarks/results/random_cases_h200_2026-11-15.json`."""
    recompute_share: float = 2.0
    """The same for a forward that checkpointing repeats: every saved tensor goes through Python; *fitted*, rounded."""
    tensor_s: float = 0.5e-6
    """A tensor in the list of a foreach or fused operator. Not fitted: the 75 workloads do not tell it from zero."""
    step_s: float = 2.8e-3
    """What an optimizer step costs in Python besides its operators, `zero_grad` included; *fitted*."""

    def scaled(self, factor: float) -> "HostSpeed":
        """The host of a machine that is so many times slower."""
        return replace(
            self,
            operator_s=self.operator_s * factor,
            tensor_s=self.tensor_s * factor,
            step_s=self.step_s * factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """A GPU in its machine, as far as time depends on them."""

    basis: Literal["catalogue", "calibrated"]
    num_multiprocessors: int
    product_flops_per_s: Mapping[str, float]
    """What a large product reaches: float32, tf32, float16, bfloat16."""
    bytes_per_s: float
    """What kernels that stream tensors reach."""
    attention_share: float = Efficiency().attention
    """Fused attention's rate, of a large product's."""
    min_kernel_s: float = 3e-6
    """The shortest kernel with the gap before it; about the same on every GPU since Volta."""
    transfer_bytes_per_s: float = 20e9
    """From host memory: what PCIe 4.0 × 16 gives in practice."""
    host_bytes_per_s: float = 40e9
    """What the host's memory gives to an optimizer's step on all cores. Not measured: a desktop has about this much, a
    server several times as much."""
    host: HostSpeed = field(default_factory=HostSpeed)


def link_bytes_per_s(gpu: GPU) -> float:
    """What copies between host and GPU reach: about four fifths of PCIe × 16 in the generation of its architecture."""
    if gpu.compute_capability >= (9, 0):
        return 48e9
    return 20e9 if gpu.compute_capability >= (8, 0) else 12e9


def catalogue_speed(
    gpu: GPU, efficiency: Efficiency | None = None, host: HostSpeed | None = None
) -> DeviceSpeed | None:
    """The speed of a GPU by its published figures; None where they are not known.

    A type that the GPU has no tensor cores for runs at the float32 rate.
    """
    if gpu.peak_fp32 is None or gpu.memory_bandwidth_bytes_per_s is None:
        return None
    reached = efficiency or Efficiency()
    plain = gpu.peak_fp32 * reached.fp32_product
    peaks = {"tf32": gpu.peak_tf32, "float16": gpu.peak_fp16, "bfloat16": gpu.peak_bf16}
    rates = {name: max(plain, (peak or 0.0) * reached.tensor_core_product) for name, peak in peaks.items()}
    return DeviceSpeed(
        basis="catalogue",
        num_multiprocessors=gpu.num_multiprocessors,
        product_flops_per_s={"float32": plain, **rates},
        bytes_per_s=gpu.memory_bandwidth_bytes_per_s * reached.bandwidth,
        attention_share=reached.attention,
        transfer_bytes_per_s=link_bytes_per_s(gpu),
        host=host or HostSpeed(),
    )
