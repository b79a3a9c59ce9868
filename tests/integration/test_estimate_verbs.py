import json
import pickle
from pathlib import Path

import pytest
import typer

from tests.integration.command import Done, vramfit
from vramfit.cli.options import MAX_CELLS, WorkloadOptions, parse_counts
from vramfit.records.codec import from_data
from vramfit.records.estimate import Estimate, MaxBatch
from vramfit.settings import SETTINGS, having

MODEL = "bert-tiny"
SMALL = (MODEL, "--batch", "4", "--seq", "64")


def estimates(done: Done) -> list[Estimate]:
    """The estimates that `--json` printed, read back as records."""
    return [from_data(Estimate, data) for data in json.loads(done.out)]


def test_one_estimate_shows_verdict_numbers_peak_timeline_and_advice() -> None:
    done = vramfit("estimate", *SMALL, "--attention", "eager", "--gpu", "t4")
    assert done.code == 0
    for part in ("✓ Fits", "requested", "process", "At the peak", "Largest at the peak", "forward", "steady step"):
        assert part in done.out, part
    assert "What one change would save" in done.out
    assert done.err == ""


def test_json_is_an_array_of_one_estimate_and_nothing_else() -> None:
    done = vramfit("estimate", *SMALL, "--gpu", "t4", "--json")
    (estimate,) = estimates(done)
    assert (estimate.workload.batch, estimate.workload.seq, estimate.gpu) == (4, 64, "t4")
    assert sum(estimate.breakdown.values()) == estimate.peak_allocated_bytes
    assert done.err == ""


def test_a_table_has_a_row_for_each_length_and_answers_what_grew() -> None:
    done = vramfit("estimate", MODEL, "--batch", "1,4", "--seq", "64,128", "--attention", "eager", "--mode", "forward")
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines() if line.split()[:1]}
    assert done.code == 0
    assert len(rows["64"]) == len(rows["128"]) == 2
    assert "From 64 to 128 tokens at batch 4" in done.out
    assert "attention probabilities" in done.out


def test_a_table_as_json_is_an_array_length_by_length() -> None:
    done = vramfit("estimate", MODEL, "--batch", "4,1", "--seq", "64,128", "--json")
    cells = [(e.workload.seq, e.workload.batch) for e in estimates(done)]
    assert cells == [(64, 1), (64, 4), (128, 1), (128, 4)]


def test_what_does_not_fit_leaves_with_three_and_still_shows_all() -> None:
    done = vramfit("estimate", *SMALL, "--memory", "8MiB", "--no-advice")
    assert done.code == 3
    assert "✗ Does not fit" in done.out
    assert "What one change" not in done.out


def test_a_table_leaves_with_three_only_when_nothing_fits() -> None:
    sizes = ("--batch", "1,4096", "--seq", "64", "--json")
    some = vramfit("estimate", MODEL, *sizes, "--memory", "300MiB")
    assert [e.fits for e in estimates(some)] == [True, False]
    assert some.code == 0
    assert vramfit("estimate", MODEL, *sizes, "--memory", "8MiB").code == 3


def test_the_snapshot_is_what_the_visualiser_reads(tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    done = vramfit("estimate", *SMALL, "--snapshot", str(file), "--no-advice")
    assert done.code == 0
    assert str(file) in done.err.replace("\n", "")
    assert {"segments", "device_traces"} <= set(pickle.loads(file.read_bytes()))


def test_max_batch_says_the_number_and_what_stops_the_next() -> None:
    done = vramfit("max-batch", MODEL, "--seq", "64", "--memory", "200MiB")
    assert done.code == 0
    assert "Largest batch: " in done.out
    assert "What limits it: " in done.out


def test_max_batch_as_json_is_one_object() -> None:
    done = vramfit("max-batch", MODEL, "--seq", "64", "--memory", "200MiB", "--json")
    found = from_data(MaxBatch, json.loads(done.out))
    assert found.batch == found.estimate.workload.batch > 1
    assert found.estimate.fits


def test_no_batch_at_all_leaves_with_three() -> None:
    done = vramfit("max-batch", MODEL, "--seq", "64", "--memory", "4MiB")
    assert done.code == 3
    assert "Not even one sample fits" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("estimate", MODEL, "--batch", "1,x,8"), "'x' is not a whole number"),
        (("estimate", MODEL, "--batch", "0"), "'0' is not a whole number"),
        (("estimate", MODEL, "--batch", "1,,2"), "'' is not a whole number"),
        (("estimate", MODEL, "--batch", "9" * 400), "is not a whole number"),
        (("estimate", MODEL, "--seq", "-5"), "not a whole number"),
        (("estimate", MODEL, "--accumulate", "two"), "--accumulate"),
        (("estimate", MODEL, "--max-grad-norm", "nan"), "max_grad_norm"),
        (("estimate", MODEL, "--lora", "0"), "lora 0"),
        (("estimate", MODEL, "--memory", "lots"), "memory 'lots' is not a size"),
        (("estimate", MODEL, "--task", "poetry"), "task 'poetry' is not one of"),
        (("estimate", MODEL, "--checkpointing", "most"), "checkpointing 'most'"),
        (("estimate", MODEL, "--freeze", "everything"), "freeze 'everything'"),
        (("estimate", MODEL, "--show", "everything"), "--show 'everything' is not one of"),
        (("estimate", MODEL, "--batch", "1,2", "--snapshot", "x.pickle"), "--snapshot holds one stream"),
        (("estimate", MODEL, "--seq", "100000"), "100000"),
        (("estimate", MODEL, "--gpu", "t5"), "t4"),
        (("max-batch", MODEL, "--gpu", "t4", "--seq", "64,128"), "not a list"),
        (("max-batch", MODEL, "--gpu", "t4", "--batch", "8"), "--batch"),
        (("max-batch", MODEL), "gpu or a memory"),
        (("estimate",), "MODEL"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_two(arguments: tuple[str, ...], said: str) -> None:
    done = vramfit(*arguments)
    assert done.code == 2
    assert said in done.err
    assert done.err.startswith("Error: ")
    assert len(done.err.splitlines()) <= 2
    assert done.out == ""


def test_a_table_has_at_most_sixty_four_cells() -> None:
    counts = ",".join(map(str, range(1, 10)))
    done = vramfit("estimate", MODEL, "--batch", counts, "--seq", counts)
    assert done.code == 2
    assert f"81 cells; at most {MAX_CELLS}" in done.err


def test_both_verbs_show_every_setting_that_is_not_hidden_with_an_example() -> None:
    hidden = set(having(hidden=True))
    for verb, missing in (("estimate", set()), ("max-batch", {"batch", "micro_batch", "lengths"})):
        done = vramfit(verb, "--help-all")
        assert f"Example: vramfit {verb}" in done.out
        for keyword in set(SETTINGS) - {"model", "dropout"} - missing | {"no_dropout", "trust_remote_code"}:
            assert (f"--{keyword.replace('_', '-')} " in done.out) == (keyword not in hidden), keyword


def test_only_what_was_given_is_passed_on() -> None:
    assert WorkloadOptions(model="m").keywords() == {}
    given = {"batch": "8", "dropout": False, "compile": True, "checkpointing": "4"}
    more = {"freeze": "a.*, b.*", "lengths": "3,3,7"}
    assert WorkloadOptions(model="m", given=given | more).keywords() == {
        "batch": 8,
        "dropout": False,
        "compile": True,
        "checkpointing": 4,
        "freeze": ("a.*", "b.*"),
        "lengths": (3, 3, 7),
    }


def test_lists_are_sorted_and_each_number_taken_once() -> None:
    assert parse_counts("8, 1,8,4", "--batch") == [1, 4, 8]
    with pytest.raises(typer.BadParameter, match="'٣' is not"):
        parse_counts("٣", "--batch")
