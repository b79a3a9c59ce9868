"""Several processes train as one does: the same weights, memory that runs out together, and nobody waits for ever."""

import pytest
import torch
from tests.unit.runtime.distributed import work
from tests.unit.runtime.distributed.launch import Ended, run_ranks
from tests.unit.runtime.small_models import HEADS

MAX_DIFFERENCE = 1e-6
MAX_WIDE_DIFFERENCE = 1e-12
"""In float64, whose rounding is 5e8 times finer."""
WITHOUT_GRADIENT = {"qa_outputs.bias", "bert.encoder.layer.1.output.LayerNorm.bias"}
TASKS = ("sequence-classification", "masked-lm")
PARALLELS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def alone() -> list[dict]:
    """What one process gives, by task."""
    return values(run_ranks(work.train_all, 1, [(None, {"task": task}) for task in TASKS]))[0]


def values(ended: list[Ended]) -> list:
    """What every rank gave; none may have failed."""
    assert [e.trace or e.exit_code for e in ended if e.value is None] == []
    return [e.value for e in ended]


@pytest.mark.parametrize(("size", "tasks"), [(2, TASKS), (4, TASKS[:1])])
def test_ranks_end_with_the_weights_of_one_process(alone: list[dict], size: int, tasks: tuple[str, ...]) -> None:
    cases = [(parallel, {"task": task}) for parallel in PARALLELS for task in tasks]
    for made in values(run_ranks(work.train_all, size, cases)):
        for (parallel, keywords), found in zip(cases, made, strict=True):
            right = alone[TASKS.index(keywords["task"])]
            assert work.distance(found["weights"], right["weights"]) < MAX_DIFFERENCE, (parallel, keywords)
            assert found["losses"] == pytest.approx(right["losses"], abs=1e-5)
            assert found["num_recoveries"] == 0


@pytest.mark.parametrize("size", [2, 4])
def test_texts_are_compared_with_those_of_all_ranks(size: int) -> None:
    texts = {"task": "embedding", "sizes": (12, 12, 6, 2)}
    failing = {**texts, "fail_at": {1: (300,)}}
    (right,) = values(run_ranks(work.train_all, 1, [(None, texts)]))
    cases = [(parallel, keywords) for parallel in PARALLELS for keywords in (texts, failing)]
    for made in values(run_ranks(work.train_all, size, cases)):
        for case, found in zip(cases, made, strict=True):
            assert work.distance(found["weights"], right[0]["weights"]) < MAX_DIFFERENCE, case
            assert found["losses"] == pytest.approx(right[0]["losses"], abs=1e-5)
            assert bool(found["num_recoveries"]) == ("fail_at" in case[1])


@pytest.mark.parametrize(("size", "tasks"), [(2, tuple(HEADS)), (4, ("question-answering",))])
def test_where_every_pass_sees_the_same_the_gradient_is_that_of_one_process_in_every_precision(
    size: int, tasks: tuple[str, ...]
) -> None:
    """Of one window: later ones begin from weights that may be cast to other neighbours in 16 bits."""
    asked = [{"task": task, "precision": "fp32"} for task in tasks] + [
        {"task": "sequence-classification", "precision": precision} for precision in ("amp-bf16", "amp-fp16")
    ]
    (right,) = values(run_ranks(work.gradients, 1, [(None, keywords) for keywords in asked]))
    cases = [(parallel, keywords) for parallel in PARALLELS for keywords in asked]
    for made in values(run_ranks(work.gradients, size, cases)):
        for case, found, expected in zip(cases, made, right * len(PARALLELS), strict=True):
            assert work.distance(found, expected) < MAX_DIFFERENCE, case


def test_question_answering_is_the_same_but_for_what_rounding_alone_moves() -> None:
    """A constant added to all logits of a row changes nothing: two biases have no gradient but what rounding leaves,
    and AdamW makes whole steps of that. In float64 it leaves less than AdamW's epsilon."""
    task = {"task": "question-answering"}
    wide = {**task, "dtype": torch.float64}
    ((narrow_right, wide_right),) = values(run_ranks(work.train_all, 1, [(None, task), (None, wide)]))
    cases = [(parallel, keywords) for parallel in PARALLELS for keywords in (task, wide)]
    for narrow_ddp, wide_ddp, narrow_fsdp, wide_fsdp in values(run_ranks(work.train_all, 2, cases)):
        for narrow in (narrow_ddp, narrow_fsdp):
            moved = {n: w for n, w in narrow["weights"].items() if n not in WITHOUT_GRADIENT}
            right = {n: w for n, w in narrow_right["weights"].items() if n in moved}
            assert len(right) == len(narrow["weights"]) - len(WITHOUT_GRADIENT)
            assert work.distance(moved, right) < MAX_DIFFERENCE
        for found in (wide_ddp, wide_fsdp):
            assert work.distance(found["weights"], wide_right["weights"]) < MAX_WIDE_DIFFERENCE


@pytest.mark.parametrize("parallel", PARALLELS)
def test_memory_that_runs_out_on_one_rank_costs_nothing_and_all_shrink(alone: list[dict], parallel: str) -> None:
    points = [(1,), (420, 460, 500), (900,)]
    cases = [(parallel, {"fail_at": {1: at}}) for at in points]
    first, second = values(run_ranks(work.train_all, 2, cases))
    for ours, theirs in zip(first, second, strict=True):
        assert ours["num_recoveries"] == theirs["num_recoveries"]
        assert ours["micro_batch"] == theirs["micro_batch"]
        assert work.distance(ours["weights"], alone[0]["weights"]) < MAX_DIFFERENCE
        assert work.distance(theirs["weights"], ours["weights"]) == 0
    assert first[0]["num_recoveries"] == 1
    assert min(made["micro_batch"] for made in first) == 1


def test_where_one_sample_does_not_fit_on_one_rank_all_stop_with_one_message() -> None:
    always = tuple(range(300, 100_000))
    for ended in run_ranks(work.train, 2, "fsdp", fail_at={1: always}, micro_batch=1):
        assert ended.error.startswith("RecoveryExhausted: one sample of 16 tokens does not fit"), ended


def test_an_error_on_one_rank_ends_all_with_its_reason() -> None:
    first, second = run_ranks(work.train_until_told, 2, "ddp", "raises")
    assert second.error == "ValueError: row 7 is no number"
    assert first.error == "RankFailed: rank 1 has stopped: row 7 is no number"


@pytest.mark.parametrize("late", [None, 2])
def test_a_killed_rank_ends_the_others_before_their_collective_gives_up(late: int | None) -> None:
    """Survivors that run, however late, learn which rank it was: the meeting point waits for them."""
    ended = run_ranks(work.train_until_told, 3, "fsdp", "killed", late=late)
    assert ended[1].exit_code == -9
    for survivor in (ended[0], ended[2]):
        assert survivor.error.startswith("RankFailed: rank 1 is lost: it ended without a word"), survivor


def test_a_killed_first_rank_takes_the_meeting_point_with_it_and_ends_the_others_too() -> None:
    ended = run_ranks(work.train_until_told, 3, "ddp", "killed", who=0)
    assert ended[0].exit_code == -9
    for survivor in ended[1:]:
        assert "lost the others, and the meeting point too: rank 0 was killed" in survivor.error, survivor


def test_an_error_after_the_step_ends_all_with_its_reason() -> None:
    """Where the host first waits for the device, what went wrong there comes to light."""
    first, second = run_ranks(work.train_until_told, 2, "ddp", "fails late", who=0)
    assert first.error == "ValueError: the device has failed"
    assert second.error == "RankFailed: rank 0 has stopped: the device has failed"


def test_memory_that_runs_out_inside_a_collective_ends_all_with_its_reason() -> None:
    ended = run_ranks(work.train_until_told, 3, "ddp", "out of memory in the collective")
    assert ended[1].error.startswith("RankFailed: rank 1 ran out of memory inside a collective"), ended[1]
    for survivor in (ended[0], ended[2]):
        assert survivor.error.startswith("RankFailed: rank 1 has stopped: CUDA out of memory"), survivor


def test_a_rank_killed_inside_a_collective_is_named_by_the_others() -> None:
    ended = run_ranks(work.train_until_told, 3, "ddp", "killed in the collective")
    assert ended[1].exit_code == -9
    for survivor in (ended[0], ended[2]):
        assert survivor.error.startswith("RankFailed: rank 1 is lost: it ended without a word"), survivor


def test_ranks_that_are_given_different_batches_are_told_so() -> None:
    for ended in run_ranks(work.train_until_told, 2, "ddp", "other batch"):
        assert ended.error == "RankFailed: the ranks do not have the same batch"
