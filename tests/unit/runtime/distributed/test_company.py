"""A run's end among several processes."""

from pathlib import Path

from tests.unit.runtime.distributed.launch import run_ranks

from vramfit.runtime.distributed.processes import company


def voted() -> list[str]:
    """The threads of gloo that are left after a run."""
    with company("cpu") as processes:
        assert processes.size == 2
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    del processes  # held until here, as a run's records hold it
    return [name for name in names if "gloo" in name]


def test_no_thread_of_a_vote_outlives_the_run() -> None:
    """One that lets go of a tensor while Python ends has C++ abort the process."""
    assert [ended.value for ended in run_ranks(voted, 2)] == [[], []]
