"""Kernels whose hidden part is one temporary, or only an order of outputs."""

from vramfit.cuda.kernels.script import KernelCall, Script, TensorSpec, kernel

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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
