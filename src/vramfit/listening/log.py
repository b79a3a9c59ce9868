"""A log that no client can fill: of each kind of remark, a few a minute."""

import logging
from time import monotonic

REMARKS = 10
"""Of one kind, in one period."""
PERIOD_S = 60.0
LOGGERS = ("uvicorn.error", "asyncio")


class Sparing(logging.Filter):
    """Lets the first few remarks of a period pass; the next that passes says how many were left out.

    Remarks are of one kind where one line of code makes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._periods: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a remark is written."""
        kind, now = (record.pathname, record.lineno), monotonic()
        began, number = self._periods.get(kind, (now, 0))
        if now - began >= PERIOD_S:
            if number > REMARKS:
                record.msg = f"{record.getMessage()} ({number - REMARKS:,} more like it were left out before)"
                record.args = ()
            began, number = now, 0
        self._periods[kind] = (began, number + 1)
        return number < REMARKS


def spare_log() -> None:
    """Bound what uvicorn and asyncio write."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, Sparing) for one in logger.filters):
            logger.addFilter(Sparing())
