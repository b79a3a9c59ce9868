"""One of something is said as one."""

from types import SimpleNamespace

import pytest

from vramfit.cli.inference import say_what_was_cut
from vramfit.cli.train import Display
from vramfit.runtime.data.examples import BadRow
from vramfit.runtime.training.events import Started


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, ("1 row cannot be used; ", "1 row is longer than 8 tokens and was cut; ")),
        (2, ("2 rows cannot be used; ", "2 rows are longer than 8 tokens and were cut; ")),
    ],
)
def test_rows_that_were_left_out_or_cut(count: int, said: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    bad = [BadRow("a.csv", 2, "text is empty")] * count
    task = "sequence-classification"
    samples = SimpleNamespace(
        bad_rows=bad, task=task, num_truncated=count, lengths=[8], longest_before_truncation=9, notes=()
    )
    say_what_was_cut(samples)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(said[0])
    assert second.startswith(said[1])


@pytest.mark.parametrize(("count", "said"), [(1, "Training: 1 step, as"), (1200, "Training: 1,200 steps, as")])
def test_steps_of_a_run(count: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Display().show(Started(step=0, num_steps=count, settings="as planned", budget_bytes=None))
    assert capsys.readouterr().err.startswith(said)
