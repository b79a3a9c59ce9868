"""`Receipt`: what was predicted for a job and what a GPU then took, in a file that can be shown to others.

A receipt names no path, no user and no host: a model is a name of the catalogue or a digest of its configuration. Its
own digest shows damage and careless edits. It is no signature: whoever changes a receipt can make a new digest.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, Literal

from vramfit.errors import VramfitError, WorkloadError
from vramfit.records.codec import RecordError, from_json, replace_file, to_data, to_json
from vramfit.records.estimate import Basis
from vramfit.units import format_bytes
from vramfit.workload import Workload

DIGEST = "sha256:"
PUBLIC_TEXT = re.compile(r"[\w.,:;*+()\[\]≤ -]{0,120}")
"""Texts of a receipt have no slash, backslash, @ or ~: no path and no address gets through."""
MAX_BYTES = 100_000
"""A receipt has two kilobytes."""
NUM_NEEDED = 3
"""Receipts of different jobs that make a card and a torch release count as measured."""
MOST_OFF = 0.01
"""Of the allocated and the reserved peak, in each of them."""
MOST_BELOW, LEAST_BELOW_BYTES = 0.001, 2 * 2**20
"""A prediction is too low when it is below the measurement by more than both: accuracy.md counts so too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptFigures:
    """Peaks of a job, and how long its step took."""

    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int | None = None
    """None for a run of `vramfit train`, which does not ask for it."""
    step_time_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One job, predicted and then run."""

    kind: Literal["measure", "train"]
    """The verb that ran it."""
    is_emulated: bool
    """Whether it ran on the emulated GPU: then it proves nothing about a card."""
    date: str
    """The day, as 2026-11-18."""
    vramfit_version: str
    torch_version: str
    transformers_version: str
    driver_version: str | None
    gpu: str
    """As the driver calls it."""
    compute_capability: tuple[int, int] | None
    """None for the emulated GPU."""
    total_memory_bytes: int
    """As CUDA reports it."""
    model: str
    """A name of the catalogue, or a digest of the configuration."""
    settings: Mapping[str, Any]
    """The settings of the workload that were not left alone."""
    predicted_gpu: str | None
    """The catalogue's name of the GPU that was predicted for."""
    basis: Basis
    predicted: ReceiptFigures
    predicted_fits: bool | None
    promised_bytes: int | None
    """The most that was promised to be reserved: for a run, what its allocator was held to."""
    measured: ReceiptFigures
    ran_out: bool
    """Whether memory ran out; of a run of `vramfit train`, whether a step had to be done again."""
    num_retries: int
    context_bytes: int | None
    """What the process held outside PyTorch; None where the driver does not say."""
    digest: str = ""

    @property
    def torch_release(self) -> tuple[int, int]:
        """Such as (2, 11)."""
        numbers = re.match(r"(\d{1,4})\.(\d{1,4})", self.torch_version)
        return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)

    def error(self, figure: str) -> float:
        """Predicted less measured, as a share of what was measured."""
        predicted, measured = (getattr(f, f"{figure}_bytes") for f in (self.predicted, self.measured))
        return float(predicted - measured) / measured if measured else 0.0

    @property
    def is_too_low(self) -> bool:
        """Whether less was predicted than was taken, by more than placement explains, or a job that fits ran out."""
        for figure in ("allocated_bytes", "reserved_bytes"):
            measured = getattr(self.measured, figure)
            missing = measured - getattr(self.predicted, figure)
            if missing > max(MOST_BELOW * measured, LEAST_BELOW_BYTES):
                return True
        return self.ran_out and self.predicted_fits is True

    @property
    def agrees(self) -> bool:
        """Whether it speaks for the rules of its card.

        A run is on batches of many lengths: what is promised of it is an upper bound, not a figure.
        """
        if self.kind == "train":
            is_inside = self.promised_bytes is None or self.measured.reserved_bytes <= self.promised_bytes
            return is_inside and not self.ran_out
        is_near = all(abs(self.error(figure)) <= MOST_OFF for figure in ("allocated", "reserved"))
        return is_near and not self.is_too_low


def digest_of(receipt: Receipt) -> str:
    """The digest of all that a receipt says."""
    content = json.dumps(to_data(replace(receipt, digest="")), sort_keys=True, ensure_ascii=False)
    return DIGEST + hashlib.sha256(content.encode()).hexdigest()


def write_receipt(receipt: Receipt, path: Path) -> None:
    """Write a receipt with its digest.

    Raises:
        VramfitError: something in it is not fit to be shown, or the path cannot be written.
    """
    sealed = replace(receipt, digest=digest_of(receipt))
    problems = list(problems_of(sealed))
    if problems:
        raise VramfitError(f"no receipt is written: {'; '.join(problems)}")
    replace_file(path, (to_json(sealed) + "\n").encode())


def read_receipt(path: Path) -> Receipt:
    """A receipt from a file.

    Raises:
        RecordError: it is damaged, was changed, or says what cannot be; with every reason.
    """
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= MAX_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecordError(f"cannot read {path.name}: {reason}") from None
    if not text:
        raise RecordError(f"{path.name} has {format_bytes(size)}, and a receipt has a few thousand bytes")
    receipt = from_json(Receipt, text)
    problems = list(problems_of(receipt))
    if problems:
        raise RecordError("; ".join(problems))
    return receipt


def problems_of(receipt: Receipt) -> Iterator[str]:
    """What is wrong with a receipt in itself."""
    if receipt.digest != digest_of(receipt):
        yield "the digest is not that of the content: the file is damaged or was changed"
    if not _is_day(receipt.date):
        yield f"date {receipt.date[:20]!r} is not a day such as 2026-11-18"
    for name, text in _texts(to_data(receipt)):
        if name != "digest" and not PUBLIC_TEXT.fullmatch(text):
            yield f"{name} has characters that a receipt does not hold, such as those of a path"
    for words, figures in (("predicted", receipt.predicted), ("measured", receipt.measured)):
        yield from (f"{words}: {problem}" for problem in _out_of_order(figures))
    if receipt.measured.reserved_bytes > receipt.total_memory_bytes:
        yield (
            f"measured: {format_bytes(receipt.measured.reserved_bytes)} reserved is more than the "
            f"{format_bytes(receipt.total_memory_bytes)} of the GPU"
        )
    if receipt.context_bytes is not None and not 0 <= receipt.context_bytes <= receipt.total_memory_bytes:
        yield f"a context of {format_bytes(receipt.context_bytes)} is not inside the GPU's memory"
    if receipt.num_retries < 0:
        yield "num_retries is below 0"
    try:
        Workload.from_keywords(model=receipt.model, **receipt.settings)
    except (WorkloadError, TypeError) as error:
        yield f"settings: {error}"


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text in plain data, keys included, with the field it is in."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield name or key, key
            yield from _texts(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, name)


def _out_of_order(figures: ReceiptFigures) -> Iterator[str]:
    """Figures must be 0 < requested ≤ allocated ≤ reserved."""
    named = {"requested": figures.requested_bytes, "allocated": figures.allocated_bytes}
    named |= {"reserved": figures.reserved_bytes}
    known = [(name, value) for name, value in named.items() if value is not None]
    for (name, value), (next_name, next_value) in pairwise(known):
        if value > next_value:
            yield f"{name} {value:,} B is more than {next_name} {next_value:,} B"
    if known[0][1] <= 0:
        yield f"{known[0][0]} {known[0][1]:,} B is not above 0"
    if figures.step_time_s is not None and not 0 < figures.step_time_s < inf:
        yield f"a step of {figures.step_time_s} s"


def measured_pairs(receipts: Iterable[Receipt]) -> dict[tuple[tuple[int, int], tuple[int, int]], int]:
    """(torch release, compute capability) that receipts make count as measured → how many receipts say so.

    That takes `NUM_NEEDED` receipts of `measure`, of different jobs, and no receipt that disagrees. Those of the
    emulated GPU do not count.
    """
    jobs: dict[tuple[tuple[int, int], tuple[int, int]], set[str]] = {}
    refuted = set()
    for receipt in receipts:
        if receipt.is_emulated or receipt.compute_capability is None:
            continue
        pair = (receipt.torch_release, receipt.compute_capability)
        job = f"{receipt.model} {json.dumps(to_data(receipt.settings), sort_keys=True)}"
        jobs.setdefault(pair, set()).update([job] if receipt.kind == "measure" else [])
        if not receipt.agrees:
            refuted.add(pair)
    return {pair: len(found) for pair, found in jobs.items() if len(found) >= NUM_NEEDED and pair not in refuted}
