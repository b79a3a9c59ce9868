"""`Samples`: a data set, tokenized once and kept compactly on the host."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from vramfit.errors import CheckpointError, VramfitError, WorkloadError
from vramfit.models.tokenizers import load_tokenizer
from vramfit.planner.request import Lengths
from vramfit.runtime.data import ahead
from vramfit.runtime.data.examples import Examples, read_examples
from vramfit.runtime.data.order import TextGroups
from vramfit.runtime.data.source import DataSource, without_labels
from vramfit.stages import tell
from vramfit.step.plain import Batch
from vramfit.tasks import find_task
from vramfit.tasks.base import BatchRows
from vramfit.tasks.parts.heads import REGRESSION, SINGLE
from vramfit.tasks.parts.reading import CHUNK_ROWS, Encoded, Tokenizing, check_room, texts_of
from vramfit.tasks.parts.results import RunningMetrics
from vramfit.techniques.packing import padded_width
from vramfit.units import counted

IDS, NUMBERS, OFFSETS = "i", "d", "q"
"""Types of arrays: tokens and classes, labels that are numbers, places."""
MAX_ROWS = 200_000
"""Rows whose tokens are counted; beyond them, a sample as long as the model allows is expected."""
WHOLE = 2**20
"""Tokens of a text at most: it is counted before it is cut. Questions are read in windows as they are trained."""
LONGEST = 512
"""Tokens of a sequence where neither the model nor the request says."""
STRIDE = 128
"""Tokens that two windows of a long context share, in question answering."""
TOLD_ROWS = CHUNK_ROWS
"""Rows after which it is told how many are tokenized."""
PART_ROWS = 256
"""Rows of a part that is read ahead: a tokenizer needs about as long for them as a large GPU."""


class Samples:
    """Samples ready to be batched; made by `read_samples`.

    Args:
        task: what they are for.
        encoded: the samples, one after another; each window of a long text is one, where the task reads windows.
        how: their tokenizer, the most tokens a sample may have, and the names of the classes.
        examples: what they were read from: rows that were kept out, what to know of the labels.
        hiding: how tokens are hidden, for a task that learns from those.
    """

    def __init__(
        self,
        task: str,
        encoded: Iterable[Encoded],
        how: Tokenizing,
        examples: Examples | None = None,
        hiding: Any = None,
    ) -> None:
        self.task = task
        self.label_names = tuple(how.label_names)
        """Names of the classes in the order of their numbers; none for a task without classes."""
        self.bad_rows = () if examples is None else examples.bad_rows
        """Rows that were kept out."""
        self.notes = () if examples is None else examples.notes
        """What to know of the labels, in words."""
        self.references: list[dict[str, Any]] = []
        """What metrics and predictions need of each sample: its row, its text, what is true of it."""
        self.num_truncated = 0
        """Rows longer than the length: cut, or read in several windows."""
        self.longest_before_truncation = 0
        """Tokens of the longest row."""
        self._kind, self._pad_id, self._hiding = find_task(task), how.tokenizer.pad_token_id or 0, hiding
        self._ids, self._types = TokenStore(), TokenStore()
        self.how = how
        """As given: what labels mean."""
        self._labels = TokenStore(NUMBERS if self._kind.learns_numbers or how.problem == REGRESSION else IDS)
        self._gather(encoded, how.max_length)
        self._has_types = "token_type_ids" in how.tokenizer.model_input_names and self._types.any()
        self.lengths = self._ids.lengths()
        """Tokens of each sample, as cut."""
        self.widths = self._widths()
        """Columns of a batch in which it is the longest."""
        self._groups: TextGroups | None = None
        if self._kind.losses and self.references and "place" in self.references[0]:
            self._groups = TextGroups(self._kind, self.references, self.lengths)
        self.targets: Targets | None = None
        """A teacher's answers, which batches to learn from have too."""
        self.fingerprint = self._hash()
        """Changes with anything that a model would see: a resumed run checks it."""

    def _widths(self) -> Sequence[int]:
        if self._kind.reads_padding:
            return self.lengths
        widest = max(self.lengths, default=0)
        return [padded_width(length, widest) for length in self.lengths]

    def _gather(self, encoded: Iterable[Encoded], max_length: int) -> None:
        last = -1
        for sample in encoded:
            self.references.append(sample.reference)
            self._ids.add(sample.ids)
            self._types.add(sample.token_types)
            self._labels.add(sample.labels)
            number = sample.reference.get("question_number", len(self.references))
            self.num_truncated += sample.full_length > max_length and number != last
            self.longest_before_truncation = max(self.longest_before_truncation, sample.full_length)
            last = number

    def _hash(self) -> str:
        problem = () if self.problem in (None, SINGLE) else (self.problem,)
        known = repr((self.task, self.label_names, self._hiding, *problem))
        digest = hashlib.blake2b(known.encode(), digest_size=16)
        for store in (self._ids, self._types, self._labels):
            store.feed(digest)
        if self._groups is not None:
            self._groups.feed(digest)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def problem(self) -> str | None:
        """What the head learns, of a task whose head may learn several things."""
        return self.how.problem

    @property
    def num_samples(self) -> int:
        """What an effective batch is counted in: rows, or groups of rows where samples are of several texts."""
        return len(self) if self._groups is None else len(self._groups)

    @property
    def texts_per_sample(self) -> int:
        """Rows of a sample."""
        return 1 if self._groups is None else self._groups.texts_per_sample

    @property
    def sample_lengths(self) -> Sequence[int]:
        """Tokens of each sample."""
        return self.lengths if self._groups is None else self._groups.lengths

    @property
    def sample_ids(self) -> Sequence[tuple[int, ...]] | None:
        """Numbers of each sample's texts, by which a batch sees those that come twice; None where none is to."""
        return None if self._groups is None else self._groups.sample_ids

    def collate_samples(self, samples: Sequence[int], *, epoch: int = 0, seed: int = 0) -> Batch:
        """A batch of whole samples to learn from: rows as `collate` has them.

        Of samples of several texts each is a row, sample by sample, with what their loss needs to know.

        Args:
            epoch, seed: which partners are drawn, where samples are made of texts of one class.
        """
        rows = samples if self._groups is None else self._groups.rows(samples, epoch=epoch, seed=seed)
        batch = self.collate(rows, epoch=epoch)
        if self._groups is not None:
            batch |= self._groups.inputs(rows, self._labels)
        return batch if self.targets is None else batch | self.targets.of(rows, batch["input_ids"].shape[1])

    def collate(self, indices: Sequence[int], *, epoch: int = 0) -> Batch:
        """A batch on the host, padded on the right to its longest sample, or a little further for a common width.

        `token_type_ids` are there only where they say something, that is for pairs of texts: without them a model
        takes them as zeros.
        """
        width = max(self.widths[i] for i in indices)
        lengths = [self.lengths[i] for i in indices]
        mask = np.arange(width) < np.array(lengths)[:, None]  # torch would wake all its threads for so little
        batch = {
            "input_ids": self._ids.padded(indices, width, self._pad_id),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        }
        if self._has_types:
            batch["token_type_ids"] = self._types.padded(indices, width, 0)
        truth = self._kind.truth
        are_labelled = truth is not None and self.references[indices[0]].get(truth) is not None
        rows = BatchRows(indices, lengths, epoch, self._labels, are_labelled, self.how)
        return batch | self._kind.batch_labels(batch, rows, self._hiding)


class Targets(Protocol):
    """A teacher's answers for samples."""

    def of(self, rows: Sequence[int], width: int) -> Batch:
        """Those for some samples, as tensors of a batch that is so many tokens wide."""


class TokenStore:
    """Rows of numbers of any length, end to end in flat arrays.

    Args:
        kind: `IDS`, whole numbers in 4 bytes each, or `NUMBERS`.
    """

    def __init__(self, kind: str = IDS) -> None:
        self._values: Any = array(kind)
        self._ends = array(OFFSETS, [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, row: Sequence[float]) -> None:
        """One more row."""
        self._values.extend(row)
        self._ends.append(len(self._values))

    def lengths(self) -> list[int]:
        """Of every row."""
        return [end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False)]

    def num_in(self, index: int) -> int:
        """Numbers of one row."""
        return int(self._ends[index + 1] - self._ends[index])

    def column(self, indices: Sequence[int], place: int) -> torch.Tensor:
        """One number of each of some rows: as torch likes its indices, or in fp32."""
        values = np.array([self._values[self._ends[index] + place] for index in indices])
        return torch.from_numpy(values.astype(np.int64 if self._values.typecode == IDS else np.float32))

    def columns(self, indices: Sequence[int], width: int) -> torch.Tensor:
        """Rows of as many numbers each, under each other."""
        return torch.stack([self.column(indices, place) for place in range(width)], 1)

    def marked(self, indices: Sequence[int], width: int) -> torch.Tensor:
        """For each of some rows, zeros with a one at every place that it names; in fp32."""
        out = np.zeros((len(indices), width), dtype=np.float32)
        for line, index in zip(out, indices, strict=True):
            line[self._values[self._ends[index] : self._ends[index + 1]]] = 1
        return torch.from_numpy(out)

    def padded(self, indices: Sequence[int], width: int, fill: int) -> torch.Tensor:
        """Some rows under each other, filled up to a width."""
        out = np.full((len(indices), width), fill, dtype=np.int64)
        values = np.frombuffer(self._values, dtype=np.int32) if self._values else np.zeros(0, dtype=np.int32)
        for line, index in zip(out, indices, strict=True):
            begin, end = self._ends[index], self._ends[index + 1]
            line[: end - begin] = values[begin:end]
        return torch.from_numpy(out)

    def any(self) -> bool:
        """Whether anything in it is not zero."""
        return any(self._values)

    def feed(self, digest: "hashlib.blake2b") -> None:
        """Adds the content to a hash."""
        digest.update(self._ends.tobytes())
        digest.update(self._values.tobytes())


def make_metrics(samples: Samples) -> RunningMetrics:
    """The metrics of a data set's task.

    Raises:
        WorkloadError: the samples have no labels.
    """
    kind = find_task(samples.task)
    if kind.truth is not None and samples.references[0].get(kind.truth) is None:
        raise WorkloadError(["the data has no labels, so there is nothing to measure against"])
    return kind.metrics(samples.how, samples.references)


def read_samples(source: DataSource, how: Tokenizing, *, seed: int = 0, mask_probability: float = 0.15) -> Samples:
    """Reads a data set, checks every row, and tokenizes it.

    Args:
        source: which file and which columns.
        how: the tokenizer; tokens a sample may have, special ones included: longer ones are cut, or read in windows;
            names of the classes in the order of their numbers: without, those in the data, numbers by value, names by
            alphabet.
        seed, mask_probability: of masked language modelling.

    Raises:
        DataError: a file, a column or rows that cannot be used, with their numbers.
        MissingExtra: a `datasets` folder, and `datasets` is not installed.
        WorkloadError: a length without room for text, or a tokenizer that cannot do the task.
    """
    return read_rows(source, how, seed=seed, mask_probability=mask_probability).tokenized()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRows:
    """Rows that were read and checked, and are not tokenized yet: that needs no file, and another thread may do it."""

    task: str
    examples: Examples
    how: Tokenizing
    hiding: Any = None

    def tokenized(self) -> Samples:
        """The samples; it is told how many of the rows are done."""
        rows = self.examples.references
        encoded = _told(find_task(self.task).encode(rows, self.how), len(rows))
        return Samples(self.task, encoded, self.how, self.examples, self.hiding)


def read_rows(source: DataSource, how: Tokenizing, *, seed: int = 0, mask_probability: float = 0.15) -> CheckedRows:
    """The first half of `read_samples`: reads and checks, with the same errors."""
    examples = read_examples(source, how.label_names or None)
    hiding = source.kind.hiding(how.tokenizer, seed, mask_probability) if source.needs_labels else None
    return _checked(source.task, examples, how, hiding)


def read_ahead(source: DataSource, how: Tokenizing) -> Iterator[Samples]:
    """The samples of a source in parts of a few hundred rows, each tokenized while the one before it is in use.

    For texts whose order does not matter to each other; questions with windows are read by `read_samples`.

    Raises:
        DataError, WorkloadError: as `read_samples`; what is wrong with rows is known before the first part is there.
    """
    examples = read_examples(source, how.label_names or None)
    parts = [
        replace(examples, references=examples.references[begin : begin + PART_ROWS])
        for begin in range(0, len(examples.references), PART_ROWS)
    ]
    yield from ahead(lambda part: _checked(source.task, part, how).tokenized(), parts)


def _checked(task: str, examples: Examples, how: Tokenizing, hiding: Any = None) -> CheckedRows:
    check_room(how.tokenizer, how.max_length, pair=len(texts_of(examples.references[0])) > 1)
    how = replace(how, label_names=examples.label_names, problem=examples.problem or how.problem)
    return CheckedRows(task=task, examples=examples, how=how, hiding=hiding)


def _told(encoded: Iterable[Encoded], num_rows: int) -> Iterator[Encoded]:
    """The samples; with each part of them it is told how many of the rows are tokenized."""
    num_done, last = 0, -1
    tell(f"tokenizing {counted(num_rows, 'row')}")
    for sample in encoded:
        index = sample.reference["index"]  # windows of a text have that of their row
        if index != last:
            num_done, last = num_done + 1, index
            if num_done % TOLD_ROWS == 0:
                tell(f"tokenizing, {num_done:,} of {counted(num_rows, 'row')} done")
        yield sample


def load_counter(tokenizer: str) -> Any:
    """The tokenizer that counts tokens for a plan.

    Args:
        tokenizer: a folder with a tokenizer, or a hub id.

    Raises:
        VramfitError: there is none.
    """
    try:
        return load_tokenizer(tokenizer)
    except CheckpointError as error:
        raise VramfitError(str(error), hint="name the folder that holds tokenizer.json (--tokenizer)") from None


def lengths_of_data(
    path: str, *, task: str, counter: Any, max_length: int, text_columns: tuple[str, ...] = ()
) -> Callable[[], Lengths]:
    """Reads and checks a data set; what is given counts the tokens of each sample, special ones included.

    Rows that cannot be used are left out.

    Args:
        path: what `DataSource` takes.
        task: of the model.
        counter: what `load_counter` gives.
        max_length: of a window, where questions are asked.
        text_columns: guessed from their names where empty.

    Raises:
        VramfitError: a file or a column that is not there, or cannot be read.
    """
    source = without_labels(path, task, text_columns, MAX_ROWS + 1)
    limit = max_length if source.kind.reads_windows else WHOLE
    rows = read_rows(source, Tokenizing(tokenizer=counter, max_length=limit, stride=min(STRIDE, limit // 4)))

    def count() -> Lengths:
        found = tuple(max(n, 1) for n in rows.tokenized().lengths)
        is_whole = len(found) <= MAX_ROWS
        first = "" if is_whole else f"the first {MAX_ROWS:,} rows of "
        return Lengths(values=found[:MAX_ROWS], source=f"{first}{source.name}", complete=is_whole)

    return count
