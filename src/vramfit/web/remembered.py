"""Answers that were given, up to a number of bytes; the longest unused go first."""

from collections import OrderedDict


class Remembered:
    """A bounded memory of answers.

    >>> kept = Remembered(max_bytes=10)
    >>> kept.put("a", (200, b"12345678")); kept.put("b", (200, b"1234"))
    >>> kept.get("a") is None, kept.get("b")
    (True, (200, b'1234'))
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._answers: OrderedDict[object, tuple[int, bytes]] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self._answers

    def get(self, key: object) -> tuple[int, bytes] | None:
        """The answer to a question that was asked before."""
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
        return found

    def put(self, key: object, answer: tuple[int, bytes]) -> None:
        """Keep an answer, and drop old ones."""
        if key in self._answers:
            self.num_bytes -= len(self._answers.pop(key)[1])
        self._answers[key] = answer
        self.num_bytes += len(answer[1])
        while self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._answers.popitem(last=False)
            self.num_bytes -= len(dropped)
