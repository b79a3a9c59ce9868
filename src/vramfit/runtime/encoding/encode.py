"""`encode`: vectors of texts, from a model and any data to a file or an array."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vramfit.errors import DataError, VramfitError
from vramfit.runtime.data import ahead
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.encoding.model import (
    FEW_VECTORS,
    Array,
    Encoder,
    check_calibration,
    ranges_of,
    stored,
    stored_width,
)
from vramfit.runtime.encoding.outputs import Manifest, Spool, finish, format_of, held, look_at_manifest, refuse_others
from vramfit.runtime.encoding.request import EncodeReport, EncodeRequest
from vramfit.runtime.encoding.texts import START, TextPart, TextStream, open_stream
from vramfit.stages import tell
from vramfit.tasks.parts.reading import encode_texts

OnPart = Callable[[TextPart, Array, int], None]
"""Takes a part, its vectors in its order, and how many of its texts were cut."""


def encode(model: str, data: str | Iterable[str], *, output: str | None = None, **settings: Any) -> Any:
    """Vectors of texts, equal to those of sentence-transformers.

    Args:
        model: a sentence-transformers folder, or any encoder.
        data: the name of a file as every verb reads it, or texts.
        output: `.npy`, `.safetensors`, `.jsonl` or `.parquet`; a file of any size is streamed to it. None gives an
            array.
        settings: fields of `EncodeRequest`: `dtype`, `dims`, `prompt`, `resume`, `memory` and others.

    Returns an array with a row for each text; with an output, an `EncodeReport`.

    Raises:
        WorkloadError: settings that contradict each other.
        DataError: data that cannot be read, or rows that cannot be used.
        UnknownModel, CheckpointError: no model there, or one that vramfit cannot compute.
        NoPlanFits: not even one text fits the memory.

    >>> encode("./my-embedder", ["a text", "another"], device="cpu").shape  # doctest: +SKIP
    (2, 384)
    """
    request = EncodeRequest(model=model, output=output, **settings)
    if request.output is None:
        return _to_array(request, data)
    return encode_to_file(request, data)


def encode_to_file(request: EncodeRequest, data: str | Iterable[str]) -> EncodeReport:
    """The same with an output.

    Raises:
        KeyboardInterrupt: says what is kept.
    """
    request.look_at_output(data)
    with held(request.path):
        run = _FileRun(request, data)
        try:
            return run.run()
        except KeyboardInterrupt:
            kept = run.manifest.num_vectors if run.manifest is not None else 0
            told = f"{kept:,} vectors are kept; go on after them: --resume" if kept else "no vector was written yet"
            raise KeyboardInterrupt(told) from None


class _FileRun:
    """A stream of texts to a file.

    Args:
        request: with an output.
        data: as `encode` takes it.
    """

    def __init__(self, request: EncodeRequest, data: str | Iterable[str]) -> None:
        self._request, self._data = request, data
        self._spool = Spool(request.path, format_of(request.path).offset)
        self.manifest = look_at_manifest(request.path, resume=request.resume)
        """What is kept."""
        self._notes: list[str] = []

    def run(self) -> EncodeReport:
        request, before = self._request, self.manifest
        encoder = Encoder(request)
        if before is not None:
            refuse_others(before, encoder.identity, request.path)
        stream = _stream(request, self._data)
        stream.pass_over(before.end if before is not None else START)
        if before is not None and before.is_whole:
            self._spool.close(before)
            _refuse_more(stream, request)
            self._notes.append("all vectors were there already")
            return self._report(encoder, 0, 0.0)
        encoder.load()
        width = stored_width(request.dtype, encoder.width)
        self.manifest = before or Manifest(settings=encoder.identity, width=width)
        self._spool.begin(self.manifest)
        ranges = _calibrated(request, encoder) if not self.manifest.ranges else np.array(self.manifest.ranges, "<f4")
        num_before, begin = self.manifest.num_vectors, time.perf_counter()
        each_part(
            encoder, stream.parts(encoder.part_rows), lambda part, vectors, cut: self._take(part, vectors, cut, ranges)
        )
        seconds = time.perf_counter() - begin
        tell(f"writing {request.path.name}")
        finish(self._spool, self.manifest, indexes=request.skip_bad_rows or self.manifest.end.num_bad > 0)
        return self._report(encoder, self.manifest.num_vectors - num_before, seconds)

    def _take(self, part: TextPart, vectors: Array, num_cut: int, ranges: Array | None) -> None:
        manifest, request = self.manifest, self._request
        assert manifest is not None
        if request.needs_ranges and not manifest.ranges:
            if ranges is None:
                check_calibration(len(vectors), request.dtype)
                self._notes.append(_said_of_ranges(len(vectors), request))
            found = ranges if ranges is not None else ranges_of(vectors)
            manifest = replace(manifest, ranges=tuple(tuple(float(n) for n in row) for row in found))
        held = np.array(manifest.ranges, "<f4") if manifest.ranges else None
        places = np.array([(r["index"], r["row"]) for r in part.references], "<i8").reshape(-1, 2)
        manifest = replace(
            manifest,
            num_vectors=manifest.num_vectors + len(vectors),
            num_truncated=manifest.num_truncated + num_cut,
            end=part.end,
        )
        self._spool.add(stored(vectors, request.dtype, held), places, manifest)
        self.manifest = manifest

    def _report(self, encoder: Encoder, num_encoded: int, seconds: float) -> EncodeReport:
        manifest = self.manifest
        assert manifest is not None
        return EncodeReport(
            output=str(self._request.path),
            num_vectors=manifest.num_vectors,
            width=manifest.width,
            dtype=self._request.dtype,
            arithmetic=encoder.arithmetic,
            prompt=encoder.prompt,
            num_rows=manifest.end.num_rows,
            num_bad_rows=manifest.end.num_bad,
            first_bad_row=manifest.end.first_bad,
            num_truncated=manifest.num_truncated,
            max_length=encoder.trained.max_length,
            num_encoded=num_encoded,
            seconds=seconds,
            num_recoveries=encoder.num_recoveries,
            reserved_bytes=encoder.run_device.reserved_bytes,
            notes=tuple(self._notes),
        )


def _said_of_ranges(num_vectors: int, request: EncodeRequest) -> str:
    few = "; so few give unsteady ranges: --calibration FILE takes others" if num_vectors < FEW_VECTORS else ""
    return f"ranges of {request.dtype} are those of the first {num_vectors:,} vectors{few}"


def _refuse_more(stream: TextStream, request: EncodeRequest) -> None:
    """Raises DataError where there are rows behind those of an output that is whole."""
    more = next(stream.parts(), None)
    if more is not None:
        raise DataError(
            f"the data has more rows than {request.path}, which is whole",
            hint="encode the rows that are new by themselves, or begin anew without --resume",
        )


def _to_array(request: EncodeRequest, data: str | Iterable[str]) -> Array:
    encoder = Encoder(request)
    encoder.load()
    ranges = _calibrated(request, encoder)
    waits = request.needs_ranges and ranges is None  # for all of them, as sentence-transformers does
    pieces: list[Array] = []
    each_part(
        encoder,
        _stream(request, data).parts(encoder.part_rows),
        lambda part, vectors, cut: pieces.append(vectors if waits else stored(vectors, request.dtype, ranges)),
    )
    made = np.concatenate(pieces)
    if not waits:
        return made
    check_calibration(len(made), request.dtype)
    return stored(made, request.dtype, ranges_of(made))


def _stream(request: EncodeRequest, data: str | Iterable[str]) -> TextStream:
    return open_stream(data, text_column=request.text_column, max_rows=request.max_rows, skips=request.skip_bad_rows)


def _calibrated(request: EncodeRequest, encoder: Encoder) -> Array | None:
    """Ranges of a file of texts that is named for them; None where none is."""
    if request.calibration is None:
        return None
    found: list[Array] = []
    num_vectors = 0

    def take(part: TextPart, vectors: Array, num_cut: int) -> None:
        nonlocal num_vectors
        found[:] = [ranges_of(vectors, found[0] if found else None)]
        num_vectors += len(vectors)

    stream = open_stream(request.calibration, text_column=None, max_rows=None, skips=False)
    each_part(encoder, stream.parts(encoder.part_rows), take)
    check_calibration(num_vectors, request.dtype)
    return found[0]


@dataclass(slots=True)
class _Filling:
    """A part whose vectors arrive, the longest texts first."""

    part: TextPart
    samples: Samples
    vectors: Array
    num_left: int


def each_part(encoder: Encoder, parts: Iterable[TextPart], on_part: OnPart) -> None:
    """Pass texts through a model, and hand on the vectors of each part, in order, once all of them are there.

    Raises:
        RecoveryExhausted: a single text does not fit.
        VramfitError: a vector that is not of finite numbers.
    """
    filling: deque[_Filling] = deque()
    begin = time.perf_counter()

    def sent() -> Iterator[Samples]:
        for part, samples in _tokenized(parts, encoder):
            vectors = np.empty((len(samples), encoder.width), np.float32)
            filling.append(_Filling(part, samples, vectors, len(samples)))
            if len(samples):
                yield samples

    def take(samples: Samples, output: Any, batch: Any, rows: list[int]) -> None:
        one = next(one for one in filling if one.samples is samples)
        one.vectors[rows] = encoder.cut(output.embedding.float()).cpu().numpy()
        one.num_left -= len(rows)
        hand_on()

    def hand_on() -> None:
        while filling and not filling[0].num_left:
            one = filling.popleft()
            _check_finite(one)
            on_part(one.part, one.vectors, one.samples.num_truncated)

    def told(num_done: int) -> None:
        seconds = max(time.perf_counter() - begin, 1e-9)
        tell(f"{num_done:,} texts done, {num_done / seconds:,.0f} texts/s")

    encoder.inference.run_parts(sent(), take, told)
    hand_on()


def _tokenized(parts: Iterable[TextPart], encoder: Encoder) -> Iterator[tuple[TextPart, Samples]]:
    """Each part with its tokens, made while the part before it is in use. Rows are read by the caller's thread."""
    how = encoder.trained.tokenizing

    def make(part: TextPart) -> tuple[TextPart, Samples]:
        return part, Samples(encoder.trained.task, encode_texts(part.references, how), how)

    return ahead(make, parts)


def _check_finite(one: _Filling) -> None:
    wrong = np.flatnonzero(~np.isfinite(one.vectors).all(1))
    if len(wrong):
        row = one.part.references[int(wrong[0])]["row"]
        raise VramfitError(
            f"row {row}: its vector has numbers that are not finite",
            hint="compute in fp32: --exact; where that gives the same, the weights are damaged: vramfit doctor",
        )
