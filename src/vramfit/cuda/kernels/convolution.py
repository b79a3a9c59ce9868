"""Convolutions: a contiguous copy of the input, and cuDNN's workspace.

cuDNN chooses its kernel by rules of its own, and with it the workspace: nothing, copies of what it reads and writes in
another layout, or partial sums of the weights' gradient. What is requested here is an upper bound of 156 forward and
backward passes measured on an H200 (torch 2.11, cuDNN 9; one dimension, fp32, tf32, bf16 and fp16).
"""

from math import prod

from vramfit.cuda.kernels.script import KernelCall, Script, TensorSpec, kernel

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
    copies = [script.temp(t.nbytes) for t in (grad, x) if not t.is_contiguous]
    of_input = INPUT_COPIES[_width(x)] or (0 if _is_pointwise(weight) else 1)
    for index, num_copies in enumerate((of_input, _sum_copies(x, weight), None)):
        if index >= len(call.outputs) or call.outputs[index] is None:
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
    if weight.shape[1] == 1 and x.shape[1] > 1:
        return 0
    return x.nbytes + output.nbytes + num_copies * weight.nbytes + PADDING_BYTES[_width(x)]


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
