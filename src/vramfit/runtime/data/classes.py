"""How often each class was said and how often it was true, and the scores that follow."""

from collections import Counter
from collections.abc import Iterable
from math import sqrt


class ClassCounts:
    """A confusion matrix that grows."""

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels
        self._pairs: Counter[tuple[int, int]] = Counter()
        """(true, said) → how often."""

    def add(self, true: Iterable[int], said: Iterable[int]) -> None:
        """Some more samples."""
        self._pairs.update(zip(true, said, strict=True))

    def merge(self, other: "ClassCounts") -> None:
        """The samples of another one."""
        self._pairs.update(other._pairs)

    def scores(self) -> dict[str, float]:
        """`accuracy`, `macro_f1` over the classes that occur; with two classes `f1` of the second and `mcc`."""
        total = sum(self._pairs.values())
        right = sum(count for (true, said), count in self._pairs.items() if true == said)
        seen = sorted({label for pair in self._pairs for label in pair})
        macro = sum(self._f1(label) for label in seen) / len(seen) if seen else 0.0
        scores = {"accuracy": right / total if total else 0.0, "macro_f1": macro}
        return scores | {"f1": self._f1(1), "mcc": self._mcc()} if self._num_labels == 2 else scores

    def _f1(self, label: int) -> float:
        right = self._pairs[label, label]
        either = sum(c * ((true == label) + (said == label)) for (true, said), c in self._pairs.items())
        return 2 * right / either if either else 0.0

    def _mcc(self) -> float:
        """Matthews' correlation of two classes; 0 where one of them never occurs."""
        yes, no = self._pairs[1, 1], self._pairs[0, 0]
        false_yes, false_no = self._pairs[0, 1], self._pairs[1, 0]
        below = (yes + false_yes) * (yes + false_no) * (no + false_yes) * (no + false_no)
        return (yes * no - false_yes * false_no) / sqrt(below) if below else 0.0
