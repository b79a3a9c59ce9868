"""Vectors on their way to a file: raw rows that grow part by part, and a manifest that says how many of them are whole.

The manifest is replaced after the rows of a part are on the disk. Whatever ends a run, rows beyond it are cut off when
the next one goes on.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramfit.errors import VramfitError
from vramfit.records.codec import RecordError, cannot_write, from_json, replace_file, to_json
from vramfit.runtime.encoding.request import STORED
from vramfit.runtime.encoding.texts import START, Position

if TYPE_CHECKING:
    from vramfit.runtime.encoding.outputs import Array

BLOCK_ROWS = 8192
"""Rows of a block that is read again, and of a row group."""
PLACE_BYTES = 16
"""Of a vector's row: its number among all rows from 0, and the line it begins on, as two integers of 8 bytes."""


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


def look_at_manifest(output: Path, *, resume: bool) -> Manifest | None:
    """The manifest of a run that has ended, where it is gone on with.

    Raises:
        VramfitError: rows of another run are there and nothing was said of them, or a manifest that is damaged.
    """
    path = manifest_of(output)
    try:
        found = from_json(Manifest, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, RecordError) as error:
        if not resume and not Spool(output, 0).vectors.exists():
            return None
        raise VramfitError(f"cannot read {path}: {error}", hint=f"delete {path} to begin anew") from None
    if resume:
        return found
    if not found.is_whole and found.num_vectors and Spool(output, 0).vectors.exists():
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
