"""Memory runs out, anywhere: five steps end as if it had not."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest

import pytest
import torch
from tests.unit.runtime import failures
from tests.unit.runtime.failures import DROPOUT, KINDS, MAX_DIFFERENCE, TASK, Trained, quick, train
from tests.unit.runtime.small_models import flat_weights, make_batch, make_model

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import RecoveryExhausted
from vramfit.runtime.step_settings import FIRST_PATIENCE
from vramfit.runtime.stepper import Stepper

STRIDE = 29
"""`scripts/fail_everywhere.py` goes through every allocation of every kind; `test_recovery_everywhere`, of one kind."""


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(scope="module")
def clean() -> dict[str, Trained]:
    return {name: train(kind) for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
def test_a_failure_anywhere_in_five_steps_leaves_no_trace(name: str, clean: dict[str, Trained]) -> None:
    """One failure in each step of a run: five places are gone through in the time of one."""
    expected = clean[name]
    ends = [0, *expected.last_allocations]
    points = [*range(3, ends[-1], STRIDE), ends[-1]]
    by_step = [[n - begin for n in points if begin < n <= end] for begin, end in pairwise(ends)]
    for places in zip_longest(*by_step, fillvalue=0):
        made = train(KINDS[name], places=places)
        assert made.num_failures == sum(place > 0 for place in places)
        assert made.equals(expected), places


def test_a_scaler_that_was_half_made_is_made_again(clean: dict[str, Trained], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale and its counter are two allocations; the second may fail after the first."""
    make = torch.amp.GradScaler._lazy_init_scale_growth_tracker
    failed: list[torch.device] = []

    def half(self: torch.amp.GradScaler, device: torch.device) -> None:
        make(self, device)
        if not failed:
            failed.append(device)
            self._growth_tracker = None
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.amp.GradScaler, "_lazy_init_scale_growth_tracker", half)
    made = train(KINDS["fp16 and GradScaler"])
    assert failed
    assert made.num_recoveries == 1
    assert made.equals(clean["fp16 and GradScaler"])


@pytest.mark.parametrize("name", KINDS)
def test_where_the_micro_batch_shrinks_the_weights_are_the_same_within_rounding(name: str) -> None:
    """In the first step, in the second and in a later one, which asks for the same as all that follow."""
    kind = replace(KINDS[name], changes={})
    train = partial(failures.train, num_steps=3)
    expected = train(kind)
    limit = MAX_DIFFERENCE
    if kind.precision == "amp-fp16":  # products are rounded to fp16 by micro-batch: two clean runs differ as much
        limit = 2 * max(train(kind, micro_batch=3).distance(expected))
    shrunk = 0
    for n in range(5, expected.last_allocations[-1] + 1, 3 * STRIDE):
        made = train(kind, [n, n + 1])
        shrunk += made.micro_batch < expected.micro_batch
        assert max(made.distance(expected)) <= limit, n
    assert shrunk >= 5


def test_a_step_that_fails_over_and_over_goes_to_the_host(clean: dict[str, Trained]) -> None:
    """Twelve failures in a row inside the optimizer's step: portions are halved down to single parameters."""
    expected = clean["dropout"]
    last = expected.last_allocations[0]
    for n in range(last - 26, last, 3):  # the step's allocations are the last 27
        assert train(KINDS["dropout"], range(n, n + 12)).equals(expected), n


def test_the_same_window_is_tried_again_before_it_is_cut(clean: dict[str, Trained]) -> None:
    once = train(KINDS["plain"], [40])
    assert (once.num_recoveries, once.micro_batch) == (1, clean["plain"].micro_batch)
    twice = train(KINDS["plain"], [40, 41])
    assert (twice.num_recoveries, twice.micro_batch) == (2, clean["plain"].micro_batch // 2)


def test_memory_taken_by_another_process_shrinks_the_micro_batch_and_its_return_lets_it_grow() -> None:
    model = make_model("bert", TASK, hidden_size=128, intermediate_size=512)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), micro_batch=12)
    batches = [make_batch(TASK, seed=seed) for seed in range(4)]
    with EmulatedGPU(memory="64MiB") as gpu:
        for batch in batches:
            stepper.step(batch)
        kept, peak = gpu.allocated_bytes, gpu.max_allocated_bytes
        gpu.empty_cache()
        gpu.take(64 * 2**20 - kept - (peak - kept) * 3 // 4)
        stepper.step(batches[0])
        assert stepper.micro_batch < 12
        assert stepper.num_recoveries >= 2
        smaller = stepper.micro_batch
        gpu.release()
        for index in range(FIRST_PATIENCE + 1):
            stepper.step(batches[index % 4])
    assert stepper.micro_batch > smaller
    assert stepper.num_steps == 4 + 1 + FIRST_PATIENCE + 1


def test_when_nothing_helps_the_weights_are_as_before_and_the_error_says_what_was_tried() -> None:
    model = make_model("bert", TASK)
    before = flat_weights(model)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters()), micro_batch=4)
    batch = make_batch(TASK)
    with EmulatedGPU(memory="64MiB") as gpu:
        stepper.rehearse(batch)
        gpu.fail_at = set(range(gpu.num_allocations + 30, gpu.num_allocations + 10_000))
        with pytest.raises(RecoveryExhausted) as caught:
            stepper.step(batch)
    assert torch.equal(before, flat_weights(model))
    assert "micro-batch 1" in caught.value.attempts[-1]
    assert "out of memory" in caught.value.attempts[-1]
    assert caught.value.hint
    assert all(p.grad is None for p in model.parameters())


def test_checkpointing_is_the_last_technique_of_the_same_maths() -> None:
    model = make_model("bert", TASK, **DROPOUT)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), micro_batch=1)
    with EmulatedGPU(memory="1GiB", fail_at=[200, 201]):
        stepper.step(make_batch(TASK))
    assert model.is_gradient_checkpointing  # type: ignore[truthy-function]
    assert stepper.num_steps == 1


def test_other_errors_pass_and_leave_no_gradients() -> None:
    model = make_model("bert", TASK)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters()), micro_batch=4)
    batch = make_batch(TASK)
    batch["labels"] = batch["labels"] + 100
    with pytest.raises((IndexError, RuntimeError)):
        stepper.step(batch)
    assert stepper.num_recoveries == 0
    assert all(p.grad is None for p in model.parameters())
