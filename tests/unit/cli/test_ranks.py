"""Of several processes one prints."""

import pytest
import typer

from vramfit.cli.terminal import only_rank_zero_prints, prints
from vramfit.errors import RankFailed, WorkloadError


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_a_process_alone_and_rank_0_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert prints()
    be_rank(monkeypatch, 0)
    assert prints()
    with pytest.raises(WorkloadError), only_rank_zero_prints():
        raise WorkloadError(["batch 0"])


def test_other_ranks_leave_without_a_word_and_with_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, 2)
    assert not prints()
    with pytest.raises(typer.Exit) as left, only_rank_zero_prints():
        raise WorkloadError(["batch 0"])
    assert left.value.exit_code == WorkloadError.exit_code
    with pytest.raises(typer.Exit) as left, only_rank_zero_prints():
        raise ZeroDivisionError
    assert left.value.exit_code == 1


def test_where_rank_0_is_lost_rank_1_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RankFailed("rank 0 is lost: killed", rank=0)
    be_rank(monkeypatch, 1)
    with pytest.raises(RankFailed), only_rank_zero_prints():
        raise lost
    be_rank(monkeypatch, 2)
    with pytest.raises(typer.Exit), only_rank_zero_prints():
        raise lost
