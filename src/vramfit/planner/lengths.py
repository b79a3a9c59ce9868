"""`Lengths`: how long samples really are, from a list, a file of numbers, or texts and a tokenizer."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median_low
from typing import Any

from vramfit.errors import CheckpointError, VramfitError
from vramfit.models.tokenizers import load_tokenizer
from vramfit.records.plan import LengthSummary

MAX_ROWS = 200_000
"""Rows whose tokens are counted; beyond them, a sample as long as the model allows is expected."""
CHUNK = 1024
SEPARATORS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of each sample."""

    values: tuple[int, ...]
    source: str
    """Where they come from."""
    num_truncated: int = 0
    """Samples that are cut."""
    complete: bool = True
    """Whether every sample was seen."""

    @property
    def longest(self) -> int:
        return max(self.values)

    @property
    def varies(self) -> bool:
        return min(self.values) < self.longest

    def cut(self, limit: int) -> "Lengths":
        """The same samples cut to a limit; where not all of them were seen, one as long as it is expected."""
        num_cut = sum(n > limit for n in self.values)
        values = [min(n, limit) for n in self.values]
        if not self.complete:
            values[0] = limit
        return replace(self, values=tuple(values), num_truncated=num_cut)

    def summary(self) -> LengthSummary:
        """For the plan."""
        return LengthSummary(
            num_samples=len(self.values),
            mean=mean(self.values),
            median=median_low(self.values),
            longest=self.longest,
            num_truncated=self.num_truncated,
            source=self.source,
        )


def lengths_of(given: Any) -> Lengths:
    """Lengths from a list of numbers, or a text file with one number a line.

    Raises:
        VramfitError: a file that cannot be read, nothing in it, or something that is no number of tokens.

    >>> lengths_of([12, 512, 80]).longest
    512
    """
    if isinstance(given, Lengths):
        return given
    if isinstance(given, str | Path):
        try:
            lines = Path(given).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise VramfitError(f"cannot read {given}: {why}", hint="give a file with one length a line") from None
        return _checked(lines, str(given))
    return _checked(given, "a list")


def _checked(values: Iterable[Any], source: str) -> Lengths:
    counts = []
    for number, value in enumerate(values, 1):
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
            raise VramfitError(
                f"lengths, {source}: number {number} is {text[:40]!r}, not a number of tokens",
                hint="one whole number from 1 for each sample",
            )
        counts.append(int(text))
    if not counts:
        raise VramfitError(f"lengths, {source}: nothing in it", hint="one whole number from 1 for each sample")
    return Lengths(values=tuple(counts), source=source)


def lengths_from_data(path: str | Path, *, text_column: str, tokenizer: str) -> Lengths:
    """Lengths of the texts of a CSV, TSV or JSONL file, counted by a tokenizer, special tokens included.

    Args:
        text_column: its name; two with a comma between them make a pair of texts.
        tokenizer: a folder with a tokenizer, or a hub id.

    Raises:
        VramfitError: a file, a column or a tokenizer that is not there, or cannot be read.
    """
    columns = [name.strip() for name in text_column.split(",")]
    rows = _rows(Path(path), columns)
    count = _counter(tokenizer)
    values: list[int] = []
    while len(values) < MAX_ROWS and (chunk := list(islice(rows, CHUNK))):
        values += count(chunk)
    if not values:
        raise VramfitError(f"{path} has no rows", hint="a header line, then one sample a row")
    complete = next(rows, None) is None
    first = "" if complete else f"the first {len(values):,} rows of "
    return Lengths(values=tuple(max(n, 1) for n in values), source=f"{first}{path}", complete=complete)


def _rows(path: Path, columns: list[str]) -> Iterator[tuple[str, ...]]:
    """The texts of each row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix in (".jsonl", ".ndjson"):
                records: Iterable[Any] = (json.loads(line) for line in file if line.strip())
            elif path.suffix in SEPARATORS:
                records = csv.DictReader(file, delimiter=SEPARATORS[path.suffix])
            else:
                raise VramfitError(f"{path} is not .csv, .tsv or .jsonl", hint="the ending says how it is read")
            for record in records:
                missing = [c for c in columns if not isinstance(record, dict) or c not in record]
                if missing:
                    known = ", ".join(map(str, list(record)[:8])) if isinstance(record, dict) else "no columns"
                    raise VramfitError(f"{path} has no column {missing[0]!r}; it has {known}", hint="--text-column")
                yield tuple(str(record[c] or "") for c in columns)
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise VramfitError(f"cannot read {path}: {error}", hint="CSV and TSV with a header line, or JSONL") from None


def _counter(name: str) -> Any:
    """A function from texts to token counts."""
    try:
        tokenizer = load_tokenizer(name)
    except CheckpointError as error:
        raise VramfitError(str(error), hint="name the folder that holds tokenizer.json (--tokenizer)") from None

    def count(chunk: list[tuple[str, ...]]) -> list[int]:
        parts = [list(column) for column in zip(*chunk, strict=True)]
        made = tokenizer(*parts, truncation=False, verbose=False)
        return [len(ids) for ids in made["input_ids"]]

    return count
