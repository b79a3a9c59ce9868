"""The numbers of vectors as they are stored: cut, in fewer bits, or as signs alone.

What int8, uint8, binary and ubinary mean is what `quantize_embeddings` of sentence-transformers 6.2 gives.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.runtime.encoding.request import STORED

Array = npt.NDArray[Any]
NUM_STEPS = 255
FEW_VECTORS = 100
"""Ranges of fewer vectors are said to be unsteady, as sentence-transformers says."""


def stored_width(dtype: str, width: int) -> int:
    """Numbers that are stored of a vector; eight signs are one.

    >>> stored_width("binary", 12), stored_width("int8", 12)
    (2, 12)
    """
    return math.ceil(width / 8) if dtype.endswith("binary") else width


def cut(vectors: torch.Tensor, dims: int | None, *, normalizes: bool) -> torch.Tensor:
    """The first numbers of each vector, at unit length again where the whole one has it."""
    if dims is None or dims == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dims]
    return F.normalize(kept, dim=-1) if normalizes else kept


def ranges_of(vectors: Array, before: Array | None = None) -> Array:
    """The least and the greatest number of each place, of those before too."""
    lows, highs = vectors.min(0), vectors.max(0)
    if before is not None:
        lows, highs = np.minimum(lows, before[0]), np.maximum(highs, before[1])
    return np.vstack((lows, highs)).astype(np.float32)


def check_calibration(num_vectors: int, dtype: str) -> None:
    """Raises WorkloadError where one vector is all that a range could be taken from."""
    if num_vectors < 2:
        raise WorkloadError(
            [f"dtype {dtype} takes its ranges from vectors of the data, and there is only one"],
            hint="give a file of texts that are like the data: --calibration FILE",
        )


def stored(vectors: Array, dtype: str, ranges: Array | None = None) -> Array:
    """Vectors in the type that is asked for.

    Args:
        ranges: of int8 and uint8: the least and the greatest number of each place.
    """
    if dtype.endswith("binary"):
        packed = np.packbits(vectors > 0, axis=-1)
        return packed if dtype == "ubinary" else (packed - np.uint8(128)).view(np.int8)
    if not dtype.endswith("int8"):
        return vectors.astype(STORED[dtype])
    assert ranges is not None
    steps = (ranges[1] - ranges[0]) / NUM_STEPS
    steps = np.where(steps == 0, 1, steps)
    places = np.clip(np.floor((vectors - ranges[0]) / steps), 0, NUM_STEPS)
    made: Array = places.astype(np.uint8) if dtype == "uint8" else (places - 128).astype(np.int8)
    return made
