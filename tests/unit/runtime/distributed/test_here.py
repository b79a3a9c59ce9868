"""Processes of this machine are seen to run and to have ended."""

import os
import subprocess

from tests.waiting import LIMIT_S

from vramfit.runtime.distributed import here


def test_a_process_runs_until_it_has_ended_though_nobody_asked_how() -> None:
    assert here.is_running(here.name_of(os.getpid())) is True
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        name = here.name_of(process.pid)
        assert here.is_running(name) is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the table
        assert here.is_running(name) is False
        process.wait(LIMIT_S)
    assert here.is_running(name) is False


def test_another_process_with_the_same_number_is_not_taken_for_it() -> None:
    where, _, began = here.name_of(os.getpid()).rpartition("/")
    assert here.is_running(f"{where}/{int(began) + 1}") is False


def test_nothing_is_known_of_other_machines() -> None:
    _, _, process = here.name_of(os.getpid()).partition("/")
    assert here.is_running(f"another-machine/{process}") is None
    assert here.is_running("") is None
