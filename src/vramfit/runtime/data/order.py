"""`BatchOrder`: which samples meet in a batch, epoch by epoch.

`TextGroups` says which texts make which sample, for tasks whose samples have several texts.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from vramfit.step.plain import Batch
from vramfit.tasks import Task
from vramfit.techniques.packing import WINDOW_BATCHES

if TYPE_CHECKING:
    from vramfit.runtime.data.samples import Samples

TRIES = 16
"""Samples of other batches that one may change places with, of which any that suits is taken."""


class BatchOrder:
    """The effective batches of each epoch.

    Args:
        lengths: tokens of each sample.
        batch: samples of an effective batch.
        seed: of the shuffling.
        shuffle: False keeps one order for all epochs: with `bucket` the longest first, so that what does not fit is
            known at once, else as the samples come.
        bucket: let samples of like length meet, which saves padding.

    >>> BatchOrder([5, 3, 9], 2, seed=0, shuffle=False).epoch(0)
    [[2, 0], [1]]
    """

    def __init__(
        self, lengths: Sequence[int], batch: int, *, seed: int, shuffle: bool = True, bucket: bool = True
    ) -> None:
        if batch < 1:
            raise ValueError(f"a batch of {batch} samples")
        self._lengths = lengths
        self._batch = batch
        self._seed = seed
        self._shuffle = shuffle
        self._bucket = bucket
        self.ids: Sequence[tuple[int, ...]] | None = None
        """Numbers of each sample's texts: two samples that share one do not meet in a batch, where that can be."""

    @classmethod
    def of(cls, samples: "Samples", batch: int, *, seed: int, bucket: bool) -> Self:
        """The batches to learn from a data set in."""
        order = cls(samples.sample_lengths, batch, seed=seed, bucket=bucket)
        order.ids = samples.sample_ids
        return order

    @property
    def num_batches(self) -> int:
        """Effective batches an epoch."""
        return -(-len(self._lengths) // self._batch)

    def epoch(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, each a list of samples; every sample is in one. The last may be smaller."""
        order = list(range(len(self._lengths)))
        if not self._shuffle:
            return self._cut(self._longest_first(order) if self._bucket else order)
        draw = random.Random(f"{self._seed}/{epoch}")
        draw.shuffle(order)
        made = self._buckets(order, draw) if self._bucket else self._cut(order)
        if self.ids is not None:
            keep_apart(made, self.ids, draw)
        return made

    def _buckets(self, order: list[int], draw: random.Random) -> list[list[int]]:
        whole = len(order) - len(order) % self._batch
        window = WINDOW_BATCHES * self._batch
        batches = []
        for begin in range(0, whole, window):
            batches += self._cut(self._longest_first(order[begin : min(begin + window, whole)]))
        draw.shuffle(batches)
        return batches + self._cut(order[whole:])

    def _longest_first(self, samples: list[int]) -> list[int]:
        return sorted(samples, key=lambda i: (-self._lengths[i], i))

    def _cut(self, samples: list[int]) -> list[list[int]]:
        return [samples[i : i + self._batch] for i in range(0, len(samples), self._batch)]


def keep_apart(batches: list[list[int]], ids: Sequence[tuple[int, ...]], draw: random.Random) -> None:
    """Have samples that share a text change places with samples of other batches, until no batch has a text twice.

    Each tries a few other samples: where texts come so often that none suits, they stay together, and the loss has to
    leave them out. Sizes of batches stay, and so does the number of samples: the time is linear in it.

    Args:
        batches: samples by number; changed in place.
        ids: numbers of each sample's texts; equal texts have equal ones.
        draw: says which samples are tried.
    """
    counts = [Counter(text for sample in batch for text in set(ids[sample])) for batch in batches]

    def suits(sample: int, batch: int, *, without: int) -> bool:
        own, gone = counts[batch], set(ids[without])
        return all(own[text] == (text in gone) for text in set(ids[sample]))

    def move(sample: int, start: int, end: int) -> None:
        counts[start].subtract(set(ids[sample]))
        counts[end].update(set(ids[sample]))

    for here, batch in enumerate(batches):
        for place, sample in enumerate(batch):
            if all(counts[here][text] == 1 for text in ids[sample]):
                continue
            for _ in range(TRIES):
                there = draw.randrange(len(batches))
                where = draw.randrange(len(batches[there]))
                other = batches[there][where]
                if there != here and suits(other, here, without=sample) and suits(sample, there, without=other):
                    move(sample, here, there)
                    move(other, there, here)
                    batch[place], batches[there][where] = other, sample
                    break


class TextGroups:
    """The samples of a data set whose rows are texts.

    Texts of one row make a sample. Where texts have a class and no partner, every text begins one: its partner is
    another text of its class, drawn anew for every epoch.

    Args:
        kind: their task.
        references: of every text; their `place` is that among the texts of a row.
        lengths: tokens of every text.
    """

    def __init__(self, kind: Task, references: Sequence[dict[str, Any]], lengths: Sequence[int]) -> None:
        self._ids = np.array(kind.text_ids(references), dtype=np.int64)
        self._begins = [number for number, reference in enumerate(references) if reference["place"] == 0]
        self._classes: list[list[int]] = []
        self.texts_per_sample = int(references[0]["num_texts"])
        """As many in every sample."""
        if "group" in references[0]:
            of_class: dict[int, list[int]] = {}
            for number, text_id in enumerate(self._ids.tolist()):
                of_class.setdefault(text_id, []).append(number)
            self._classes, self.texts_per_sample = list(of_class.values()), 2
        self.lengths = self._lengths(lengths)
        """Tokens of all texts of each sample; where partners are drawn, twice a text's own."""
        self._partners: tuple[tuple[int, int], list[int]] | None = None

    def _lengths(self, lengths: Sequence[int]) -> list[int]:
        if self._classes:
            return [2 * length for length in lengths]
        return [sum(lengths[begin : begin + self.texts_per_sample]) for begin in self._begins]

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def sample_ids(self) -> list[tuple[int, ...]] | None:
        """The ids of each sample's texts; None where samples of one class cannot but meet."""
        if self._classes:
            return None
        ids = self._ids.tolist()
        return [tuple(ids[begin : begin + self.texts_per_sample]) for begin in self._begins]

    def rows(self, samples: Sequence[int], *, epoch: int, seed: int) -> list[int]:
        """The texts of some samples, sample by sample."""
        if self._classes:
            partners = self._drawn(epoch, seed)
            return [row for number in samples for row in (number, partners[number])]
        return [self._begins[number] + place for number in samples for place in range(self.texts_per_sample)]

    def _drawn(self, epoch: int, seed: int) -> list[int]:
        """The partner of every text in an epoch: each is one once, and none its own."""
        if self._partners is None or self._partners[0] != (epoch, seed):
            draw, partners = random.Random(f"{seed}/{epoch}/partners"), [0] * len(self._begins)
            for members in self._classes:
                order = members.copy()
                draw.shuffle(order)
                for one, other in zip(order, [*order[1:], order[0]], strict=True):
                    partners[one] = other
            self._partners = (epoch, seed), partners
        return self._partners[1]

    def inputs(self, rows: Sequence[int], labels: Any) -> Batch:
        """What the loss of a batch of texts reads beside their vectors.

        Args:
            labels: a `TokenStore` of the scores of all texts; of each as many numbers.
        """
        made = {
            "text_rows": torch.arange(len(rows)),
            "text_ids": torch.from_numpy(self._ids[np.asarray(rows)]),
        }
        num_scores = labels.num_in(rows[0])
        if num_scores:
            columns = [labels.column(rows, place) for place in range(num_scores)]
            made["labels"] = columns[0] if num_scores == 1 else torch.stack(columns, 1)
        return made

    def feed(self, digest: "hashlib.blake2b") -> None:
        """Adds the content to a hash."""
        digest.update(repr((self.texts_per_sample, bool(self._classes))).encode())
        digest.update(self._ids.tobytes())
