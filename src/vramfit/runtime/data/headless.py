"""Files without a header: which of two columns is the text and which the label, where their values leave no doubt."""

from collections.abc import Sequence
from dataclasses import dataclass

from vramfit.runtime.data.column_names import LABELS, TEXTS

NUM_ROWS = 1000
"""Rows that are looked at."""
MAX_LABELS = 100
"""More different values than this are no labels for certain."""
NAMES = frozenset(name for task in TEXTS for name in (*(one for names in TEXTS[task] for one in names), *LABELS[task]))


@dataclass(frozen=True, slots=True)
class Guess:
    """Two columns by position, from 1."""

    text: str
    label: str

    def note(self, *, needs_labels: bool) -> str:
        """What is said of it."""
        if not needs_labels:
            return f"no header: column {self.text} is read as the text; --text-column names another"
        return (
            f"no header: column {self.text} is read as the text, column {self.label} as the label; "
            "--text-column and --label-column name others"
        )


def guess_columns(records: Sequence[Sequence[str]]) -> Guess | None:
    """Text and label of the first rows of a file, its first line among them; None where that line may be a header.

    A column is of labels where the first line's value comes again below it and there are few others; the text is the
    other one, where it is not of that kind too.

    >>> guess_columns([["a good film", "1"], ["a bad film", "0"], ["a fine film", "1"], ["a poor film", "0"]])
    Guess(text='1', label='2')
    >>> guess_columns([["review", "stars"], ["a bad film", "0"], ["a fine film", "1"], ["a poor film", "0"]])
    """
    rows = [row for row in records if len(row) == 2]
    if not rows or rows[0] is not records[0] or any(name.strip().lower() in NAMES for name in rows[0]):
        return None
    columns = [[value.strip() for value in column] for column in zip(*rows, strict=True)]
    labels = [place for place, values in enumerate(columns) if _are_labels(values)]
    if len(labels) != 1:
        return None
    texts = columns[1 - labels[0]]
    if not any(character.isalpha() for character in "".join(texts)):  # numbers of rows, or other figures
        return None
    return Guess(text=str(2 - labels[0]), label=str(labels[0] + 1))


def _are_labels(values: Sequence[str]) -> bool:
    different = len(set(values))
    return values[0] in values[1:] and different <= min(MAX_LABELS, len(values) // 2)
