"""Rows of several texts, each with a vector of its own: which columns hold them, and what a row says of them.

What rows are is told by their columns and by the loss that is to learn from them: pairs of texts that belong together,
with negatives or without, pairs with a score, or single texts with a class.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramfit.errors import DataError
from vramfit.tasks.base import Rows, Task
from vramfit.tasks.parts.reading import (
    Asked,
    BadValue,
    Columns,
    LabelNames,
    Reference,
    Row,
    check_characters,
    number_of,
    text_in,
)
from vramfit.units import counted, shown

PAIRS, NEGATIVES, SCORED, BINARY, MARGINS, CLASSES, TEXTS = (
    "pairs",
    "pairs with negatives",
    "scored pairs",
    "pairs marked 0 or 1",
    "pairs with negatives and margins",
    "texts with classes",
    "texts",
)
"""Forms of data. Of the last, nothing but the vectors is wanted."""
FORMS: Mapping[str, tuple[str, ...]] = {
    "in-batch": (PAIRS, NEGATIVES, CLASSES),
    "in-batch-symmetric": (PAIRS, NEGATIVES, CLASSES),
    "triplet": (NEGATIVES,),
    "contrastive": (BINARY,),
    "cosent": (SCORED,),
    "angle": (SCORED,),
    "margin-mse": (MARGINS,),
}
"""Loss → what it learns from."""
USUAL = {PAIRS: "in-batch", NEGATIVES: "in-batch", CLASSES: "in-batch", SCORED: "cosent"}
"""Form → the loss where none is chosen."""
PAIR_NAMES = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("question", "positive"),
    ("query", "pos"),
    ("query", "passage"),
    ("query", "document"),
    ("query", "answer"),
    ("question", "answer"),
    ("question", "context"),
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("sentence_a", "sentence_b"),
    ("sent1", "sent2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("title", "body"),
    ("title", "abstract"),
    ("text", "summary"),
    ("prompt", "response"),
)
NEGATIVE = re.compile(r"(?:hard[_-]?)?neg(?:ative)?s?[_-]?(\d*)")
SCORE_NAMES = ("score", "scores", "similarity", "similarity_score", "relatedness_score", "label", "labels", "gold")
MARGIN_NAMES = ("margin", "margins", *SCORE_NAMES)
CLASS_NAMES = ("label", "labels", "class", "intent", "category", "topic", "target")
MOST_TEXTS = 100
"""Columns of text at most."""
NUM_OF_PAIR = 2
NOT_A_SCORE = "give numbers; or keep only pairs that belong together, and take --loss in-batch, which reads no scores"
OVERRIDES = "--text-column and --label-column name others"


class TaskOfTexts(Task):
    """A task whose samples have several texts, each of which is a row of a batch."""

    is_trained = is_served = True
    labels = ("text_rows", "text_ids", "labels")
    text_names = ()
    learns_numbers = True

    def read_row(self, row: Row, columns: Columns, labels: LabelNames) -> Reference:
        return read_texts(row, columns, labels)

    def merged(self, rows: Iterable[dict[str, Any]]) -> Rows:
        return sorted(rows, key=lambda row: (row.get("index", 0), row.get("column", 0)))


def column_of(reference: Reference) -> dict[str, int]:
    """Which of a row's texts or candidates it is, from 1; nothing where there is but one."""
    return {"column": reference["place"] + 1} if reference.get("num_texts", 1) > 1 else {}


@dataclass(frozen=True, slots=True)
class Forms:
    """What the losses of a task learn from."""

    of_loss: Mapping[str, tuple[str, ...]]
    """Loss → forms of data."""
    usual: Mapping[str, str]
    """Form → the loss where none is chosen."""


def choose_columns(asked: Asked, singles: Sequence[str], forms: Forms | None = None) -> Columns | None:
    """Which columns hold texts and what else is known of them; None where no name says so.

    Args:
        singles: names of columns that hold a text by itself.
        forms: of the task; None takes those of embeddings.

    Raises:
        DataError: columns that do not go with the loss.
    """
    texts = asked.texts or _texts_by_name(asked, singles)
    if not texts:
        return None
    if not asked.needs_labels:
        return Columns(texts, None, form=TEXTS, num_texts=_num_texts(asked, texts))
    forms = forms or Forms(FORMS, USUAL)
    num_texts = _num_texts(asked, texts)
    form, label = _form(asked, forms, num_texts, _label(asked, texts, num_texts))
    if label is None and form in (CLASSES, SCORED, BINARY, MARGINS):
        raise _without_label(asked, texts, form)
    if form not in (forms.usual if asked.loss is None else forms.of_loss[asked.loss]):
        raise _for_other_loss(asked, forms, texts, form)
    loss = asked.loss or forms.usual[form]
    return Columns(texts, label, form=form, num_texts=num_texts, note=_note(asked, texts, form, label, loss))


def _texts_by_name(asked: Asked, singles: Sequence[str]) -> tuple[str, ...]:
    known = {name.lower(): name for name in reversed(asked.names) if name != asked.label}
    for pair in PAIR_NAMES:
        if all(name in known for name in pair):
            found = ((NEGATIVE.fullmatch(name), own) for name, own in known.items())
            negatives = sorted((int(match[1] or 0), own) for match, own in found if match)
            return (*(known[name] for name in pair), *(own for _, own in negatives))
    return next(((known[name],) for name in singles if name in known), ())


def _num_texts(asked: Asked, texts: Sequence[str]) -> int:
    """Texts of a row; a list has several."""
    values = [asked.first.get(column) for column in texts]
    return sum(len(value) if isinstance(value, list) else 1 for value in values)


def _label(asked: Asked, texts: Sequence[str], num_texts: int) -> str | None:
    """The column of scores, margins or classes."""
    if asked.label is not None:
        return asked.label
    names = {1: CLASS_NAMES, NUM_OF_PAIR: SCORE_NAMES}.get(num_texts, MARGIN_NAMES)
    known = {name.lower(): name for name in reversed(asked.names) if name not in texts}
    return next((known[name] for name in names if name in known), None)


def _form(asked: Asked, forms: Forms, num_texts: int, label: str | None) -> tuple[str, str | None]:
    loss, wants = asked.loss, forms.of_loss.get(asked.loss or "", ())
    if num_texts == 1:
        return CLASSES, label
    if num_texts > NUM_OF_PAIR:
        return (MARGINS, label) if MARGINS in wants else (NEGATIVES, None)
    if BINARY in wants:
        return BINARY, label
    return (SCORED, label) if SCORED in wants or (loss is None and label is not None) else (PAIRS, None)


def _without_label(asked: Asked, texts: Sequence[str], form: str) -> DataError:
    wanted = {
        CLASSES: "the class of each text, so that nothing says which texts belong together",
        MARGINS: "a margin for each negative",
    }.get(form, "a score for each pair")
    because = f", which loss {asked.loss} learns from" if asked.loss is not None else ""
    return DataError(
        f"{asked.file}: {', '.join(texts)} hold the texts, and no column looks like {wanted}{because}",
        file=asked.file,
        hint="name it: --label-column NAME" + ("; or name two columns of texts: --text-column A,B" * (form == CLASSES)),
    )


def _for_other_loss(asked: Asked, forms: Forms, texts: Sequence[str], form: str) -> DataError:
    wanted = " or ".join(dict.fromkeys(forms.usual if asked.loss is None else forms.of_loss[asked.loss]))
    suiting = ", ".join(loss for loss, taken in forms.of_loss.items() if form in taken)
    who = "the task" if asked.loss is None else f"loss {asked.loss}"
    other = f"take another loss ({suiting}), or " if suiting else "add what is missing, or "
    return DataError(
        f"{asked.file}: {who} learns from {wanted}, and these are {form} ({', '.join(texts)})",
        file=asked.file,
        hint=f"{other}name the columns: --text-column ANCHOR,POSITIVE,NEGATIVE",
    )


def _note(asked: Asked, texts: Sequence[str], form: str, label: str | None, loss: str) -> str:
    beside = "" if label is None else f", {label}"
    unread = _label(asked, texts, NUM_OF_PAIR) if form == PAIRS else None
    left = "" if unread is None else f"; {unread} is not read: every pair is taken as two texts that belong together"
    return f"read as {form} ({', '.join(texts)}{beside}), which loss {loss} learns from{left}; {OVERRIDES}"


def read_texts(row: Row, columns: Columns, labels: LabelNames) -> Reference:
    """`texts` of a row, and what is known of them: `scores`, one or one for each negative; `group`: the class; `ids`:
    those of columns such as `query_id` for `query`.

    Raises:
        BadValue: a text that is missing, another number of negatives, or a score that is none.
    """
    texts = tuple(text for place, column in enumerate(columns.texts) for text in _texts_in(row, column, place))
    if columns.num_texts and len(texts) != columns.num_texts:
        fewer = columns.num_texts - NUM_OF_PAIR
        raise BadValue(f"{counted(len(texts) - NUM_OF_PAIR, 'negative')}, and the first row has {fewer}")
    read: Reference = {"texts": texts}
    if columns.label is not None and columns.form == CLASSES:
        read["group"] = labels.name_of(row.fields.get(columns.label))
    elif columns.label is not None:
        read["scores"] = _scores(row.fields.get(columns.label), columns)
    ids = [row.fields.get(f"{column}_id") for column in columns.texts]
    if len(ids) == len(texts) and any(value is not None and value != "" for value in ids):
        read["ids"] = tuple(None if value is None or value == "" else str(value) for value in ids)
    return read


def _texts_in(row: Row, column: str, place: int) -> list[str]:
    """The text in a column, or those of a list."""
    value = row.fields.get(column)
    if not isinstance(value, list):
        return [text_in(row, column)]
    if not value:
        raise BadValue(f"{column} is empty")
    if place < NUM_OF_PAIR and len(value) > 1:
        raise BadValue(f"{column} has {len(value)} texts, not one: give a row to each")
    for text in value:
        if not isinstance(text, str) or not text.strip():
            raise BadValue(f"{column} has {shown(text)} in it, not a text")
        check_characters(text, column)
    return value


def _scores(value: Any, columns: Columns) -> tuple[float, ...]:
    name, num_wanted = columns.label, columns.num_texts - NUM_OF_PAIR if columns.form == MARGINS else 1
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadValue(f"{name} is {shown(value)}, not a list of numbers") from None
    if isinstance(value, bool) and columns.form == BINARY:
        value = int(value)
    values = value if isinstance(value, list) else [value]
    found = tuple(_number(one, name) for one in values)
    if len(found) != num_wanted:
        raise BadValue(f"{name} has {counted(len(found), 'number')}, and {num_wanted} are wanted")
    if columns.form == BINARY and found[0] not in (0, 1):
        raise BadValue(f"{name} is {found[0]:g}, neither 0 (apart) nor 1 (together)")
    return found


def _number(value: Any, name: str | None) -> float:
    if value is None or value == "":
        raise BadValue(f"no {name}")
    number = number_of(value)
    if number is None:
        raise BadValue(f"{name} is {shown(value)}, not a finite number", hint=NOT_A_SCORE)
    return number


def alone_in_class(references: Sequence[Reference]) -> dict[int, str]:
    """Number of a text → why it teaches nothing: no other one is of its class."""
    seen: dict[str, list[int]] = {}
    for number, reference in enumerate(references):
        if "group" in reference:
            seen.setdefault(reference["group"], []).append(number)
    return {
        numbers[0]: f"no other row has the class {shown(group)}" for group, numbers in seen.items() if len(numbers) == 1
    }


def check_classes(file: str, labels: LabelNames, num_rows: int) -> None:
    """Raises DataError where all texts are of one class."""
    if len(labels.new) == 1 and num_rows > 1:
        raise DataError(
            f"{file}: every row has the class {next(iter(labels.new))!r}: there is nothing to tell apart",
            file=file,
            hint="give rows of two classes or more",
        )
