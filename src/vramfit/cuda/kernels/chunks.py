"""What FSDP2's copies between flat buffers and parameters ask for: tables of addresses and blocks, on the device.

ATen/native/cuda/TensorShape.cu (2.11), `pack_vecs` and its callers.
"""

import math
from collections.abc import Sequence

from vramfit.cuda.kernels.script import ceil_div
from vramfit.cuda.profile import CudaProfile

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
