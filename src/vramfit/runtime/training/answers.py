"""`Answers`: what a teacher says of every sample, computed once and kept on the disk beside the run.

A file for each kind of answer holds the numbers of one sample after another; the manifest is replaced after those of a
part are on the disk. Whatever ends a run, the next one goes on after the last whole part.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vramfit.errors import VramfitError
from vramfit.records.codec import RecordError, cannot_write, from_json, replace_file, to_json
from vramfit.step.plain import Batch
from vramfit.units import format_bytes

FOLDER = "teacher"
"""Of the answers, in the folder of a run."""
MANIFEST = "manifest.json"
OUTSIDE = -np.inf
"""The logit of a place that is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerKind:
    """One kind of answer."""

    name: str
    """What a batch calls it."""
    width: int
    """Numbers of each row."""
    by_token: bool
    """Whether a sample has a row for each token; otherwise one."""
    number: str = "float32"
    """numpy's name of the numbers on the disk."""
    is_flat: bool = False
    """Whether the rows of a sample lie side by side in a batch: logits of places."""

    @property
    def row_bytes(self) -> int:
        """Of a row on the disk."""
        return self.width * np.dtype(self.number).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerManifest:
    """What the files hold, and how far they are."""

    source: dict[str, str]
    """The teacher and the data, as their fingerprints say."""
    kinds: tuple[AnswerKind, ...]
    num_done: int = 0
    """Samples whose answers are whole."""


def num_answer_bytes(kinds: Sequence[AnswerKind], lengths: Sequence[int]) -> int:
    """Bytes on the disk of the answers to samples of these lengths."""
    return sum((sum(lengths) if kind.by_token else len(lengths)) * kind.row_bytes for kind in kinds)


class Answers:
    """The answers of a teacher for samples of these lengths.

    Args:
        folder: where they are kept; made where it is not there.
        manifest: what they are to be, at the start.
        lengths: tokens of each sample.

    Raises:
        VramfitError: the answers in the folder are those of another teacher or to other data, or there is no room.
    """

    def __init__(self, folder: Path, manifest: AnswerManifest, lengths: Sequence[int]) -> None:
        self.folder, self._lengths = folder, lengths
        self._token_ends = [0, *accumulate(lengths)]
        self.manifest = self._begun(manifest)
        self._views: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Of all files, once they are whole."""
        return num_answer_bytes(self.manifest.kinds, self._lengths)

    @property
    def is_whole(self) -> bool:
        """Whether every sample has its answers."""
        return self.manifest.num_done == len(self._lengths)

    def add(self, parts: dict[str, list[Any]]) -> None:
        """Answers for the next samples: for each kind an array a sample, with a row or a row for each token.

        Raises:
            VramfitError: they cannot be written; what was there before stays whole.
        """
        done, num_new = self.manifest.num_done, 0
        for kind in self.manifest.kinds:
            rows = np.concatenate([value.reshape(-1, kind.width) for value in parts[kind.name]])
            num_new = len(parts[kind.name])
            self._write(kind, rows.astype(kind.number).tobytes(), at=self._end(kind, done) * kind.row_bytes)
        self._keep(replace(self.manifest, num_done=done + num_new))

    def of(self, rows: Sequence[int], width: int) -> Batch:
        """Those for some samples, as tensors of a batch that is so many tokens wide."""
        return {kind.name: torch.from_numpy(self._padded(kind, rows, width)) for kind in self.manifest.kinds}

    def remove(self) -> None:
        """Delete the files: the run is finished."""
        self._views.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _padded(self, kind: AnswerKind, rows: Sequence[int], width: int) -> Any:
        values = self._view(kind)
        if not kind.by_token:
            return np.ascontiguousarray(values[list(rows)])
        made = np.full((len(rows), width, kind.width), OUTSIDE if kind.is_flat else 0, dtype=kind.number)
        for line, row in zip(made, rows, strict=True):
            begin, end = self._token_ends[row], self._token_ends[row + 1]
            line[: end - begin] = values[begin:end]
        return made[:, :, 0] if kind.is_flat else made

    def _view(self, kind: AnswerKind) -> Any:
        if kind.name not in self._views:
            shape = (self._end(kind, len(self._lengths)), kind.width)
            self._views[kind.name] = np.memmap(self._path(kind), dtype=kind.number, mode="r", shape=shape)
        return self._views[kind.name]

    def _end(self, kind: AnswerKind, num_samples: int) -> int:
        """Rows of the first samples."""
        return self._token_ends[num_samples] if kind.by_token else num_samples

    def _path(self, kind: AnswerKind) -> Path:
        return self.folder / f"{kind.name}.bin"

    def _begun(self, wanted: AnswerManifest) -> AnswerManifest:
        """The manifest that is there, or the one that is wanted where nothing is."""
        path = self.folder / MANIFEST
        try:
            found = from_json(AnswerManifest, path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.manifest = wanted
            self._check_room()
            self._keep(wanted)
            return wanted
        except (OSError, UnicodeDecodeError, RecordError) as error:
            raise VramfitError(f"cannot read {path}: {error}", hint=f"delete {self.folder} to begin anew") from None
        changed = [name for name, value in wanted.source.items() if found.source.get(name) != value]
        if changed or found.kinds != wanted.kinds:
            what = " and ".join(changed) or "kind of answers"
            raise VramfitError(
                f"{self.folder} holds a teacher's answers of another run: the {what} changed since",
                hint=f"give the same, choose another --output, or delete {self.folder} to ask the teacher anew",
            )
        return found

    def _check_room(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(self.folder).free
        if self.num_bytes > free_bytes:
            raise VramfitError(
                f"the teacher's answers to {len(self._lengths):,} samples take {format_bytes(self.num_bytes)}, and "
                f"{self.folder} has {format_bytes(free_bytes)} free",
                hint="learn from logits alone (--distill logits), from fewer rows (--max-rows), or make room",
            )

    def _keep(self, manifest: AnswerManifest) -> None:
        replace_file(self.folder / MANIFEST, to_json(manifest).encode())
        self.manifest = manifest

    def _write(self, kind: AnswerKind, content: bytes, *, at: int) -> None:
        path = self._path(kind)
        try:
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(at)
                file.seek(0, os.SEEK_END)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(path, error, num_bytes=len(content)) from None
