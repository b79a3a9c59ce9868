"""`BatchOrder`: which samples meet in which effective batch; a function of the seed and the epoch alone."""

import random
from collections.abc import Sequence

from vramfit.techniques.padding import WINDOW_BATCHES


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
        if not self._bucket:
            return self._cut(order)
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
