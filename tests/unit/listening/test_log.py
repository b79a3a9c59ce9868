"""A log that no client can fill."""

import logging

import pytest

import vramfit.listening as module
from vramfit.listening import PERIOD_S, REMARKS, Sparing


def test_a_flood_of_one_remark_hides_no_other_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    written: list[str] = []
    logger = logging.Logger("flooded")
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.addFilter(Sparing())

    def flood(number: int) -> None:
        for n in range(number):
            logger.warning("bad request %d", n)

    flood(5_000)
    logger.error("something else")
    assert len(written) == REMARKS + 1
    assert written[-1] == "something else"
    now[0] = PERIOD_S
    flood(1)
    assert written[-1] == f"bad request 0 ({5_000 - REMARKS:,} more like it were left out before)"
