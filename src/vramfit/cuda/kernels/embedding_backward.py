"""The gradient of an embedding: beyond 3,072 indices they are sorted, with everything a sort needs.

ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu (2.11); the sort and the scans are CUB's.
"""

from vramfit.cuda.kernels.script import KernelCall, Script, TensorSpec, ceil_div, kernel

MAX_UNSORTED = 3072
"""embedding_dense_backward_cuda: at most so many indices take the kernel without a sort."""
ROWS_PER_PARTIAL = 10
"""NROWS_PER_THREAD of EmbeddingBackwardKernel.cu."""
CUB_SCAN_BYTES = 1279
"""Temporary of CUB's unique and exclusive scan at these sizes (CUDA 13.0)."""


@kernel("embedding_dense_backward")
def embedding_dense_backward(call: KernelCall, script: Script) -> None:
    grad: TensorSpec = call.args[0]
    indices: TensorSpec = call.args[1]
    num_weights: int = call.args[2]
    held = []
    if not indices.is_contiguous:
        held.append(script.temp(indices.nbytes))
    if not grad.is_contiguous:
        held.append(script.temp(grad.nbytes))
    if indices.numel <= MAX_UNSORTED:
        script.out()
    else:
        _sorted_backward(call, script, grad, indices, num_weights)
    script.free(*reversed(held))


def _sorted_backward(call: KernelCall, script: Script, grad: TensorSpec, indices: TensorSpec, num_weights: int) -> None:
    n, index_bytes = indices.numel, indices.itemsize
    sorted_indices = script.temp(n * index_bytes)
    original = script.temp(n * index_bytes)
    script.scratch(n * index_bytes, _radix_sort_bytes(n))
    script.out()
    segments = script.temp(n * index_bytes)
    num_segments = script.temp(8)
    script.scratch(n * index_bytes, CUB_SCAN_BYTES)
    max_segments = min(n, num_weights)
    per_segment = script.temp(max_segments * index_bytes)
    offsets = script.temp(max_segments * index_bytes)
    script.scratch(CUB_SCAN_BYTES)
    num_partials = script.temp(8)
    max_partials = n // ROWS_PER_PARTIAL + max_segments
    partial_offsets = script.temp(max_partials * index_bytes)
    script.scratch(*_partial_sums(call, grad, num_weights, max_segments, max_partials, index_bytes))
    script.free(partial_offsets, num_partials, offsets, per_segment, num_segments, segments, original, sorted_indices)


def _partial_sums(
    call: KernelCall,
    grad: TensorSpec,
    num_weights: int,
    max_segments: int,
    max_partials: int,
    index_bytes: int,
) -> tuple[int, ...]:
    """Few rows take the fused path, which maps partials to segments instead of storing their sums."""
    width = grad.shape[-1]
    warp_width = ceil_div(width, 32) * 32
    grid = ceil_div(max_segments * warp_width, min(warp_width, 1024))
    if grid < call.profile.num_multiprocessors * 16 and max_partials > grid * 4:
        accumulated = num_weights * width * 4 if grad.itemsize < 4 else 0
        return (max_partials * index_bytes, accumulated)
    return (max_partials * width * 4,)


def _radix_sort_bytes(n: int) -> int:
    """CUB's onesweep radix sort of n 64-bit pairs: histograms, double buffers, look-back states (CUDA 13.0)."""

    def aligned(size: int) -> int:
        return ceil_div(size, 256) * 256

    return aligned(8 * 256 * 8) + 2 * aligned(8 * n) + aligned(ceil_div(n, 4608) * 1024) + 256 + 255
