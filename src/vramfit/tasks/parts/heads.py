"""What a classification head learns: a class a row, several, or numbers; decided from labels, which are then read."""

import ast
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite, isnan
from typing import Any

from vramfit.tasks.parts.reading import BadValue, Columns, LabelNames, Reference, Row, label_text, number_of, some_of
from vramfit.units import counted, shown

SINGLE, MULTI_LABEL, REGRESSION = "single", "multi-label", "regression"
PROBLEMS = (SINGLE, MULTI_LABEL, REGRESSION)
"""What a head learns, as users write it."""
PROBLEM_TYPES = {
    SINGLE: "single_label_classification",
    MULTI_LABEL: "multi_label_classification",
    REGRESSION: "regression",
}
"""The same as configurations of transformers say it."""
MARKS = ("|", ";", ",")
"""They stand between labels, tried in this order; the first in any name, the others only where each part is a label of
another row, unless it is known that rows have several labels."""
MANY = 10
"""Fewer labels than this are no reason to wonder, however few rows there are; nor are so few decimals, such as half
stars, where each of them comes again."""
OTHER_COLUMN = "name the column of the labels: --label-column NAME"
FEW = 2
"""Values of a list or columns that make several."""


class Cells(tuple[Any, ...]):
    """Values of several columns of a row."""

    __slots__ = ()


def problem_of(config: Mapping[str, Any]) -> str:
    """What the head of a saved configuration has learned; by transformers' guess where it does not say.

    >>> problem_of({"id2label": {"0": "score"}}), problem_of({"problem_type": "multi_label_classification"})
    ('regression', 'multi-label')
    """
    named = config.get("problem_type")
    found = next((problem for problem, name in PROBLEM_TYPES.items() if name == named), None)
    return found or (REGRESSION if len(config.get("id2label") or "ab") == 1 else SINGLE)


def thresholds_of(config: Mapping[str, Any]) -> tuple[float, ...]:
    """The probability from which each label is given, as a saved configuration has it; none where it has not."""
    found = config.get("thresholds")
    is_right = isinstance(found, list) and len(found) == len(config.get("id2label") or ())
    numbers = [value for value in found or () if isinstance(value, int | float)] if is_right else []
    return tuple(map(float, numbers)) if is_right and len(numbers) == len(found or ()) else ()


def raw_label(row: Row, columns: Columns) -> Any:
    """What a row has in the column of labels, or in several."""
    if columns.labels:
        return Cells(row.fields.get(name) for name in columns.labels)
    return None if columns.label is None else (row.fields.get(columns.label),)


def read_labels(references: Sequence[Reference], columns: Columns, labels: LabelNames) -> dict[int, BadValue]:
    """Turn what rows have into labels, in place: a name, names, or numbers; decides first which, where nobody has.

    Returns what is wrong with a row, by its number.
    """
    raw = [reference["label"] if columns.labels else reference["label"][0] for reference in references]
    is_asked = labels.problem is not None
    if labels.problem is None:
        labels.problem = SINGLE if labels.are_given else decide(raw)
    read = _reader(raw, columns, labels)
    bad: dict[int, BadValue] = {}
    for number, (reference, value) in enumerate(zip(references, raw, strict=True)):
        try:
            reference["label"] = read(value)
        except BadValue as error:
            reference["label"] = None
            bad[number] = error
    if not is_asked and not labels.are_given:
        labels.said = _said(labels, [r["label"] for r in references if r["label"] is not None])
    return bad


def decide(raw: Sequence[Any]) -> str:
    """What labels are, given what rows have.

    >>> decide(["good", "bad"]), decide(["toxic|insult", ""]), decide([f"{n / 7:.2f}" for n in range(40)])
    ('single', 'multi-label', 'regression')
    >>> decide([[0.5, 1.5], [2, 2]]), decide([[1, 0, 1], [0, 0, 0]]), decide(["0.5", "1.0", "0.5", "1.0"])
    ('regression', 'multi-label', 'single')
    """
    if raw and isinstance(raw[0], Cells):
        return MULTI_LABEL if _are_marks([list(row) for row in raw], are_columns=True) else REGRESSION
    lists = [found for value in raw if (found := _list_in(value)) is not None]
    if lists:
        known = [value for value in raw if not _is_missing(value)]
        are_numbers = len(lists) == len(known) and all(_is_number(one) for row in lists for one in row)
        return REGRESSION if are_numbers and _are_values(lists) else MULTI_LABEL
    names = Counter(text for value in raw if (text := _text(value)))
    if any(_is_several(name, names) for name in names):
        return MULTI_LABEL
    return REGRESSION if are_decimals(names) else SINGLE


def are_decimals(rows: Mapping[str, int]) -> bool:
    """Whether labels are numbers to come near to: many different decimals, or hardly any of them twice.

    Args:
        rows: label → how many rows have it.
    """
    decimals = [name for name in rows if is_decimal(name)]
    are_repeated = sum(rows[name] for name in decimals) >= 2 * len(decimals)
    return len(decimals) > MANY or (len(decimals) > 1 and not are_repeated)


def is_decimal(name: str) -> bool:
    """Whether it is a number, with a point or a comma in it, and not a whole one.

    >>> is_decimal("3.75"), is_decimal("3,75"), is_decimal("3.0"), is_decimal("v1.2")
    (True, True, False, False)
    """
    try:
        value = float(name.replace(",", ".", 1))
    except ValueError:
        return False
    return isfinite(value) and not value.is_integer()


def several_in(rows: Mapping[str, int], known: Collection[str]) -> list[str]:
    """Labels that are several, of those that rows have."""
    alone = {*rows, *known}
    return [name for name in rows if _is_several(name, alone)]


def number_in(value: Any, name: str) -> float:
    """The number in a cell.

    Raises:
        BadValue: there is none, or one that is not finite.
    """
    if _is_missing(value):
        raise BadValue(f"{name} is missing")
    number = number_of(value.strip().replace(",", ".", 1) if isinstance(value, str) else value)
    if number is None or abs(number) > MAX_NUMBER:
        raise BadValue(f"{name} is {shown(value)}, not a finite number")
    return number


MAX_NUMBER = 3e38
"""The largest that fp32 has."""


def _reader(raw: Sequence[Any], columns: Columns, labels: LabelNames) -> Callable[[Any], Any]:
    if labels.problem == SINGLE:
        return labels.name_of
    if labels.problem == REGRESSION:
        return _Numbers(raw, columns, labels).read
    return _Names(raw, columns, labels).read


class _Numbers:
    """Reads rows of numbers, all of which have as many."""

    def __init__(self, raw: Sequence[Any], columns: Columns, labels: LabelNames) -> None:
        self._column, self._columns = columns.label or "the label", columns.labels
        labels.value_names = labels.known or columns.labels or self._names(raw)
        self._names_known = labels.value_names

    def _names(self, raw: Sequence[Any]) -> tuple[str, ...]:
        """By the first row that has any."""
        first = next((found for value in raw if (found := _list_in(value))), None)
        if first is None or len(first) == 1:
            return (self._column,)
        return tuple(f"{self._column}_{place}" for place in range(1, len(first) + 1))

    def read(self, value: Any) -> tuple[float, ...]:
        found = list(value) if isinstance(value, Cells) else _list_in(value)
        values = [value] if found is None else found
        if len(values) != len(self._names_known):
            wanted = f"{len(self._names_known)} ({some_of(self._names_known)}) are wanted"
            raise BadValue(f"{self._column} has {counted(len(values), 'number')}, and {wanted}")
        names = self._columns or [self._column] * len(values)
        return tuple(number_in(one, name) for one, name in zip(values, names, strict=True))


class _Names:
    """Reads rows of any number of labels."""

    def __init__(self, raw: Sequence[Any], columns: Columns, labels: LabelNames) -> None:
        self._labels, self._columns = labels, columns.labels
        texts = [text for value in raw if (text := _text(value))]
        self._mark = next((mark for mark in MARKS if any(len(_parts(text, mark)) > 1 for text in texts)), None)
        names = Counter(texts)
        if not labels.are_given and not any(len(_parts(text, "|")) > 1 for text in texts):
            sure = (m for m in MARKS[1:] if any(_are_all(_parts(text, m), names) for text in names))
            self._mark = next(sure, self._mark)
        lists = [found for value in raw if (found := _list_in(value)) is not None]
        self._are_marks = bool(lists) and _are_marks(lists)

    def read(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, Cells):
            return self._marked(list(value), self._columns)
        found = _list_in(value)
        if found is not None and self._are_marks:
            names = self._labels.known or tuple(map(str, range(len(found))))
            return self._marked(found, names)
        if found is None:
            is_empty = isinstance(value, str) and not value.strip()
            if _is_missing(value) and not is_empty:
                raise BadValue("the label is missing", hint="a row without labels has an empty text or an empty list")
            found = self._split(value.strip()) if isinstance(value, str) else [value]
        return tuple(dict.fromkeys(self._labels.name_of(one) for one in found))

    def _split(self, text: str) -> list[str]:
        """The labels in a text; of those that are known, by the mark that gives such."""
        known = self._labels.known
        if text in known:
            return [text]
        for mark in MARKS if known else ():
            if _are_all(_parts(text, mark), known):
                return _parts(text, mark)
        return [text] if self._mark is None and text else _parts(text, self._mark or "|")

    def _marked(self, values: Sequence[Any], names: Sequence[str]) -> tuple[str, ...]:
        if len(values) != len(names):
            raise BadValue(f"the list has {counted(len(values), 'mark')}, and there are {counted(len(names), 'label')}")
        numbers = [number_in(value, name) for value, name in zip(values, names, strict=True)]
        wrong = next((f"{n} is {v:g}" for v, n in zip(numbers, names, strict=True) if v not in (0, 1)), None)
        if wrong is not None:
            raise BadValue(f"{wrong}, neither 0 nor 1")
        self._labels.marked = tuple(names)
        return tuple(self._labels.name_of(name) for number, name in zip(numbers, names, strict=True) if number)


def _said(labels: LabelNames, found: Sequence[Any]) -> str:
    """What labels were taken for, where that was decided here and is not one class a row."""
    if labels.problem == MULTI_LABEL:
        more = sum(len(names) > 1 for names in found)
        what = f"{more:,} of {counted(len(found), 'row')} {'has' if more == 1 else 'have'} several labels"
        return f"{what}: each label is learned independently (multi-label); --problem says otherwise"
    if labels.problem == REGRESSION:
        values = [value for row in found for value in row]
        between = f" between {min(values):g} and {max(values):g}" if values else ""
        names = labels.value_names
        several = f"{len(names)} a row ({some_of(names)}), " if len(names) > 1 else ""
        what = (
            f"labels are numbers, {several}{len(set(values)):,} different ones in {counted(len(found), 'row')}{between}"
        )
        return f"{what}: they are predicted as numbers (regression); --problem says otherwise"
    return ""


def _list_in(value: Any) -> list[Any] | None:
    """A list, or what a text writes one as: JSON, or Python's own way, which pandas leaves in files.

    >>> _list_in('["a", "b"]'), _list_in("['a']"), _list_in("[spam]"), _list_in("[]")
    (['a', 'b'], ['a'], None, [])
    """
    if isinstance(value, list):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if not (text.startswith("[") and text.endswith("]")) or not (text == "[]" or any(m in text for m in "',\"")):
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return found if isinstance(found, list) else None
    return None


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, float) and isnan(value)):
        return True
    return isinstance(value, str) and (not value.strip() or value.strip().casefold() == "nan")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """A label as text; empty for none and for a list."""
    if _list_in(value) is not None:
        return ""
    try:
        return label_text(value)
    except BadValue:
        return ""


def _are_marks(lists: Sequence[Sequence[Any]], *, are_columns: bool = False) -> bool:
    """Whether rows say 0 or 1 for each label: as many in each, and not the numbers of two classes."""
    try:
        numbers = [[number_in(value, "") for value in row] for row in lists if not any(map(_is_missing, row))]
    except BadValue:
        return False
    if not numbers or len({len(row) for row in numbers}) > 1 or len(numbers[0]) < FEW:
        return False
    if any(value not in (0, 1) for row in numbers for value in row):
        return False
    are_fractions = any(isinstance(value, float) for row in lists for value in row)
    return are_columns or are_fractions or any(len(set(row)) < len(row) for row in numbers)


def _are_values(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether lists of numbers are values: as many in each, with fractions, or one of them twice in a row."""
    if len({len(row) for row in lists}) > 1 or not lists[0] or _are_marks(lists):
        return False
    return any(isinstance(v, float) for row in lists for v in row) or any(len(set(row)) < len(row) for row in lists)


def _is_several(name: str, alone: Collection[str]) -> bool:
    """Whether a label is a list, or names with `|` between them, or labels of other rows with a comma between them."""
    if name.startswith("[") and name.endswith("]"):
        return name == "[]" or any(mark in name for mark in "',\"")
    return len(_parts(name, "|")) > 1 or any(_are_all(_parts(name, mark), alone) for mark in MARKS[1:])


def _are_all(parts: Sequence[str], alone: Collection[str]) -> bool:
    return len(parts) > 1 and all(part in alone for part in parts)


def _parts(name: str, mark: str) -> list[str]:
    return [part.strip() for part in name.split(mark) if part.strip()]
