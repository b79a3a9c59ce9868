"""`TextGroups`: which texts make which sample, for a task whose samples are of several texts."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vramfit.step.plain import Batch
from vramfit.tasks import Task


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
