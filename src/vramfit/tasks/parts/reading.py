"""Rows as tasks see them, with texts and labels, and texts to tokens; what is wrong with a row is a `BadValue`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any, NamedTuple

from vramfit.errors import WorkloadError
from vramfit.units import MAX_SHOWN_CHARACTERS, shown

Reference = dict[str, Any]
"""What is known of a sample beside its tokens: `row`, the line it begins on; `index`, the rows of data before it; and
the keys that its task's `read_row` puts in."""
MISSING = "nan"
"""What pandas writes where a label is missing, in any case."""
NUM_NAMED = 8
"""Names that a message shows of many."""
CHUNK_ROWS = 1024
CHUNK_CHARACTERS = 2_000_000
"""Texts that go to the tokenizer at once: few enough that very long ones do not fill the memory."""


class BadValue(ValueError):
    """Raised while a row is looked at; the message says what is wrong with it."""

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


class Row(NamedTuple):
    """One row as it stands in the file."""

    number: int
    """The line it begins on, from 1; in a JSON document or a `datasets` folder, which one it is."""
    fields: dict[str, Any]
    problem: str = ""
    """What is wrong with it; the fields are then empty."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns to read."""

    texts: tuple[str, ...]
    label: str | None
    """None where no labels are wanted, or where texts are their own labels."""
    form: str = ""
    """What rows are, for a task that reads several forms."""
    num_texts: int = 0
    """Texts of a row, where every row has as many."""
    note: str = ""
    """What is said of them."""
    labels: tuple[str, ...] = ()
    """Where several columns hold what is learned; `label` is then all their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is known where columns are chosen."""

    file: str
    names: tuple[str, ...]
    """Of the columns that are there."""
    first: Mapping[str, Any]
    """Fields of a row."""
    texts: tuple[str, ...]
    """Columns that the user names; none where they are to be found."""
    label: str | None
    """The same, of labels."""
    needs_labels: bool
    loss: str | None
    """What is to learn from them; None where nothing is chosen."""


def some_of(names: Sequence[str]) -> str:
    """The first names, for a message."""
    named = [
        name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}…" for name in names[:NUM_NAMED]
    ]
    return ", ".join(named) + (", …" if len(names) > NUM_NAMED else "")


def text_in(row: Row, column: str) -> str:
    """The text in a column of a row.

    Raises:
        BadValue: there is none, or something else is there.
    """
    value = row.fields.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise BadValue(f"{column} is {shown(value)}, not a text")
    if value is None or not value.strip():
        raise BadValue(f"no {column}" if column not in row.fields else f"{column} is empty")
    check_characters(value, column)
    return value


def check_characters(text: str, column: str) -> None:
    """Raises BadValue for a text that cannot be encoded."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise BadValue(f"{column} has half of a surrogate pair, which is no character")


def number_of(value: Any) -> float | None:
    """The finite number in a cell; None for anything else.

    >>> number_of(" 2.5"), number_of(True), number_of("nan")
    (2.5, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def label_text(value: Any) -> str:
    """A label as its name: numbers and texts.

    Raises:
        BadValue: nothing, or something that names no class.

    >>> label_text(3), label_text(" spam "), label_text(True)
    ('3', 'spam', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not isnan(value):
        value = int(value) if value.is_integer() else str(value)
    text = str(value).strip() if isinstance(value, str | int) else ""
    if not text or text.casefold() == MISSING:
        missing = value is None or isinstance(value, str | float)
        raise BadValue("the label is missing" if missing else f"the label is {shown(value)}, not a name or a number")
    return text


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names in an order that depends on nothing else: whole numbers by value, otherwise by alphabet.

    >>> in_order({"10", "9"}), in_order({"b", "a", "1"})
    (('9', '10'), ('1', 'a', 'b'))
    """
    found = set(names)
    if all(_is_number(name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def _is_number(name: str) -> bool:
    return name.removeprefix("-").isdecimal() and name.isascii()


class LabelNames:
    """The names that labels may have: given, or gathered from the data.

    Args:
        given: names in the order of their numbers. A label that is a whole number then means the name at that place,
            unless the names are numbers themselves.
        problem: what a head is to learn, where that is known before the data.
    """

    def __init__(self, given: Sequence[str] | None = None, problem: str | None = None) -> None:
        names = None if given is None else tuple(str(name) for name in given)
        if names is not None and len(set(names)) != len(names):
            raise WorkloadError([f"label names repeat: {', '.join(names)}"])
        self._given = names
        self._known = None if names is None else frozenset(names)
        self.new: Counter[str] = Counter()
        """Labels that were asked for and are not among those given, lists of them too; and how often each was."""
        self._are_numbers = names is not None and any(_is_number(name) for name in names)
        self._by_number = False
        self.problem = problem
        """What a head learns from them; None until that is decided, and for tasks that learn one thing."""
        self.value_names: tuple[str, ...] = ()
        """Names of the numbers of a row, where it is numbers that are learned."""
        self.marked: tuple[str, ...] = ()
        """Labels that rows say yes or no to, where they do; some may have no yes."""
        self.said = ""
        """What they were taken for, in words, where that was decided and is worth saying."""

    def name_of(self, value: Any) -> str:
        """The name of a label.

        Raises:
            BadValue: no label, or one outside the names.
        """
        if isinstance(value, list):
            self.new[str(value)] += 1
        text = label_text(value)
        if self._known is None or self._given is None:
            self.new[text] += 1
            return text
        if text in self._known:
            return text
        if _is_number(text) and not self._are_numbers and 0 <= int(text) < len(self._given):
            self._by_number = True
            return self._given[int(text)]
        self.new[text] += 1
        raise BadValue(f"the label {shown(text)} is not one of the {len(self._given)} known: {some_of(self._given)}")

    @property
    def are_given(self) -> bool:
        """Whether they were known before the data."""
        return self._given is not None

    @property
    def known(self) -> tuple[str, ...]:
        """Those given."""
        return self._given or ()

    def names(self, used: Iterable[str]) -> tuple[str, ...]:
        """All of them in order: those given, or those used."""
        return self._given if self._given is not None else in_order(used)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the labels that were asked for: which name each stands for, where they are numbers."""
        if not self._by_number:
            return ()
        pairs = some_of([f"{number} is {name}" for number, name in enumerate(self._given or ())])
        return (f"labels are numbers: {pairs}",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizing:
    """How references become tokens."""

    tokenizer: Any
    """A fast one, as `load_tokenizer` gives it."""
    max_length: int
    """Tokens a sample may have, special ones included."""
    label_names: Sequence[str] = ()
    """Names of the classes, in the order of their numbers."""
    stride: int = 0
    """Tokens that two windows of one text share, where a task reads windows."""
    problem: str | None = None
    """What the head learns, of a task whose head may learn several things."""
    thresholds: Sequence[float] = ()
    """The probability from which each label is given, where several may be; none: a half."""
    prompt: str = ""
    """What goes before every text."""

    @property
    def label_numbers(self) -> dict[str, int]:
        """The number of each class."""
        return {name: number for number, name in enumerate(self.label_names)}


class Encoded(NamedTuple):
    """One sample, or one window of it."""

    reference: Reference
    ids: Sequence[int]
    token_types: Sequence[int]
    """Which of two texts each token belongs to; empty for a single one."""
    labels: Sequence[float]
    """Numbers that the task makes labels of: a class, a class for each token; empty without labels."""
    full_length: int
    """Tokens before the cut; of the whole, where this is a window of it."""


def check_room(tokenizer: Any, max_length: int, *, pair: bool) -> None:
    """Raises WorkloadError where a length has no room for more than the special tokens."""
    least = int(tokenizer.num_special_tokens_to_add(pair=pair)) + (2 if pair else 1)
    if max_length < least:
        raise WorkloadError([f"a length of {max_length} tokens leaves none for text; the least is {least}"])


def chunks(references: Iterable[Reference]) -> Iterator[list[Reference]]:
    """References in parts that go to the tokenizer at once."""
    chunk: list[Reference] = []
    size = 0
    for reference in references:
        chunk.append(reference)
        size += sum(len(t) for t in texts_of(reference))
        if len(chunk) == CHUNK_ROWS or size > CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def texts_of(reference: Reference) -> tuple[str, ...]:
    """What goes to the tokenizer."""
    if "texts" in reference:
        texts: tuple[str, ...] = reference["texts"]
        return texts
    return (reference["question"], reference["context"]) if "question" in reference else (reference["text"],)


def tokenize(tokenizer: Any, texts: Sequence[tuple[str, ...]], **options: Any) -> Any:
    """What the tokenizer gives for texts or pairs of them."""
    columns = [list(column) for column in zip(*texts, strict=True)]
    return tokenizer(
        *columns, verbose=False, return_attention_mask=False, return_token_type_ids=len(columns) > 1, **options
    )


def in_rust(tokenizer: Any) -> Any:
    """What a tokenizer of transformers calls, in Rust; None where somebody has put code of their own around it."""
    around = [getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus")]
    is_plain = all(getattr(method, "__module__", "").partition(".")[0] == "transformers" for method in around)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend if is_plain and hasattr(backend, "encode_batch_fast") else None


def _tokenized(tokenizer: Any, texts: Sequence[tuple[str, ...]], **options: Any) -> list[dict[str, Any]]:
    """What the tokenizer gives for each text. Where that is tokens alone, one text is enough to have the tokenizer in
    Rust set, and the objects that transformers makes of each text, which take as long as its tokens, are left out."""
    backend = in_rust(tokenizer) if options.keys() <= {"truncation", "max_length"} else None
    made = tokenize(tokenizer, texts if backend is None else texts[:1], **options)
    if backend is None:
        return [{key: made[key][i] for key in made} for i in range(len(texts))]
    is_pair = len(texts[0]) > 1
    rows = backend.encode_batch_fast([text if is_pair else text[0] for text in texts])
    return [{"input_ids": row.ids} | ({"token_type_ids": row.type_ids} if is_pair else {}) for row in rows]


def cut(how: Tokenizing, chunk: list[Reference], **options: Any) -> list[tuple[int, dict[str, Any]]]:
    """Full length and encoding of each text. What is too long is done once more, and cut by the tokenizer itself."""
    tokenizer, max_length = how.tokenizer, how.max_length
    texts = [texts_of(reference) for reference in chunk]
    if how.prompt:
        texts = [(how.prompt + first, *others) for first, *others in texts]
    results = _tokenized(tokenizer, texts, truncation=False, **options)
    lengths = [len(made["input_ids"]) for made in results]
    long = [i for i, length in enumerate(lengths) if length > max_length]
    if long:
        again = _tokenized(tokenizer, [texts[i] for i in long], truncation=True, max_length=max_length, **options)
        for i, made in zip(long, again, strict=True):
            results[i] = made
    return list(zip(lengths, results, strict=True))


def encode_texts(references: Iterable[Reference], how: Tokenizing) -> Iterator[Encoded]:
    """Texts or pairs of them; a `label` that is a name becomes its number, and one that is a number stays; of several
    each does."""
    numbers = how.label_numbers
    for chunk in chunks(references):
        for reference, (full, made) in zip(chunk, cut(how, chunk), strict=True):
            label = reference.get("label")
            several = label if isinstance(label, tuple) else () if label is None else (label,)
            labels = [numbers[one] if isinstance(one, str) else one for one in several]
            yield Encoded(reference, made["input_ids"], made.get("token_type_ids", ()), labels, full)
