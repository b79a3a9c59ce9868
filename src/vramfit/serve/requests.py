"""Requests: how bodies are read and cut, how they wait in a bounded queue, and their replies.

A body is JSON, with texts as each task takes them. Workers take requests by weight in tokens; replies find their way to
the event loop through a `Mailbox`.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any, Generic, TypeVar

from vramfit.serve.settings import BYTES_A_TOKEN, MAX_REQUEST_CHARACTERS, MAX_REQUEST_TOKENS, MAX_WAITING_BYTES
from vramfit.tasks import find_task
from vramfit.tasks.parts.reading import BadValue, Columns, LabelNames, Reference, Row
from vramfit.tasks.parts.results import wrong_top_k
from vramfit.units import shown

KEYS = ("inputs", "instances")
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
_numbers = count()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A request that cannot be answered; the client's to mend."""

    def __init__(self, status: int, error: str, hint: str | None = None) -> None:
        super().__init__(error)
        self.reply = problem(status, error, hint)


def answer(value: Any) -> Reply:
    """A value as an answer.

    Raises:
        ValueError: it has numbers that JSON has not: NaN or infinity.
    """
    return Reply(200, dumps(value))


def problem(status: int, error: str, hint: str | None = None) -> Reply:
    """Why there is no answer."""
    return Reply(status, dumps({"error": error, "hint": hint}), RETRY if status in (429, 503) else {})


def dumps(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request on its way."""

    number: int
    body: bytes
    deliver: Callable[[Reply], None]
    """Takes the answer, from any thread."""
    is_wanted: Callable[[], bool]
    """Whether somebody still waits for it."""
    num_deaths: int = 0
    """Workers that ended while they had it."""

    @staticmethod
    def of(body: bytes, deliver: Callable[[Reply], None], is_wanted: Callable[[], bool]) -> "PendingRequest":
        """A request that has just come."""
        return PendingRequest(next(_numbers), body, deliver, is_wanted)


class Full(Exception):
    """Too many are waiting."""


class RequestQueue:
    """A line of requests that several workers take from.

    Args:
        max_requests: the next one is turned away.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._requests: deque[PendingRequest] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: PendingRequest) -> None:
        """Join the line.

        Raises:
            Full: there is no room, or the line is closed.
        """
        with self._changed:
            too_many = (
                len(self._requests) >= self._max_requests or self._num_bytes + len(request.body) > MAX_WAITING_BYTES
            )
            if self._is_closed or (too_many and self._requests):
                raise Full
            self._requests.append(request)
            self._num_bytes += len(request.body)
            self._changed.notify()

    def put_back(self, requests: Iterable[PendingRequest]) -> None:
        """First in line again, whatever the bounds: they were let in once."""
        with self._changed:
            for request in reversed(list(requests)):
                self._requests.appendleft(request)
                self._num_bytes += len(request.body)
            self._changed.notify()

    def take(self, max_tokens: int, max_length: int) -> list[PendingRequest] | None:
        """What waits, up to a weight, one request at least; waits for it. None when the line is closed and empty.

        A request that a worker has died of comes by itself.
        """
        with self._changed:
            while True:
                taken = self._taken(max_tokens, max_length)
                if taken:
                    return taken
                if self._is_closed and not self._requests:
                    return None
                self._changed.wait()

    def close(self) -> list[PendingRequest]:
        """Nobody joins any more; gives those who wait, who are in line no longer."""
        with self._changed:
            self._is_closed = True
            left, self._requests = list(self._requests), deque()
            self._num_bytes = 0
            self._changed.notify_all()
        return left

    def _taken(self, max_tokens: int, max_length: int) -> list[PendingRequest]:
        taken: list[PendingRequest] = []
        weight = 0
        while self._requests:
            request = self._requests[0]
            num_tokens = min(len(request.body) // BYTES_A_TOKEN + 1, 4 * max_length)
            alone = request.num_deaths > 0
            if taken and (alone or weight + num_tokens > max_tokens):
                break
            self._requests.popleft()
            self._num_bytes -= len(request.body)
            if not request.is_wanted():
                continue
            taken.append(request)
            weight += num_tokens
            if alone:
                break
        return taken


class Mailbox(Generic[T]):
    """Any thread may put; the loop of a future hands it out."""

    def __init__(self) -> None:
        self._letters: deque[tuple[asyncio.Future[T], T]] = deque()
        self._is_called = False

    def put(self, future: "asyncio.Future[T]", result: T) -> None:
        """The result of a future, unless nobody waits for it by then; lost where its loop has ended."""
        self._letters.append((future, result))
        if self._is_called:
            return
        self._is_called = True
        with suppress(RuntimeError):  # the loop is closed
            future.get_loop().call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._is_called = False  # before looking: what is put from now on calls again
        while self._letters:
            future, result = self._letters.popleft()
            if not future.done():
                future.set_result(result)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request understood."""

    references: list[Reference]
    """One for each input, as its task reads them."""
    key: str
    """What its inputs came under."""
    is_list: bool
    """Whether a list of answers is wanted."""
    top_k: int | None = None
    """How many scores are wanted; None leaves it to the server."""


def read_body(body: bytes, task: str) -> Asked:
    """What a request asks for.

    Raises:
        Refused: not JSON, or not what this task takes.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise Refused(400, f"the body is not JSON: {what}", _hint(task)) from None
    key = next((name for name in KEYS if isinstance(data, dict) and name in data), None)
    if key is None:
        raise Refused(400, f"the body is {_kind(data)} without {' or '.join(KEYS)}", _hint(task))
    top_k = _top_k(data.get(PARAMETERS, {}), task)
    others = [name for name in data if name not in (key, PARAMETERS)]
    if others:
        raise Refused(400, f"{shown(others[0])} is not known beside {key!r}", _hint(task))
    given = data[key]
    is_list = isinstance(given, list)
    inputs = given if is_list else [given]
    if not inputs:
        raise Refused(400, f"{key} is an empty list", _hint(task))
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
            raise Refused(400, f"{where}{error}", _hint(task)) from None
    return Asked(made, key, is_list, top_k)


def _top_k(parameters: Any, task: str) -> int | None:
    """What a request's parameters ask for beside its inputs."""
    if not isinstance(parameters, dict):
        raise Refused(400, f"{PARAMETERS} is {_kind(parameters)}, not an object", PARAMETERS_HINT)
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


def _kind(data: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(data), "a number")


def write_vector(numbers: Sequence[float]) -> str:
    """What is said of a text whose vector is wanted.

    Raises:
        ValueError: it has numbers that JSON has not: NaN or infinity.

    >>> write_vector([0.5, -2.0, 1e-7])
    '{"embedding":[0.5,-2,1e-07]}'
    """
    written = _form(len(numbers)) % tuple(numbers)
    if "n" in written:  # nan, inf
        raise ValueError("a vector has values that are no numbers")
    return f'{{"embedding":[{written}]}}'


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
