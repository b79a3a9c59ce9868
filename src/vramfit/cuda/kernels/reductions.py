"""Sums, norms and their kin: the global buffer and the semaphores of a reduction over several blocks.

ATen/native/cuda/Reduce.cuh (2.11), setReduceConfig and ReduceConfig. Every bias gradient is such a sum.
"""

from dataclasses import dataclass

from vramfit.cuda.kernels.script import CudaProfile, KernelCall, Script, TensorSpec, ceil_div, kernel, last_power_of_two

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
    call: KernelCall, grad: TensorSpec, num_weights: int, max_segments: int, max_partials: int, index_bytes: int
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


MAX_THREADS = 512
"""max_reduce_multiplier × 128 for accumulators of at most 4 bytes."""
WARP = 32
VALUES_PER_THREAD = 16
MAX_VALUES_PER_THREAD = 256
VECTOR = 4
FOREACH_CHUNK = 65536
"""Elements that a block of a multi-tensor kernel takes (ForeachFunctors.cuh, kChunkSize)."""

Dims = list[tuple[int, int]]  # (stride in bytes, size), inner first


@dataclass(frozen=True, slots=True)
class _Layout:
    """A reduction after TensorIterator has coalesced it."""

    reduced: Dims
    kept: Dims
    itemsize: int

    @property
    def num_inputs(self) -> int:
        return _product(self.reduced)

    @property
    def num_outputs(self) -> int:
        return _product(self.kept)

    @property
    def reduces_fastest(self) -> bool:
        """Whether neighbouring elements fall into the same output."""
        return not self.kept or self.reduced[0][0] < self.kept[0][0]


def reduction_buffers(
    x: TensorSpec, dims: tuple[int, ...] | None, profile: CudaProfile, accumulator_bytes: int = 4
) -> tuple[int, int]:
    """Bytes of the global buffer and of the semaphores; (0, 0) when one block a row is enough."""
    layout = _coalesce(x, dims)
    if not layout.reduced:
        return 0, 0
    vector = 1
    fastest = layout.reduces_fastest
    dim0 = layout.num_inputs if fastest else layout.num_outputs
    dim1 = layout.num_outputs if fastest else layout.num_inputs
    if (layout.reduced if fastest else layout.kept)[0][0] == layout.itemsize:
        if not fastest:
            vector = _output_vector(layout)
            dim0 //= vector
        elif dim0 > 128 and len(layout.reduced) == 1:
            dim0 //= VECTOR
    width, height = _block(dim0, dim1, MAX_THREADS // vector)
    return _buffers(layout, profile, width, height, vector, accumulator_bytes)


def _buffers(
    layout: _Layout, profile: CudaProfile, width: int, height: int, vector: int, accumulator_bytes: int
) -> tuple[int, int]:
    inputs_step, outputs_step = (width, 1) if layout.reduces_fastest else (1, width)
    values = ceil_div(layout.num_inputs, inputs_step)
    split_rows = values >= height * VALUES_PER_THREAD or values >= MAX_VALUES_PER_THREAD
    if split_rows:
        inputs_step *= height
    else:
        outputs_step *= height
    values = ceil_div(layout.num_inputs, inputs_step)
    blocks_per_multiprocessor = profile.max_threads_per_multiprocessor // (width * height)
    target = profile.num_multiprocessors * blocks_per_multiprocessor
    grid = ceil_div(layout.num_outputs // vector, outputs_step)
    if not split_rows or values < MAX_VALUES_PER_THREAD or grid > target:
        return 0, 0
    blocks = max(
        min(ceil_div(target, grid), ceil_div(values, VALUES_PER_THREAD)), ceil_div(values, MAX_VALUES_PER_THREAD)
    )
    if blocks <= 1:
        return 0, 0
    size = accumulator_bytes * layout.num_outputs * blocks
    if not layout.reduces_fastest:
        size *= width * vector
    return size, 4 * grid


def _block(dim0: int, dim1: int, max_threads: int) -> tuple[int, int]:
    """ReduceConfig::set_block_dimension."""
    dim0 = last_power_of_two(dim0) if dim0 < max_threads else max_threads
    dim1 = last_power_of_two(dim1) if dim1 < max_threads else max_threads
    width = min(dim0, WARP)
    height = min(dim1, max_threads // width)
    return min(dim0, max_threads // height), height


def _output_vector(layout: _Layout) -> int:
    """get_output_vec_size: the widest vector that divides the outputs and every other stride."""
    vector = VECTOR
    others = [s // layout.itemsize for s, _ in layout.reduced] + [s // layout.itemsize for s, _ in layout.kept[1:]]
    for n in [layout.kept[0][1], *others]:
        while n % vector:
            vector //= 2
    return vector


def _coalesce(x: TensorSpec, dims: tuple[int, ...] | None) -> _Layout:
    rank = len(x.shape)
    wanted = {d % rank for d in dims} if dims else set(range(rank))
    sides: dict[bool, Dims] = {True: [], False: []}
    for d in sorted(range(rank), key=lambda d: x.stride[d]):
        if x.shape[d] == 1:
            continue
        side = sides[d in wanted]
        stride, size = x.stride[d] * x.itemsize, x.shape[d]
        if side and side[-1][0] * side[-1][1] == stride:
            side[-1] = (side[-1][0], side[-1][1] * size)
        else:
            side.append((stride, size))
    return _Layout(reduced=sides[True], kept=sides[False], itemsize=x.itemsize)


def _product(dims: Dims) -> int:
    result = 1
    for _, size in dims:
        result *= size
    return result


def _dims_argument(call: KernelCall, position: int) -> tuple[int, ...] | None:
    value = call.kwargs.get("dim", call.args[position] if len(call.args) > position else None)
    if value is None or isinstance(value, bool):
        return None
    return (value,) if isinstance(value, int) else tuple(value) or None


def _reduce(call: KernelCall, script: Script, dims: tuple[int, ...] | None) -> None:
    x, out = call.args[0], call.outputs[0]
    script.out()
    accumulator = 1 if out is not None and out.dtype == "bool" else 4
    script.scratch(*reduction_buffers(x, dims, call.profile, accumulator))


@kernel("sum", "mean", "all", "any", "amax", "amin", "prod")
def reduce(call: KernelCall, script: Script) -> None:
    _reduce(call, script, _dims_argument(call, 1))


@kernel("norm", "linalg_vector_norm")
def norm(call: KernelCall, script: Script) -> None:
    _reduce(call, script, _dims_argument(call, 2))


@kernel("_foreach_norm")
def foreach_norm(call: KernelCall, script: Script) -> None:
    """ForeachReduceOp.cu (2.11), foreach_tensor_norm_cuda: partial norms, as many for all as the largest needs."""
    tensors: tuple[TensorSpec, ...] = call.args[0]
    num_chunks = max(ceil_div(x.numel, FOREACH_CHUNK) for x in tensors)
    partial = script.temp(len(tensors) * num_chunks * max(tensors[0].itemsize, 4))
    for index in range(len(tensors)):
        script.out(index)
    script.free(partial)
