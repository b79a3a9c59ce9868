"""GPUs of the catalogue as the cuda room sees them, and tensors as its kernels see them."""

from math import prod
from typing import Any

from vramfit.cuda.kernels import KERNELS
from vramfit.cuda.kernels.script import CudaProfile, KernelCall, Script, TensorSpec
from vramfit.devices.catalogue import find_gpu


def profile(gpu: str, torch_version: tuple[int, int] = (2, 11)) -> CudaProfile:
    found = find_gpu(gpu)
    return CudaProfile(
        compute_capability=found.compute_capability,
        num_multiprocessors=found.num_multiprocessors,
        max_threads_per_multiprocessor=found.max_threads_per_multiprocessor,
        torch_version=torch_version,
    )


H200, A100, T4, V100, K80 = (profile(name) for name in ("h200", "a100", "t4", "v100", "k80"))
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}


def spec(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorSpec:
    """A tensor of this shape, contiguous unless strides are given."""
    contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorSpec(shape, stride or contiguous, dtype, SIZES[dtype])


def script_of(
    operator: str,
    *args: Any,
    outputs: tuple[TensorSpec | None, ...],
    gpu: CudaProfile = H200,
    **kwargs: Any,
) -> list[tuple[str, int, int]]:
    """What a kernel asks for, in order."""
    script = Script()
    KERNELS[operator](KernelCall(operator, args, kwargs, outputs, gpu), script)
    return script.steps


def temporaries(steps: list[tuple[str, int, int]]) -> list[int]:
    """The sizes of the temporaries, in order."""
    return [size for kind, _, size in steps if kind == "temp"]


def left_over(steps: list[tuple[str, int, int]]) -> set[int]:
    """Temporaries that are never given back; a kernel must not have any."""
    return {i for kind, i, _ in steps if kind == "temp"} ^ {i for kind, i, _ in steps if kind == "free"}


def most_requested(steps: list[tuple[str, int, int]], outputs: tuple[TensorSpec | None, ...]) -> int:
    """The most that a kernel holds at once, its outputs included."""
    sizes: dict[int, int] = {}
    now = most = 0
    for kind, index, size in steps:
        if kind == "out":
            output = outputs[index]
            now += output.nbytes if output is not None else 0
        elif kind == "temp":
            sizes[index] = size
            now += size
        else:
            now -= sizes.pop(index)
        most = max(most, now)
    return most
