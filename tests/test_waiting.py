"""Waiting in tests: it ends with what is waited for, with the process that should bring it, or with the limit."""

import subprocess
import sys

import pytest

from tests.waiting import ended_in_time, running, wait_until

IDLE = [sys.executable, "-c", "input()"]


def test_what_comes_is_given() -> None:
    looks = iter([None, 0, "there"])
    assert wait_until(lambda: next(looks), "something") == "there"


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    with running([sys.executable, "-c", "raise SystemExit(5)"]) as child:
        child.wait()
        with pytest.raises(AssertionError, match="the process ended with 5 before this: a file is written"):
            wait_until(lambda: False, "a file is written", child=child)
        assert wait_until(lambda: "there", "what it did last", child=child) == "there"


def test_what_never_comes_ends_with_the_limit() -> None:
    with pytest.raises(TimeoutError, match="not within 0 s: a file is written"):
        wait_until(lambda: False, "a file is written", limit_s=0.0)


def test_a_process_that_says_nothing_is_read_to_its_end() -> None:
    with running(IDLE, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        with ended_in_time(child, limit_s=0.0):
            assert child.stdout.read() == ""


def test_no_process_outlives_its_block() -> None:
    with pytest.raises(ValueError, match="wrong"), running(IDLE, stdin=subprocess.PIPE) as child:
        raise ValueError("wrong")
    assert child.returncode is not None
