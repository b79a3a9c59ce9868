"""`TokenStore`: the tokens of many samples end to end in flat arrays, a few bytes each."""

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch

IDS = "i"
OFFSETS = "q"


class TokenStore:
    """Rows of whole numbers of any length, in 4 bytes each."""

    def __init__(self) -> None:
        self._values = array(IDS)
        self._ends = array(OFFSETS, [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, row: Sequence[int]) -> None:
        """One more row."""
        self._values.extend(row)
        self._ends.append(len(self._values))

    def lengths(self) -> list[int]:
        """Of every row."""
        return [end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False)]

    def row(self, index: int) -> torch.Tensor:
        """A copy of one row, as torch likes its indices."""
        part = self._values[self._ends[index] : self._ends[index + 1]]
        return torch.frombuffer(part, dtype=torch.int32).long() if part else torch.zeros(0, dtype=torch.long)

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
