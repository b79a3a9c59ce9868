"""`Connections`: all that are open, what each is waiting for, and which one is closed first when there are too many.

Each connection takes a file handle of the server, so their number is bounded below the process's limit. Where the bound
is reached, a new connection replaces another: of the connections from one address that have not sent a whole request,
the one that has waited longest. A usual client sends its request with the connection and is not affected.
"""

import os
import sys
from enum import Enum
from time import monotonic
from typing import Protocol

MAX_CONNECTIONS = 4096
"""However many file handles there are: each connection also takes memory."""
MIN_CONNECTIONS = 16
SPARE_HANDLES = 128
"""For worker processes, files, and connections that are taken before others are closed."""
HEADERS_S = 10.0
"""Until the headers of a request have come whole."""
BODY_S = 30.0
"""Until its body has, too."""
UNREAD_S = 30.0
"""A client that takes nothing of its answer for so long is gone."""


class Awaits(Enum):
    """What a connection waits for."""

    HEADERS = "headers"
    BODY = "body"
    ANSWER = "answer"
    NEXT = "next"
    """Answered, and kept open for the next request."""


UNFINISHED = (Awaits.HEADERS, Awaits.BODY)
"""Requests that have not come whole."""
MANY = 4
"""Unfinished requests are many where one address has more than this part of all connections."""
LIMITS_S = {Awaits.HEADERS: HEADERS_S, Awaits.BODY: BODY_S}


class Connection(Protocol):
    """What is asked of a connection here."""

    address: str
    """Where it comes from."""

    @property
    def unsent_bytes(self) -> int:
        """Of answers that the client has not taken yet."""

    def drop(self) -> None:
        """Close it at once."""


Line = dict[Connection, float]
"""Connections with the time since which they wait, the oldest first."""


class Connections:
    """Connections by what they wait for and where they come from, in the order they began to wait.

    Args:
        most: that may be open at once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.most_unfinished = max(3 * most // 4, 1)
        """Of one address, without a whole request; what waits for an answer, or for its next request, is not counted:
        behind a load balancer, all clients have one address."""
        self._lines: dict[Awaits, dict[str, Line]] = {awaits: {} for awaits in Awaits}
        self._places: dict[Connection, Awaits] = {}
        self._unsent: dict[Connection, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def admit(self, new: Connection) -> bool:
        """Take a new connection, and drop another where there are too many; False where none may be dropped for it."""
        if sum(map(len, self._unfinished(new.address))) >= self.most_unfinished:
            self._drop_first(max(self._unfinished(new.address), key=len))
        if len(self) >= self.most and not self._drop_first(self._replaceable()):
            return False
        self._add(new, Awaits.HEADERS)
        return True

    def move(self, one: Connection, awaits: Awaits) -> None:
        """Note what a connection waits for from now on."""
        if one in self._places:
            self.remove(one)
            self._add(one, awaits)

    def remove(self, one: Connection) -> None:
        """Forget a connection that is closed."""
        awaits = self._places.pop(one, None)
        self._unsent.pop(one, None)
        if awaits is None:
            return
        by_address = self._lines[awaits]
        del by_address[one.address][one]
        if not by_address[one.address]:
            del by_address[one.address]

    def drop_late(self) -> None:
        """Drop those that have taken too long with a request, or with taking its answer."""
        now = monotonic()
        for awaits, limit_s in LIMITS_S.items():
            late = [o for line in self._lines[awaits].values() for o, since in line.items() if now - since > limit_s]
            for one in late:
                self._drop(one)
        for one in list(self._places):
            if self._takes_nothing(one, now):
                self._drop(one)

    def _add(self, one: Connection, awaits: Awaits) -> None:
        self._places[one] = awaits
        self._lines[awaits].setdefault(one.address, {})[one] = monotonic()

    def _unfinished(self, address: str) -> list[Line]:
        return [self._lines[awaits].get(address, {}) for awaits in UNFINISHED]

    def _replaceable(self) -> Line:
        """Which connections make room, oldest first: unfinished ones where they are many, else idle ones.

        One that waits for its answer is never dropped for another.
        """
        unfinished = max((line for a in UNFINISHED for line in self._lines[a].values()), key=len, default={})
        idle = max(self._lines[Awaits.NEXT].values(), key=len, default={})
        return unfinished if len(unfinished) > self.most // MANY or not idle else idle

    def _drop_first(self, line: Line) -> bool:
        for one in line:
            self._drop(one)
            return True
        return False

    def _drop(self, one: Connection) -> None:
        self.remove(one)
        one.drop()

    def _takes_nothing(self, one: Connection, now: float) -> bool:
        size = one.unsent_bytes
        if not size:
            self._unsent.pop(one, None)
            return False
        before, since = self._unsent.get(one, (0, now))
        if size != before:
            self._unsent[one] = (size, now)
            return False
        return now - since > UNREAD_S


def most_connections() -> int:
    """As many as the limit of file handles leaves room for."""
    if sys.platform == "win32":
        return 400  # of the 512 that select takes there
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(max(limit - _num_open() - SPARE_HANDLES, MIN_CONNECTIONS), MAX_CONNECTIONS)


def _num_open() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64
