"""The rows of a file as a model reads them, and what the model answers: two models are compared by that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from vramfit.errors import DataError
from vramfit.runtime.data.examples import BadRow, RowReader
from vramfit.runtime.data.samples import WHOLE, Samples
from vramfit.runtime.data.source import STANDARD_INPUT, DataSource
from vramfit.tasks import find_task, vector_task
from vramfit.tasks.parts.losses import model_inputs
from vramfit.tasks.parts.reading import Encoded, LabelNames, Reference, Tokenizing

if TYPE_CHECKING:
    from vramfit.runtime.trained import TrainedModel

CHUNK_ROWS = 4096
"""Rows that are tokenized together."""
Answers = dict[str, torch.Tensor]
"""What a model gives for a batch: name → numbers."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Files whose texts are read for a model's task; labels are not looked for."""

    files: tuple[str, ...]
    task: str
    text_columns: tuple[str, ...] = ()
    max_rows: int | None = None
    """Of each file."""

    def __post_init__(self) -> None:
        if STANDARD_INPUT in self.files:
            raise DataError("the data is read more than once, which standard input cannot be", hint="name a file")

    def chunks(self, num_rows: int = CHUNK_ROWS) -> Iterator[list[Reference]]:
        """The rows that can be used, some thousands at a time.

        Raises:
            DataError: a file that cannot be read, a column that is missing, or no row that can be used.
        """
        found = self._references()
        empty = True
        while chunk := list(islice(found, num_rows)):
            empty = False
            yield chunk
        if empty:
            name = self.files[0]
            raise DataError(f"{name} has no row with a text", file=name, hint="one text a row")

    def first(self, num_rows: int) -> list[Reference]:
        """The first rows that can be used."""
        return next(self.chunks(num_rows))

    def _references(self) -> Iterator[Reference]:
        kind = find_task(self.task)
        read_for = kind.name if kind.is_trained else vector_task().name
        more: dict[str, Any] = {"needs_labels": False, "skip_bad_rows": True, "max_rows": self.max_rows}
        for file in self.files:
            source = DataSource(path=file, task=read_for, text_columns=self.text_columns, of_model=True, **more)
            for found in RowReader(source, LabelNames()).rows():
                if not isinstance(found, BadRow):
                    yield found


def encoded(references: Sequence[Reference], how: Tokenizing, task: str) -> Iterator[Encoded]:
    """Rows as tokens, whole: nothing is cut."""
    kind = find_task(task)
    reader = kind if kind.is_trained else vector_task()
    yield from reader.encode(references, replace(how, max_length=WHOLE, stride=0))


def make_samples(references: Sequence[Reference], trained: "TrainedModel") -> Samples:
    """Rows as the model reads them, cut to its length, in their order."""
    how = trained.tokenizing
    kind = trained.kind if trained.kind.is_trained else vector_task()
    return Samples(kind.name, kind.encode(references, how), how)


@torch.no_grad()
def answers(model: Any, samples: Samples, batch: int) -> Iterator[Answers]:
    """What a model gives for rows, batch by batch."""
    for begin in range(0, len(samples), batch):
        made = samples.collate(range(begin, min(begin + batch, len(samples))))
        yield outputs_of(model(**model_inputs(made)), made)


def outputs_of(output: Any, batch: dict[str, torch.Tensor]) -> Answers:
    """The numbers of an output, without those that came out at padding."""
    mask = batch["attention_mask"].bool()
    found = {}
    for name, value in output.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[name] = (value[mask] if value.shape[:2] == mask.shape else value).float()
    return found


def difference(a: Answers, b: Answers) -> float:
    """The largest difference between two answers; infinite where one has what the other has not."""
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return float("inf")
    return max((float((a[name] - b[name]).abs().max()) for name in a if a[name].numel()), default=0.0)
