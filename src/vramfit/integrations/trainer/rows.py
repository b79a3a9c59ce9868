"""The samples of a Trainer's datasets: how long they are, and how the collator lays them out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vramfit.runtime.random_state import RandomState

MAX_ROWS = 20_000
"""Rows that are looked at; beyond them, one as long as the model allows is expected."""
NUM_COLLATED = 8
"""Rows that the collator is tried on, the longest among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a dataset looks like to the model."""

    num_samples: int | None
    """None where the dataset does not know."""
    lengths: tuple[int, ...]
    """Tokens of each row that was looked at, those that its mask hides left out; empty where rows do not say."""
    complete: bool
    """Whether every row was looked at."""
    batch: dict[str, torch.Tensor]
    """A few rows, the longest among them, as the collator gives them; empty where there are none to be had."""

    @property
    def width(self) -> int | None:
        """Columns of the collated rows."""
        ids = self.batch.get("input_ids")
        return int(ids.shape[1]) if ids is not None and ids.dim() > 1 else None

    @property
    def share_of_padding(self) -> float:
        """Of the collated rows."""
        mask = self.batch.get("attention_mask")
        return 0.0 if mask is None or not mask.numel() else 1 - float(mask.bool().sum()) / mask.numel()


def rows_of(trainer: Any, dataset: Any) -> Rows:
    """Look at a dataset without using it up: what is drawn at random on the way is drawn again later."""
    start = RandomState.now()
    try:
        return _look(trainer, dataset)
    finally:
        start.restore()


def _look(trainer: Any, dataset: Any) -> Rows:
    if not isinstance(dataset, dict):
        return _look_at_one(trainer, dataset)
    several = [_look_at_one(trainer, one) for one in dataset.values()]
    if not several:
        return _look_at_one(trainer, None)
    largest = max(several, key=lambda rows: rows.num_samples or 0)
    if any(rows.num_samples and not rows.lengths for rows in several):
        return largest
    widest = max(several, key=lambda rows: rows.width or 0)
    lengths = tuple(n for rows in several for n in rows.lengths)
    return replace(largest, lengths=lengths, complete=all(rows.complete for rows in several), batch=widest.batch)


def _look_at_one(trainer: Any, dataset: Any) -> Rows:
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return Rows(num_samples=None, lengths=(), complete=False, batch={})
    count = len(dataset)
    step = max(1, -(-count // MAX_ROWS))
    lengths, places = [], list(range(0, count, step))
    for place in places:
        length = _length(dataset[place])
        if length is None:
            return Rows(num_samples=count, lengths=(), complete=False, batch=_collate(trainer, dataset, places))
        lengths.append(length)
    longest = sorted(range(len(places)), key=lambda i: -lengths[i])[:1]
    chosen = [places[i] for i in longest] + places
    batch = _collate(trainer, dataset, chosen)
    return Rows(num_samples=count, lengths=tuple(lengths), complete=step == 1, batch=batch)


def _length(row: Any) -> int | None:
    """Tokens of a row that count; None where it does not say."""
    get = getattr(row, "get", None)
    ids, mask = (None, None) if get is None else (get("input_ids"), get("attention_mask"))
    if ids is None or not hasattr(ids, "__len__") or isinstance(ids, str):
        return None
    if mask is None or not hasattr(mask, "__len__") or len(mask) != len(ids):
        return max(len(ids), 1)
    return max(int(mask.bool().sum()) if isinstance(mask, torch.Tensor) else int(np.count_nonzero(mask)), 1)


def _collate(trainer: Any, dataset: Any, places: list[int]) -> dict[str, torch.Tensor]:
    """The first few of some rows, as the model would get them."""
    if not places:
        return {}
    rows = [dataset[place] for place in places[:NUM_COLLATED]]
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    made = collate(rows)
    if not isinstance(made, Mapping) and not hasattr(made, "items"):
        return {}
    return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
