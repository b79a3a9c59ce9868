"""Formats of an output: how numbers are stored, and how raw rows become `.npy`, `.safetensors`, `.jsonl` or `.parquet`.

The first two are the raw rows behind a header, which is written last; the others are written from them in blocks.
int8, uint8, binary and ubinary mean what `quantize_embeddings` of sentence-transformers 6.2 gives.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from vramfit.errors import MissingExtra, WorkloadError
from vramfit.records.codec import cannot_write
from vramfit.runtime.encoding.request import STORED
from vramfit.runtime.encoding.spool import Manifest, Spool
from vramfit.runtime.interruption import uninterrupted

NPY_HEADER_BYTES = 128
SAFETENSORS_HEADER_BYTES = 512
SAFETENSORS_TYPES = {"<f4": "F32", "<f2": "F16", "|i1": "I8", "|u1": "U8", "<i8": "I64"}
EMBEDDINGS, INDEX = "embeddings", "index"
"""Names of tensors and columns."""


@dataclass(frozen=True, slots=True)
class Format:
    """One ending."""

    offset: int
    """Bytes before the first raw row; a format that is written from raw rows has none."""
    finish: Callable[[Spool, Manifest, bool], None]
    """Writes the output, or the header of the raw rows; whether rows were left out, so that an index is wanted."""


def format_of(output: Path) -> Format:
    """The format that an ending stands for.

    Raises:
        MissingExtra: Parquet, without pyarrow.
    """
    found = FORMATS[output.suffix.lower()]
    if found.finish is _parquet and find_spec("pyarrow") is None:
        raise MissingExtra("writing .parquet", extra="datasets", package="pyarrow")
    return found


def finish(spool: Spool, manifest: Manifest, *, indexes: bool) -> None:
    """Write an output from its rows.

    Args:
        indexes: whether a file or a column is to say which rows there are.

    Raises:
        VramfitError: it cannot be written; the rows stay.
    """
    try:
        FORMATS[spool.output.suffix.lower()].finish(spool, manifest, indexes)
        with uninterrupted():
            spool.close(manifest)
    except OSError as error:
        raise cannot_write(spool.output, error) from None


def index_of(output: Path) -> Path:
    """Where the index of an output without columns lies."""
    return output.with_name(f"{output.stem}.index.npy")


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header of version 1.0 (numpy/lib/format.py), filled up to a fixed size."""
    told = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    magic = b"\x93NUMPY\x01\x00"
    room = NPY_HEADER_BYTES - len(magic) - 2
    return magic + room.to_bytes(2, "little") + told.ljust(room - 1).encode() + b"\n"


def _npy(spool: Spool, manifest: Manifest, indexes: bool) -> None:
    dtype = manifest.stored_type
    if indexes:
        with _replacing(index_of(spool.output)) as file:
            file.write(npy_header("<i8", (manifest.num_vectors,)))
            for _, places in spool.blocks(manifest):
                file.write(places[:, 0].tobytes())
    _put_header(spool, npy_header(dtype, (manifest.num_vectors, manifest.width)))


def _safetensors(spool: Spool, manifest: Manifest, indexes: bool) -> None:
    dtype = manifest.stored_type
    end = manifest.num_vectors * manifest.row_bytes
    shape = [manifest.num_vectors, manifest.width]
    tensors = {EMBEDDINGS: {"dtype": SAFETENSORS_TYPES[dtype], "shape": shape, "data_offsets": [0, end]}}
    if indexes:
        offsets = [end, end + 8 * manifest.num_vectors]
        tensors[INDEX] = {"dtype": "I64", "shape": [manifest.num_vectors], "data_offsets": offsets}
        with spool.vectors.open("ab") as file:
            for _, places in spool.blocks(manifest):
                file.write(places[:, 0].tobytes())
    room = SAFETENSORS_HEADER_BYTES - 8
    _put_header(spool, room.to_bytes(8, "little") + json.dumps(tensors).ljust(room).encode())


def _jsonl(spool: Spool, manifest: Manifest, indexes: bool) -> None:
    with _replacing(spool.output) as file:
        for vectors, places in spool.blocks(manifest):
            for vector, (index, row) in zip(vectors.tolist(), places.tolist(), strict=True):
                file.write(json.dumps({"row": row, "index": index, "embedding": vector}).encode() + b"\n")


def _parquet(spool: Spool, manifest: Manifest, indexes: bool) -> None:
    pa: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    dtype = manifest.stored_type
    numbers = pa.from_numpy_dtype(dtype)
    schema = pa.schema([(INDEX, pa.int64()), ("row", pa.int64()), ("embedding", pa.list_(numbers, manifest.width))])
    with _replacing(spool.output) as file, parquet.ParquetWriter(file, schema) as writer:
        for vectors, places in spool.blocks(manifest):
            rows = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), manifest.width)
            columns = [pa.array(places[:, 0]), pa.array(places[:, 1]), rows]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _put_header(spool: Spool, header: bytes) -> None:
    """The header in its place; then raw rows are the output."""
    with spool.vectors.open("r+b") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside a path that takes its place at the end, and goes where an error ends it."""
    beside = path.with_name(f".{path.name}.finishing")
    try:
        with beside.open("wb") as file:
            yield file
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


FORMATS = {
    ".npy": Format(NPY_HEADER_BYTES, _npy),
    ".safetensors": Format(SAFETENSORS_HEADER_BYTES, _safetensors),
    ".jsonl": Format(0, _jsonl),
    ".parquet": Format(0, _parquet),
}


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
