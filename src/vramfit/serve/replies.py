"""What goes back to a client: a status and JSON; what is wrong is said in a sentence, with what to do."""

import json
from dataclasses import dataclass, field
from typing import Any

RETRY = {"Retry-After": "1"}


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
