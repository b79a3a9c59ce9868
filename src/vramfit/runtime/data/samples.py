"""`Samples`: a data set, tokenized once and kept compactly on the host; batches are made from it."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vramfit.runtime.data.bad_rows import BadRow
from vramfit.runtime.data.encoding import Encoded, check_room, encode_questions, encode_texts, encode_words, texts_of
from vramfit.runtime.data.examples import Examples, read_examples
from vramfit.runtime.data.masking import Masking
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.data.token_store import TokenStore
from vramfit.step.inputs import Batch
from vramfit.techniques.packing import IGNORED
from vramfit.techniques.padding import padded_width
from vramfit.workload import Task

__all__ = ["BadRow", "Samples", "read_ahead", "read_samples"]
PART_ROWS = 256
"""Rows of a part that is read ahead: a tokenizer needs about as long for them as a large GPU."""


class Samples:
    """Samples ready to be batched; made by `read_samples`.

    Args:
        task: what they are for.
        label_names: names of the classes, in the order of their numbers.
        bad_rows: rows that were kept out.
        encoded: the samples, one after another; for question answering, each window of a long context is one.
        max_length: the most tokens a sample may have.
        pad_id: the token that fills up.
        masking: for masked language modelling: how tokens are hidden.
        token_types: whether the model takes `token_type_ids`.
        notes: what to know of the labels.
    """

    def __init__(
        self,
        *,
        task: Task,
        label_names: Sequence[str],
        bad_rows: Sequence[BadRow],
        encoded: Iterable[Encoded],
        max_length: int,
        pad_id: int,
        masking: Masking | None,
        token_types: bool,
        notes: Sequence[str] = (),
    ) -> None:
        self.task: Task = task
        self.label_names = tuple(label_names)
        """Names of the classes in the order of their numbers; none for question answering and masked-lm."""
        self.bad_rows = tuple(bad_rows)
        """Rows that were kept out."""
        self.notes = tuple(notes)
        """What to know of the labels, in words."""
        self.references: list[dict[str, Any]] = []
        """What metrics and predictions need of each sample: its row, its text, what is true of it."""
        self.num_truncated = 0
        """Rows longer than the length: cut, or for question answering read in several windows."""
        self.longest_before_truncation = 0
        """Tokens of the longest row."""
        self._pad_id, self._masking = pad_id, masking
        self._ids, self._types, self._labels = TokenStore(), TokenStore(), TokenStore()
        self._gather(encoded, max_length)
        self._has_types = token_types and self._types.any()
        self.lengths = self._ids.lengths()
        """Tokens of each sample, as cut."""
        self.widths = self._widths()
        """Columns of a batch in which it is the longest."""
        self.fingerprint = self._hash()
        """Changes with anything that a model would see: a resumed run checks it."""

    def _widths(self) -> Sequence[int]:
        if self.task == "question-answering":  # its softmax runs over padding too
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
        digest = hashlib.blake2b(repr((self.task, self.label_names, self._masking)).encode(), digest_size=16)
        for store in (self._ids, self._types, self._labels):
            store.feed(digest)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._ids)

    def collate(self, indices: Sequence[int], *, epoch: int = 0) -> Batch:
        """A batch on the host, padded on the right to its longest sample, or a little further for a common width.

        `token_type_ids` are there only where they say something, that is for pairs of texts: without them a model
        takes them as zeros. Which tokens are masked depends on the epoch and the sample, not on the batch.
        """
        width = max(self.widths[i] for i in indices)
        lengths = np.array([self.lengths[i] for i in indices])
        mask = (np.arange(width) < lengths[:, None]).astype(np.int64)  # torch would wake all its threads for so little
        batch = {"input_ids": self._ids.padded(indices, width, self._pad_id), "attention_mask": torch.from_numpy(mask)}
        if self._has_types:
            batch["token_type_ids"] = self._types.padded(indices, width, 0)
        if self._masking is not None:
            return batch | self._hidden(batch["input_ids"], self._masking, indices, epoch)
        return batch | self._labelled(indices, width)

    def _hidden(self, ids: torch.Tensor, masking: Masking, indices: Sequence[int], epoch: int) -> Batch:
        labels = torch.full_like(ids, IGNORED)
        for line, marks, index in zip(ids, labels, indices, strict=True):
            length = self.lengths[index]
            line[:length], marks[:length] = masking.hide(line[:length].clone(), epoch, index)
        return {"input_ids": ids, "labels": labels}

    def _labelled(self, indices: Sequence[int], width: int) -> Batch:
        if self.task == "token-classification" and self.references[indices[0]]["tags"] is not None:
            return {"labels": self._labels.padded(indices, width, IGNORED)}
        rows = [self._labels.row(i) for i in indices]
        if self.task not in ("sequence-classification", "question-answering") or not len(rows[0]):
            return {}
        labels = torch.stack(rows)
        if self.task == "question-answering":
            return {"start_positions": labels[:, 0].contiguous(), "end_positions": labels[:, 1].contiguous()}
        return {"labels": labels[:, 0].contiguous()}


def read_samples(
    source: DataSource,
    tokenizer: Any,
    *,
    max_length: int,
    label_names: Sequence[str] | None = None,
    stride: int = 128,
    seed: int = 0,
    mask_probability: float = 0.15,
    token_types: bool | None = None,
) -> Samples:
    """Reads a data set, checks every row, and tokenizes it.

    Args:
        source: which file and which columns.
        tokenizer: a fast one, as `load_tokenizer` gives it.
        max_length: tokens a sample may have, special ones included; longer ones are cut, or read in windows.
        label_names: names of the classes in the order of their numbers; None takes those in the data, numbers by
            value, names by alphabet.
        stride: tokens that two windows of one context share (question answering).
        seed, mask_probability: of masked language modelling.
        token_types: whether the model takes `token_type_ids`; None asks the tokenizer.

    Raises:
        DataError: a file, a column or rows that cannot be used, with their numbers.
        MissingExtra: a `datasets` folder, and `datasets` is not installed.
        WorkloadError: a length without room for text, or a tokenizer that cannot do the task.
    """
    examples = read_examples(source, label_names)
    reading = _Reading(source, tokenizer, max_length, stride, seed, mask_probability, token_types)
    return reading.samples(examples)


def read_ahead(
    source: DataSource, tokenizer: Any, *, max_length: int, label_names: Sequence[str] | None = None
) -> Iterator[Samples]:
    """The samples of a source in parts of a few hundred rows, each tokenized while the one before it is in use.

    For texts whose order does not matter to each other; questions with windows are read by `read_samples`.

    Raises:
        DataError, WorkloadError: as `read_samples`; what is wrong with rows is known before the first part is there.
    """
    examples = read_examples(source, label_names)
    reading = _Reading(source, tokenizer, max_length, 0, 0, 0.0, None)
    parts = [
        replace(examples, references=examples.references[begin : begin + PART_ROWS])
        for begin in range(0, len(examples.references), PART_ROWS)
    ]
    with ThreadPoolExecutor(1) as thread:
        reads = deque([thread.submit(reading.samples, parts[0])])
        for part in [*parts[1:], None]:
            made = reads.popleft().result()
            if part is not None:
                reads.append(thread.submit(reading.samples, part))
            yield made


@dataclass(frozen=True, slots=True)
class _Reading:
    """How examples become samples."""

    source: DataSource
    tokenizer: Any
    max_length: int
    stride: int
    seed: int
    mask_probability: float
    token_types: bool | None

    def samples(self, examples: Examples) -> Samples:
        source, tokenizer = self.source, self.tokenizer
        learns_masks = source.task == "masked-lm" and source.needs_labels
        masking = Masking.of(tokenizer, self.seed, self.mask_probability) if learns_masks else None
        check_room(tokenizer, self.max_length, pair=len(texts_of(examples.references[0])) > 1)
        takes_types = "token_type_ids" in tokenizer.model_input_names
        return Samples(
            task=source.task,
            label_names=examples.label_names,
            bad_rows=examples.bad_rows,
            encoded=_encode(source, examples, tokenizer, self.max_length, self.stride),
            max_length=self.max_length,
            pad_id=tokenizer.pad_token_id or 0,
            masking=masking,
            token_types=takes_types if self.token_types is None else self.token_types,
            notes=examples.notes,
        )


def _encode(source: DataSource, examples: Examples, tokenizer: Any, max_length: int, stride: int) -> Iterable[Encoded]:
    if source.task == "question-answering":
        return encode_questions(examples.references, tokenizer, max_length, stride)
    encode = encode_words if source.task == "token-classification" else encode_texts
    return encode(examples.references, tokenizer, max_length, examples.label_names)
