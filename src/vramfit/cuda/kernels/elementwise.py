"""Kernels whose hidden part is one temporary, or only an order of outputs; convolutions; what a GPU refuses.

A convolution makes a contiguous copy of its input and takes a workspace. cuDNN chooses its kernel by rules of its own,
and with it the workspace: nothing, copies of what it reads and writes in another layout, or partial sums of the
weights' gradient. What is requested here is an upper bound of 156 forward and backward passes measured on an
H200 (torch 2.11, cuDNN 9; one dimension, fp32, tf32, bf16 and fp16).
"""

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from vramfit.cuda.kernels.script import CudaProfile, KernelCall, Script, TensorSpec, ceil_div, kernel
from vramfit.errors import WorkloadError

BLOCK_SIZE = 128
BYTES_PER_BLOCK = 16 * BLOCK_SIZE
NUMBER_BYTES = 8


def split_copy_bytes(chunk_bytes: Sequence[int], num_chunks: int, profile: CudaProfile) -> int:
    """The table of `split_with_sizes_copy`: where each part begins, its size, and the part of each block.

    Args:
        chunk_bytes: of each part, what one of the chunks has.
        num_chunks: chunks that lie one after another, one a rank.
    """
    num_blocks = sum(ceil_div(size, BYTES_PER_BLOCK) for size in chunk_bytes)
    max_blocks = profile.num_multiprocessors * profile.max_threads_per_multiprocessor // BLOCK_SIZE * 2
    factor = ceil_div(num_blocks * num_chunks, max_blocks)
    chunks_per_block = min(math.ceil(math.sqrt(factor)), num_chunks)
    per_block = BYTES_PER_BLOCK * ceil_div(factor, chunks_per_block)
    num_launched = sum(ceil_div(size, per_block) for size in chunk_bytes)
    return NUMBER_BYTES * (4 * len(chunk_bytes) + 1 + num_launched)


def chunk_cat_bytes(chunk_bytes: Sequence[int]) -> int:
    """The table of `_chunk_cat`; arguments as of `split_copy_bytes`."""
    num_blocks = sum(ceil_div(size, BYTES_PER_BLOCK) for size in chunk_bytes)
    return NUMBER_BYTES * (6 * len(chunk_bytes) + 2 + num_blocks)


CUB_SELECT_BYTES = 1023
"""Temporary of CUB's selection for one tile of inputs (CUDA 13.0)."""


@kernel("_softmax_backward_data")
def softmax_backward(call: KernelCall, script: Script) -> None:
    """SoftMax.cu (2.11), softmax_backward_cuda_out: `grad * output` is made after the output."""
    grad, output = call.args[0], call.args[1]
    script.out()
    script.scratch(output.numel * max(grad.itemsize, output.itemsize))


@kernel("native_dropout")
def native_dropout(call: KernelCall, script: Script) -> None:
    """Dropout.cu (2.11): the mask comes before the output."""
    script.out(1)
    script.out(0)


@kernel("native_layer_norm", "native_layer_norm_backward")
def native_layer_norm(call: KernelCall, script: Script) -> None:
    """layer_norm_kernel.cu (2.11): gradient and input are copied first where they are not contiguous."""
    tensors = call.args[:2] if call.operator.endswith("backward") else call.args[:1]
    copies = [script.temp(x.nbytes) for x in tensors if not x.is_contiguous]
    for index, output in enumerate(call.outputs):
        if output is not None:
            script.out(index)
    script.free(*reversed(copies))


@kernel("embedding")
def embedding(call: KernelCall, script: Script) -> None:
    """Embedding.cpp (2.11): indices that cannot be flattened as a view (expanded ones) are copied first."""
    indices: TensorSpec = call.args[1]
    copy = None
    if len(indices.shape) > 1 and not _flattens(indices):
        copy = script.temp(indices.nbytes)
    script.out()
    if copy is not None:
        script.free(copy)


def _flattens(x: TensorSpec) -> bool:
    """Whether `x.view(-1)` exists: every dimension continues the one inside it."""
    expected: int | None = None
    for n, s in zip(reversed(x.shape), reversed(x.stride), strict=True):
        if n == 1:
            continue
        if expected is not None and s != expected:
            return False
        expected = n * s
    return True


@kernel("index")
def index(call: KernelCall, script: Script) -> None:
    """TensorAdvancedIndexing.cpp (2.11), make_info: indices are broadcast, and copied where that leaves gaps."""
    indices = [i for i in call.args[1] if i is not None]
    shape = _broadcast([i.shape for i in indices])
    num_indices = 1
    for n in shape:
        num_indices *= n
    copies = [script.temp(num_indices * i.itemsize) for i in indices if i.numel != num_indices]
    script.out()
    script.free(*copies)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


@kernel("nonzero")
def nonzero(call: KernelCall, script: Script) -> None:
    """Nonzero.cu (2.11): a count on the device, CUB's reduction, the output, CUB's selection (small inputs)."""
    count = script.temp(4)
    script.scratch(1)
    script.out()
    script.scratch(CUB_SELECT_BYTES)
    script.free(count)


@kernel("cumsum")
def cumsum(call: KernelCall, script: Script) -> None:
    """ReduceOps.cpp (2.11), impl_func_cum_ops: an input of another type is converted after the output is made."""
    x, out = call.args[0], call.outputs[0]
    script.out()
    if out is not None and x.dtype != out.dtype:
        script.scratch(out.nbytes)


HALF = 2
INPUT_COPIES = {HALF: 0, 4: 8}
"""Bytes of an element → copies of the weights, at most, in the workspace of the input's gradient."""
SUM_COPIES = {HALF: 22, 4: 24}
UNGROUPED_COPIES = 32
"""Copies of the weights, at most, in the workspace of their own gradient; where all channels are in one group, more."""
MANY_POSITIONS = 1024
"""Of the batch: in 16 bits, the weights' gradient was summed in parts from 1,536 positions on where as many channels
come in as go out, from 4,096 on where they are in one group, and not with 500 and 1,664."""
POINTWISE_BYTES = 272
"""Of a product in 16 bits in place of a convolution: one position wide, all channels in one group."""
PADDING_BYTES = {HALF: 64, 4: 640}
SUMS_PADDING_BYTES = 576
"""Scalars and alignment, at most; of the weights' gradient, the second."""


@kernel("convolution")
def convolution(call: KernelCall, script: Script) -> None:
    """Convolution.cpp (2.11): the input is made contiguous, then the output, then the workspace."""
    x, weight, output = call.args[0], call.args[1], call.outputs[0]
    assert output is not None
    copy = None if x.is_contiguous else script.temp(x.nbytes)
    script.out()
    num_copies = 0 if _is_pointwise(weight) else 1
    script.scratch(POINTWISE_BYTES if _is_product(x, weight) else _workspace_bytes(x, weight, output, num_copies))
    if copy is not None:
        script.free(copy)


@kernel("convolution_backward")
def convolution_backward(call: KernelCall, script: Script) -> None:
    """Convolution.cpp (2.11): the gradients of input, weights and bias, each of the first two with its workspace."""
    grad, x, weight = call.args[0], call.args[1], call.args[2]
    wanted = [i for i, output in enumerate(call.outputs) if output is not None]
    if _is_depthwise(x, weight):  # DepthwiseConv2d.cu, conv_depthwise2d_backward_cuda_out
        copy = None if grad.is_contiguous else script.temp(grad.nbytes)
        rows = None if 1 not in wanted or x.is_contiguous else script.temp(x.nbytes)
        for index in sorted(wanted, key=(1, 0, 2).index):
            script.out(index)
            if index == 1 and rows is not None:
                script.free(rows)
        if copy is not None:
            script.free(copy)
        return
    copies = [script.temp(t.nbytes) for t in (grad, x) if not t.is_contiguous]
    of_input = INPUT_COPIES[_width(x)] or (0 if _is_pointwise(weight) else 1)
    for index, num_copies in enumerate((of_input, _sum_copies(x, weight), None)):
        if index not in wanted:
            continue
        script.out(index)
        if index == 0 and _is_product(x, weight):
            script.scratch(POINTWISE_BYTES)
        elif num_copies is not None:
            num_bytes = _workspace_bytes(x, weight, grad, num_copies)
            script.scratch(num_bytes + SUMS_PADDING_BYTES if num_bytes and index == 1 else num_bytes)
    script.free(*reversed(copies))


def _workspace_bytes(x: TensorSpec, weight: TensorSpec, output: TensorSpec, num_copies: int) -> int:
    """Depthwise kernels, with one input channel a group, are PyTorch's own and take none."""
    if _is_depthwise(x, weight):
        return 0
    return x.nbytes + output.nbytes + num_copies * weight.nbytes + PADDING_BYTES[_width(x)]


def _is_depthwise(x: TensorSpec, weight: TensorSpec) -> bool:
    return weight.shape[1] == 1 and x.shape[1] > 1


def _sum_copies(x: TensorSpec, weight: TensorSpec) -> int:
    """Copies of the weights that their gradient is summed in."""
    is_grouped, num_positions = weight.shape[1] != x.shape[1], x.numel // x.shape[1]
    if x.itemsize == HALF:
        is_square = weight.shape[0] == x.shape[1]
        sums = num_positions > MANY_POSITIONS and is_square if is_grouped else num_positions > 2 * MANY_POSITIONS
        if not sums:
            return 0 if _is_pointwise(weight) else 1
    return SUM_COPIES[_width(x)] if is_grouped else UNGROUPED_COPIES


def _width(x: TensorSpec) -> int:
    return HALF if x.itemsize <= HALF else 4


def _is_product(x: TensorSpec, weight: TensorSpec) -> bool:
    return _is_pointwise(weight) and weight.shape[1] == x.shape[1] and x.itemsize == HALF


def _is_pointwise(weight: TensorSpec) -> bool:
    return prod(weight.shape[2:]) == 1


def _check_fill(x: torch.Tensor, *arguments: Any) -> None:
    """Scalar.h (2.11), `to`: a finite number that the type cannot hold."""
    value = arguments[-1]
    if x.is_floating_point() and isinstance(value, int | float) and math.isfinite(value):
        most = torch.finfo(x.dtype).max
        if abs(value) > most:
            _refuse(f"the model's own code fills {x.dtype} with {value:.3g}, and it holds {most:.3g} at most")


def _check_fourier(x: torch.Tensor, dims: list[int], _: int, last: int) -> None:
    """CuFFTPlanCache.h (2.11), CuFFTConfig: of a transform to real numbers, `last` says how many its last row has."""
    sizes = [x.shape[dim] for dim in dims]
    if not isinstance(last, bool):
        sizes[-1] = last
    if x.dtype in (torch.float16, torch.complex32) and any(size & (size - 1) for size in sizes):
        _refuse(f"cuFFT transforms fp16 only in sizes that are powers of two, and here they are {sizes}")


def _refuse(why: str) -> None:
    raise WorkloadError([f"{why}: the model does not run in this precision"], hint="take precision fp32")


CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("fill", "fill_", "masked_fill", "masked_fill_"), _check_fill),
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), _check_fourier),
}
"""Operators of which a GPU refuses what the meta device lets pass."""
