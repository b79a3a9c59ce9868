"""What a run decides by what its steps leave behind: no run, no planner, no clock."""

import json
from collections.abc import Callable, Iterable

import pytest

from vramfit.runtime.training.signs import (
    CALM,
    EVERY,
    FIRST_PATIENCE,
    SLOWER,
    SURE,
    WARM_STEPS,
    WINDOW,
    InUse,
    StepSigns,
    Wanted,
    Watch,
)

ALL, LEFT = 1000, 600
QUIET = StepSigns()


def planned(num_bytes: int, **changes: int) -> InUse:
    """Settings that need nine tenths of the memory that they were planned for."""
    usual = {"there_bytes": num_bytes, "needed_bytes": num_bytes * 9 // 10, "limit_bytes": num_bytes} | changes
    return InUse(
        settings={"micro_batch": num_bytes}, planned_bytes=num_bytes, evaluation_tokens=1, step_time_s=1.0, **usual
    )


class Run:
    """A run that takes whatever is wanted."""

    def __init__(self, *, predicts: bool = False) -> None:
        self.watch = Watch(planned(ALL), predicts=predicts)
        self.changes: list[tuple[int, Wanted]] = []
        self.num_asked = self.num_planned = self.step = 0

    def go(self, steps: Iterable[StepSigns], there: Callable[[int], int] = lambda step: ALL) -> "Run":
        for signs in steps:
            self.step += 1
            wanted = self.watch.see(signs, lambda: self._ask(there))
            if wanted is not None:
                self.changes.append((self.step, wanted))
                self._take(wanted)
        return self

    def _ask(self, there: Callable[[int], int]) -> int:
        self.num_asked += 1
        return there(self.step)

    def _take(self, wanted: Wanted) -> None:
        if wanted.memory_bytes is None:
            return
        found = self.watch.known(wanted.memory_bytes)
        self.num_planned += found is None
        self.watch.take(wanted, found or planned(wanted.memory_bytes))

    @property
    def memories(self) -> list[int]:
        return [wanted.memory_bytes or 0 for _, wanted in self.changes]


def quiet(num: int) -> list[StepSigns]:
    return [QUIET] * num


def test_while_nothing_is_wrong_free_memory_is_asked_for_once_in_a_few_steps() -> None:
    run = Run().go(quiet(100))
    assert (run.changes, run.num_asked) == ([], 100 // EVERY)


def test_a_neighbour_is_noticed_within_twenty_steps_and_so_is_that_it_has_gone() -> None:
    run = Run().go(quiet(250), lambda step: LEFT if 50 <= step < 150 else ALL)
    (down, less), (up, more) = run.changes
    assert (less.cause, less.memory_bytes, more.cause, more.memory_bytes) == ("less memory", LEFT, "more memory", ALL)
    assert down - 50 <= EVERY + SURE <= 20
    assert up - 150 <= EVERY + FIRST_PATIENCE <= 20
    assert run.num_planned == 1  # the first plan is known
    assert run.watch.in_use.settings == planned(ALL).settings


def test_memory_that_is_short_for_a_step_or_two_changes_nothing() -> None:
    assert Run().go(quiet(500), lambda step: LEFT if step % 7 < SURE - 1 else ALL).changes == []


def test_a_neighbour_that_comes_and_goes_every_step_changes_nothing() -> None:
    assert Run().go(quiet(500), lambda step: LEFT if step % 2 else ALL).changes == []


@pytest.mark.parametrize("period", range(2, 60, 3))
def test_a_neighbour_that_comes_and_goes_is_followed_less_and_less(period: int) -> None:
    run = Run().go(quiet(2000), lambda step: LEFT if step // period % 2 else ALL)
    assert len(run.changes) <= 2 * (2 + (2 * period // FIRST_PATIENCE).bit_length())
    assert run.num_planned <= 1


def test_memory_that_was_there_for_long_is_waited_for_as_briefly_as_before() -> None:
    calm = CALM * FIRST_PATIENCE + EVERY + SURE
    gone = [(at, at + 50) for at in (50, 200 + calm, 400 + 2 * calm)]
    run = Run().go(quiet(1000), lambda step: LEFT if any(a <= step < b for a, b in gone) else ALL)
    ups = [step for step, wanted in run.changes if wanted.cause == "more memory"]
    assert [up - end <= 20 for up, (_, end) in zip(ups, gone, strict=True)] == [True] * 3


def test_memory_that_comes_back_in_parts_is_taken_in_parts() -> None:
    run = Run().go(quiet(150), lambda step: ALL if step < 20 else LEFT if step < 60 else 800)
    assert run.memories == [LEFT, 800]


def test_a_little_less_or_more_is_no_reason() -> None:
    run = Run().go(quiet(200), lambda step: 960 if step < 100 else LEFT if step < 150 else LEFT + 10)
    assert run.memories == [LEFT]


def test_a_cache_that_is_given_back_too_often_wants_more_headroom() -> None:
    few = [StepSigns(num_retries=i % 4 == 0) for i in range(100)]
    assert Run().go(few).changes == []
    run = Run().go([*quiet(20), *[StepSigns(num_retries=2)] * 3])
    ((step, wanted),) = run.changes
    assert (step, wanted.cause, wanted.memory_bytes, wanted.available_bytes) == (23, "retries", 810, ALL)


def test_headroom_is_given_step_by_step_and_not_without_end() -> None:
    run = Run().go([StepSigns(num_retries=7)] * 500)
    assert run.memories == [810, 656, 531]
    assert run.num_asked <= 500 // EVERY * 2


def test_recoveries_that_repeat_want_other_settings_and_one_does_not() -> None:
    apart = [StepSigns(num_recoveries=i % WINDOW == 0) for i in range(100)]
    assert Run().go(apart).changes == []
    run = Run().go([*quiet(5), StepSigns(num_recoveries=1), QUIET, StepSigns(num_recoveries=1)])
    assert [(step, wanted.cause) for step, wanted in run.changes] == [(8, "recoveries")]


def test_trouble_while_memory_is_short_is_planned_for_what_is_there_and_at_once() -> None:
    run = Run().go([*quiet(11), StepSigns(num_recoveries=2)], lambda step: LEFT if step > 10 else ALL)
    ((step, wanted),) = run.changes
    assert (step, wanted.cause, wanted.memory_bytes) == (12, "recoveries", LEFT)


def paced(seconds: float, num: int, **more: int) -> list[StepSigns]:
    return [StepSigns(time_s=seconds * (1 + i % 3), num_tokens=100 * (1 + i % 3), **more) for i in range(num)]


def test_steps_that_take_long_and_find_memory_short_are_planned_for_less() -> None:
    slow = [*paced(0.1, 30), *paced(0.5, 1, num_retries=1), *paced(0.5, 9)]
    ((_, wanted),) = Run().go(slow).changes
    assert (wanted.cause, wanted.memory_bytes) == ("slower", 810)
    assert wanted.count >= SLOWER


def test_steps_that_take_long_for_another_reason_are_said_once() -> None:
    run = Run().go([*paced(0.1, 30), *paced(0.5, 300)])
    assert [(wanted.cause, wanted.memory_bytes) for _, wanted in run.changes] == [("slower", None)]


def test_single_slow_steps_and_longer_batches_are_no_reason() -> None:
    noisy = [StepSigns(time_s=5.0 if i % 4 == 0 else 0.1, num_tokens=100) for i in range(200)]
    longer = [StepSigns(time_s=0.1 * n, num_tokens=100 * n) for n in (1, 9) for _ in range(50)]
    first = [StepSigns(time_s=9.0, num_tokens=100)] * WARM_STEPS
    assert [Run().go(steps).changes for steps in (noisy, longer, [*first, *paced(0.1, 50)])] == [[], [], []]


def test_steps_far_slower_than_predicted_count_where_the_prediction_is_for_this_gpu() -> None:
    slow = [StepSigns(time_s=6.0, num_retries=i == 14) for i in range(20)]
    assert Run().go(slow).changes == []
    assert [wanted.cause for _, wanted in Run(predicts=True).go(slow).changes] == ["slower"]


def test_what_does_not_fit_is_not_asked_for_again_before_there_is_more() -> None:
    run = Run()
    refused: list[int] = []

    def refuse(wanted: Wanted) -> None:
        refused.append(wanted.memory_bytes or 0)
        run.watch.refuse(wanted)

    run._take = refuse  # type: ignore[method-assign]
    run.go(quiet(100), lambda step: 300 if step < 50 else 400)
    assert refused == [300, 400]


def test_more_memory_that_cannot_be_planned_for_is_not_asked_for_again() -> None:
    run = Run().go(quiet(20), lambda step: 300)
    run._take = run.watch.refuse  # type: ignore[method-assign]
    run.go(quiet(80), lambda step: 600 if step < 70 else 800)
    assert run.memories == [300, 600, 800]


def test_a_watch_goes_on_where_its_state_was_taken() -> None:
    def there(step: int) -> int:
        return LEFT if 50 <= step < 150 else ALL

    for stop in (10, 52, 60, 153, 158, 170):
        whole, begun = Run().go(quiet(250), there), Run().go(quiet(stop), there)
        resumed = Run()
        assert resumed.watch.load_state_dict(json.loads(json.dumps(begun.watch.state_dict())))
        resumed.step = stop
        resumed.go(quiet(250 - stop), there)
        assert [*begun.changes, *resumed.changes] == whole.changes


def test_the_state_of_another_plan_is_not_taken() -> None:
    other = Watch(planned(ALL // 2))
    assert not other.load_state_dict(Run().go(quiet(60), lambda step: LEFT).watch.state_dict())
    assert other.in_use == planned(ALL // 2)
