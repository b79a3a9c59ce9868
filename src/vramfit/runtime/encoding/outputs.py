"""The file of vectors: raw rows that grow part by part, a manifest that says how many are whole, and four formats.

The manifest is replaced after the rows of a part are on the disk. Whatever ends a run, rows beyond it are cut off when
the next one goes on. `.npy` and `.safetensors` are the raw rows behind a header, which is written last; `.jsonl` and
`.parquet` are written from them in blocks.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from vramfit.errors import MissingExtra, VramfitError
from vramfit.records.codec import RecordError, cannot_write, from_json, replace_file, to_json
from vramfit.runtime.encoding.request import STORED
from vramfit.runtime.encoding.texts import START, Position
from vramfit.runtime.interruption import uninterrupted

if TYPE_CHECKING:
    from vramfit.runtime.encoding.model import Array

BLOCK_ROWS = 8192
"""Rows of a block that is read again, and of a row group."""
PLACE_BYTES = 16
"""Of a vector's row: its number among all rows from 0, and the line it begins on, as two integers of 8 bytes."""
NPY_HEADER_BYTES = 128
SAFETENSORS_HEADER_BYTES = 512
SAFETENSORS_TYPES = {"<f4": "F32", "<f2": "F16", "|i1": "I8", "|u1": "U8", "<i8": "I64"}
EMBEDDINGS, INDEX = "embeddings", "index"
"""Names of tensors and columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What an output holds, and how far it is."""

    settings: dict[str, Any]
    """Those that decide what the numbers are."""
    width: int
    """Numbers that are stored of a vector."""
    num_vectors: int = 0
    num_truncated: int = 0
    """Texts that were longer than the model reads, and were cut."""
    end: Position = START
    """How far the data was read."""
    ranges: tuple[tuple[float, ...], ...] = ()
    """Of int8 and uint8: the least and the greatest number of each place, which other vectors need too."""
    is_whole: bool = False
    """Whether the output is written."""

    @property
    def stored_type(self) -> str:
        """numpy's name of the numbers that are stored."""
        return STORED[self.settings["dtype"]]

    @property
    def row_bytes(self) -> int:
        """Of a vector as it is stored."""
        return self.width * int(self.stored_type[2:])


def manifest_of(output: Path) -> Path:
    """Where the manifest of an output lies."""
    return output.with_name(f"{output.name}.manifest.json")


@contextmanager
def held(output: Path) -> Iterator[None]:
    """Inside, no other process writes the output. The system lets go of it however a process ends.

    Raises:
        VramfitError: another process writes it.
    """
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    with suppress(OSError):  # a file system without locks, or a folder that nothing can be written to
        try:
            lock.acquire(timeout=0)
        except Timeout:
            told = f"another process writes {output}"
            raise VramfitError(told, hint="wait until it has ended, or choose another --output") from None
    try:
        yield
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def look_at_manifest(output: Path, *, resume: bool) -> Manifest | None:
    """The manifest of a run that has ended, where it is gone on with; None where what it was whole of is gone.

    Raises:
        VramfitError: rows of another run are there and nothing was said of them, or a manifest that is damaged.
    """
    path, is_begun = manifest_of(output), Spool(output, 0).vectors.exists()
    try:
        found = from_json(Manifest, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, RecordError) as error:
        if not resume and not is_begun:
            return None
        raise VramfitError(f"cannot read {path}: {error}", hint=f"delete {path} to begin anew") from None
    if resume:
        return found if is_begun or output.exists() or not found.is_whole else None
    if not found.is_whole and found.num_vectors and is_begun:
        raise VramfitError(
            f"{output} is not whole: {found.num_vectors:,} vectors of a run that has ended are in {path.parent}",
            hint=f"go on with it: --resume; or delete {path} to begin anew",
        )
    return None


def refuse_others(before: Manifest, settings: dict[str, Any], output: Path) -> None:
    """Raises VramfitError where a manifest is of a run with other settings; names them."""
    names = [name for name in settings if before.settings.get(name) != settings[name]]
    if names:
        told = "; ".join(f"{name} was {before.settings.get(name)!r}, and is {settings[name]!r} now" for name in names)
        raise VramfitError(
            f"{output} was begun with other settings: {told}",
            hint="give the same ones, or choose another --output",
        )


class Spool:
    """Raw rows of vectors and where each is from.

    Args:
        output: the file that is to be.
        offset: bytes that are left free before the first row, for a header.
    """

    def __init__(self, output: Path, offset: int) -> None:
        self.output, self._offset = output, offset
        self.vectors = output.with_name(f"{output.name}.partial")
        self.places = output.with_name(f"{output.name}.partial-index")

    def begin(self, manifest: Manifest) -> None:
        """Rows that the manifest knows of stay; others are cut off.

        Raises:
            VramfitError: some of those rows are not there.
        """
        if not manifest.num_vectors:
            self.keep(manifest)  # in place of one that calls an older output whole
        sizes = (self._offset + manifest.num_vectors * manifest.row_bytes, manifest.num_vectors * PLACE_BYTES)
        for path, num_bytes in zip((self.vectors, self.places), sizes, strict=True):
            held = path.stat().st_size if path.exists() else 0
            if manifest.num_vectors and held < num_bytes:
                raise VramfitError(
                    f"{path} has {held:,} bytes, and the manifest says {num_bytes:,}",
                    hint=f"delete {manifest_of(self.output)} to begin anew",
                )
            self._write(path, b"", num_bytes)

    def add(self, vectors: "Array", places: "Array", manifest: Manifest) -> None:
        """One more part.

        Args:
            vectors: as they are stored.
            places: number and line of each row.
            manifest: what is there with it.

        Raises:
            VramfitError: it cannot be written; what was there before stays whole.
        """
        self._write(self.vectors, vectors.tobytes())
        self._write(self.places, places.astype("<i8").tobytes())
        self.keep(manifest)

    def keep(self, manifest: Manifest) -> None:
        """Replace the manifest."""
        replace_file(manifest_of(self.output), to_json(manifest, indent=None).encode())

    def _write(self, path: Path, content: bytes, at: int | None = None) -> None:
        """Append, or cut to a size first."""
        try:
            with path.open("r+b" if path.exists() else "w+b") as file:
                if at is not None:
                    file.truncate(at)
                file.seek(0, os.SEEK_END)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            lost = cannot_write(path, error, num_bytes=len(content))
            lost.hint = f"{lost.hint}; then go on after the last whole part: --resume"
            raise lost from None

    def blocks(self, manifest: Manifest) -> "Iterator[tuple[Array, Array]]":
        """Vectors and their places, some thousands at a time."""
        import numpy as np

        with self.vectors.open("rb") as vectors, self.places.open("rb") as places:
            vectors.seek(self._offset)
            for begin in count(0, BLOCK_ROWS):
                num_rows = min(BLOCK_ROWS, manifest.num_vectors - begin)
                if num_rows <= 0:
                    return
                read = np.frombuffer(vectors.read(num_rows * manifest.row_bytes), manifest.stored_type)
                yield (
                    read.reshape(num_rows, manifest.width),
                    np.frombuffer(places.read(num_rows * PLACE_BYTES), "<i8").reshape(num_rows, 2),
                )

    def close(self, manifest: Manifest) -> None:
        """What the manifest calls whole is whole: raw rows behind a header take the output's place, others go.

        May be called again, after a run that ended in between.
        """
        self.keep(replace(manifest, is_whole=True))
        if self._offset and self.vectors.exists():
            os.replace(self.vectors, self.output)
        self.vectors.unlink(missing_ok=True)
        self.places.unlink(missing_ok=True)


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
    else:
        index_of(spool.output).unlink(missing_ok=True)  # of what was there before
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
