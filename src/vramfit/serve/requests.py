"""Requests: how bodies are read and cut, and their replies. A body is JSON, with texts as each task takes them."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vramfit.serve.settings import MAX_REQUEST_CHARACTERS, MAX_REQUEST_TOKENS
from vramfit.tasks import encoder_alone, find_task
from vramfit.tasks.parts.reading import BadValue, Columns, LabelNames, Reference, Row
from vramfit.tasks.parts.results import wrong_top_k
from vramfit.units import shown

INVOCATIONS = "/invocations"
KEYS = ("inputs", "instances")
MODEL = "model"
"""Beside the inputs: which model is meant, where there are several."""
PARAMETERS = "parameters"
PARAMETERS_HINT = '{"inputs": …, "parameters": {"top_k": 3}}'
CHARACTERS_A_TOKEN = 16
"""Texts of so many for each token that is read are looked at; shorter ones are tokenized whole."""
MOST_CHARACTERS_A_TOKEN = 1024
"""A text that has more, as a word of a million letters has, is refused: it would cost far more than is read of it."""
MORE_TOKENS = 64
"""Beyond the length, so that what is cut lies out of sight."""
GROWTH = 4
"""As many times as much is looked at where a part has too few tokens."""
RETRY = {"Retry-After": "1"}
HEADERS = {429: RETRY, 503: RETRY, 401: {"WWW-Authenticate": "Bearer"}}


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    """Why there is no answer; the body says it as /invocations does, and other paths in their own shape."""
    hint: str | None = None


class Refused(Exception):
    """A request that cannot be answered; the client's to mend."""

    def __init__(self, status: int, error: str, hint: str | None = None) -> None:
        super().__init__(error)
        self.reply = problem(status, error, hint)


def problem(status: int, error: str, hint: str | None = None) -> Reply:
    """Why there is no answer."""
    return Reply(status, dumps({"error": error, "hint": hint}), HEADERS.get(status, {}), error, hint)


def dumps(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class Known:
    """What requests depend on, of the model that answers them."""

    task: str
    max_length: int
    num_labels: int = 0
    """Of a head that gives scores for a whole text; 0 for others."""
    label_names: tuple[str, ...] = ()
    problem_type: str | None = None
    """What the configuration says that the scores are, in the words of transformers."""
    num_dims: int = 0
    """Of a vector; 0 where none are given."""
    normalizes: bool = False
    """Whether vectors have unit length already."""
    pooling: str | None = None
    dtype: str = "float32"
    """Of the weights, as torch calls it."""

    @property
    def gives_vectors(self) -> bool:
        """Whether an answer is a vector."""
        return find_task(self.task).gives_vectors


@dataclass(frozen=True, slots=True)
class Answers:
    """What was said of a request's inputs."""

    rows: list[list[dict[str, Any]]]
    """Of each input, a row for each window; with `logits` where they were asked for."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request understood."""

    references: list[Reference]
    """One for each input, as its task reads them."""
    write: Callable[[Answers], bytes]
    """The body of its answer; raises ValueError for numbers that JSON has not."""
    is_list: bool
    """Whether a list of answers is wanted."""
    top_k: int | None = None
    """How many scores are wanted; None leaves it to the server."""
    has_logits: bool = False
    """Whether what the head gives is wanted as it is."""
    may_cut: bool = True
    """Whether a text that is too long is cut, not refused."""


def read_body(body: bytes, task: str) -> Asked:
    """What a request to /invocations asks for.

    Raises:
        Refused: not JSON, or not what this task takes.
    """
    data = parse(body, _hint(task))
    key = next((name for name in KEYS if isinstance(data, dict) and name in data), None)
    if key is None:
        raise Refused(400, f"the body is {kind_of(data)} without {' or '.join(KEYS)}", _hint(task))
    top_k = _top_k(data.get(PARAMETERS, {}), task)
    others = [name for name in data if name not in (key, PARAMETERS, MODEL)]
    if others:
        raise Refused(400, f"{shown(others[0])} is not a known field next to {key!r}", _hint(task))
    given = data[key]
    is_list = isinstance(given, list)
    references = read_inputs(given if is_list else [given], task, key, is_list=is_list)

    def write(answers: Answers) -> bytes:
        kind = find_task(task)
        if kind.gives_vectors:
            made = [write_vector(rows[0]["embedding"]) for rows in answers.rows]
        else:
            made = [dumps(kind.reply(rows)).decode() for rows in answers.rows]
        value = f"[{','.join(made)}]" if is_list else made[0]
        return (f'{{"predictions":{value}}}' if key == "instances" else value).encode()

    return Asked(references, write, is_list, top_k)


def parse(body: bytes, hint: str) -> Any:
    """A body as JSON.

    Raises:
        Refused: it is none.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise Refused(400, f"the body is not JSON: {what}", hint) from None


def read_inputs(
    inputs: Sequence[Any], task: str, key: str, *, is_list: bool = True, hint: str | None = None
) -> list[Reference]:
    """Inputs as their task reads them.

    Args:
        key: what they came under.
        is_list: whether they came as a list: a problem then says which one it is in.
        hint: what a request looks like; None says it of /invocations.

    Raises:
        Refused: none, too many, or one that the task does not take.
    """
    if not inputs:
        raise Refused(400, f"{key} is an empty list", hint or _hint(task))
    if len(inputs) > MAX_REQUEST_TOKENS:
        many = f"{len(inputs):,} inputs have more than the {MAX_REQUEST_TOKENS:,} tokens of one request"
        raise Refused(413, many, "send them in several requests")
    size = sum(map(_num_characters, inputs)) if find_task(task).answers_every_word else 0
    if size > MAX_REQUEST_CHARACTERS:
        many = f"{size:,} characters are more than the {MAX_REQUEST_CHARACTERS:,} of one request"
        raise Refused(413, many, "send them in several requests")
    made = []
    for number, one in enumerate(inputs):
        try:
            made.append(_reference(one, task))
        except BadValue as error:
            where = f"{key}[{number}]: " if is_list else ""
            raise Refused(400, f"{where}{error}", hint or _hint(task)) from None
    return made


def _top_k(parameters: Any, task: str) -> int | None:
    """What a request's parameters ask for beside its inputs."""
    if not isinstance(parameters, dict):
        raise Refused(400, f"{PARAMETERS} is {kind_of(parameters)}, not an object", PARAMETERS_HINT)
    others = [name for name in parameters if name != "top_k"]
    if others:
        raise Refused(400, f"{PARAMETERS}: {shown(others[0])} is not known", PARAMETERS_HINT)
    top_k = parameters.get("top_k")
    wrong = None if top_k is None else wrong_top_k(top_k, task)
    if wrong is not None:
        raise Refused(400, f"{PARAMETERS}: {wrong}", PARAMETERS_HINT if find_task(task).max_scores else _hint(task))
    return top_k


def _num_characters(given: Any) -> int:
    """Of the texts in an input."""
    values = given.values() if isinstance(given, dict) else (given,)
    parts = (part for value in values for part in (value if isinstance(value, list) else (value,)))
    return sum(len(part) for part in parts if isinstance(part, str))


def _reference(given: Any, task: str) -> Reference:
    kind = find_task(task)
    if isinstance(given, str) and kind.takes_bare_text:
        given = {"text": given}
    if not isinstance(given, dict):
        raise BadValue(f"{shown(given)} is no input of {task}")
    fields = kind.request_fields
    names = next((names for names in fields if all(name in given for name in names)), fields[-1])
    others = [name for name in given if name not in names]
    if others:
        raise BadValue(f"{shown(others[0])} is not known; {task} takes {' and '.join(names)}")
    return {"row": 0} | kind.read_row(Row(0, given), Columns(names, None), LabelNames())


def _hint(task: str) -> str:
    return " or ".join(f'{{"inputs": {form}}}' for form in find_task(task).request_forms)


def kind_of(data: Any) -> str:
    """What a value of JSON is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(data), "a number")


def write_vector(numbers: Sequence[float]) -> str:
    """What is said of a text whose vector is wanted.

    Raises:
        ValueError: it has numbers that JSON has not: NaN or infinity.

    >>> write_vector([0.5, -2.0, 1e-7])
    '{"embedding":[0.5,-2,1e-07]}'
    """
    return f'{{"embedding":{write_numbers(numbers)}}}'


def write_numbers(numbers: Sequence[float]) -> str:
    """A list of fp32 numbers, in as many digits as tell one from the next.

    Raises:
        ValueError: it has numbers that JSON has not.
    """
    written = _form(len(numbers)) % tuple(numbers)
    if "n" in written:  # nan, inf
        raise ValueError("a vector has values that are no numbers")
    return f"[{written}]"


@lru_cache(maxsize=8)
def _form(size: int) -> str:
    return ",".join(["%.9g"] * size)


def beginning(text: str, tokenizer: Any, max_length: int) -> str:
    """As much of a text as decides its first `max_length` tokens.

    It ends between two words: those do not change the words before them. A text without spaces, as Chinese is
    written, is cut anywhere, where a cut further on gives the same tokens.

    Raises:
        Refused: a text so long with so few tokens that the end of what is read is not found.
    """
    size, before = CHARACTERS_A_TOKEN * max_length, None
    most = MOST_CHARACTERS_A_TOKEN * max_length
    while len(text) > size:
        if size > most:
            what = f"the first {most:,} of a text's {len(text):,} characters do not settle its {max_length:,} tokens"
            raise Refused(413, what, f"send texts of at most {most:,} characters, or with spaces between words")
        part = text[:size].rstrip()
        cut = max(part.rfind(" "), part.rfind("\n"))
        part = part[:cut].rstrip() if cut > 0 else part
        ids = _ids(part, tokenizer)
        if len(ids) >= max_length + MORE_TOKENS:
            if cut > 0 or ids[:max_length] == before:
                return part
            before = ids[:max_length]
        size *= GROWTH
    return text


def has_more(text: str, tokenizer: Any, num_tokens: int) -> bool:
    """Whether a text has more tokens than that for certain, found without tokenizing all of a very long one."""
    size = 2 * num_tokens
    while len(text) > size:
        if len(_ids(text[:size], tokenizer)) > num_tokens + MORE_TOKENS:
            return True
        size *= GROWTH
    return False


def _ids(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def read_object(body: bytes, names: Collection[str], hint: str) -> dict[str, Any]:
    """A body that is an object with no other fields than these, and `model`; those that are null are left out.

    Raises:
        Refused: it is something else.
    """
    data = parse(body, hint)
    if not isinstance(data, dict):
        raise Refused(400, f"the body is {kind_of(data)}, not an object", hint)
    others = [name for name in data if name not in names and name != MODEL]
    if others:
        raise Refused(400, f"{shown(others[0])} is not known; there are {', '.join(names)}", hint)
    return {name: value for name, value in data.items() if value is not None}


def switch(data: dict[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false."""
    value = data.get(name, default)
    if not isinstance(value, bool):
        raise Refused(400, f"{name} is {kind_of(value)}, not true or false")
    return value


def choice(data: dict[str, Any], name: str, values: tuple[str, ...]) -> str:
    """A field with one of a few values, the first one where it is missing."""
    value = data.get(name, values[0])
    if not isinstance(value, str) or value not in values:
        raise Refused(400, f"{name} is {shown(value)}, not {' or '.join(values)}")
    return value


def read_texts(value: Any, name: str, hint: str) -> list[Any]:
    """A text or a list of inputs, as a list; token ids are refused by name.

    >>> read_texts("a", "input", "")
    ['a']
    """
    given = value if isinstance(value, list) else [value]
    for one in (*given[:1], *(inner for inner in given[:1] if isinstance(inner, list) for inner in inner[:1])):
        if isinstance(one, int) and not isinstance(one, bool):
            raise Refused(400, f"{name} has token ids; texts are taken here", hint)
    wrong = next((n for n, one in enumerate(given) if not isinstance(one, str)), None)
    if wrong is not None:
        where = f"{name}[{wrong}]" if isinstance(value, list) else name
        raise Refused(400, f"{where} is {kind_of(given[wrong])}, not a text", hint)
    return given


def read_dims(data: dict[str, Any], known: Known) -> int | None:
    """How many numbers of a vector are wanted; None for all of them."""
    num_dims = data.get("dimensions")
    if num_dims is None:
        return None
    if not isinstance(num_dims, int) or isinstance(num_dims, bool) or not 1 <= num_dims <= known.num_dims:
        raise Refused(400, f"dimensions is {shown(num_dims)}; vectors of this model have {known.num_dims:,}")
    return num_dims


def need_vectors(known: Known, status: int) -> None:
    """Raises Refused where the model gives no vectors."""
    if not known.gives_vectors:
        what = f"the model gives no vectors: its task is {known.task}"
        raise Refused(status, what, f"serve an embedding model, or this one with --task {encoder_alone().name}")
