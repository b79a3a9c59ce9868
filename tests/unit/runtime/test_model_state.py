"""Models with state beside their weights: memory that runs out, anywhere, changes nothing of it."""

import gc
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.runtime.small_models import FAMILIES, make_batch, make_model
from tests.unit.runtime.stateful import KINDS, WIDTH, Small, state_of

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import WorkloadError
from vramfit.runtime.model_state import ModelState
from vramfit.runtime.stepper import Stepper
from vramfit.techniques import packing

TASK = "sequence-classification"
MOVES = "ignore:every forward pass changes:UserWarning"


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make_model("bert", TASK)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def summed(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(logits, batch["labels"], reduction="sum")


def make_stepper(model: torch.nn.Module, micro_batch: int = 6, **keywords: Any) -> Stepper:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keywords = {"loss_fn": summed, "count_fn": lambda batch: len(batch["labels"]), **keywords}
    return Stepper(model.train(), optimizer, micro_batch=micro_batch, **keywords)


def seed_all() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def train(model: torch.nn.Module, num_steps: int, *, fails: bool, **keywords: Any) -> tuple[Any, int, Stepper]:
    """Losses, state and generators after some steps, and the most allocations of one. Step n fails at its n-th."""
    stepper = make_stepper(model, **keywords)
    batches = [make_batch(TASK, seed=seed % 7) for seed in range(num_steps)]
    seed_all()
    losses, most = [], 0
    with EmulatedGPU("1GiB") as gpu:
        for number, batch in enumerate(batches, start=1):
            begun = gpu.num_allocations
            gpu.fail_at = {begun + number} if fails else set()
            losses.append(stepper.step(batch))
            most = max(most, gpu.num_allocations - begun)
        assert gpu.num_failures == (num_steps if fails else 0)
    drawn = (torch.rand(1).item(), random.random(), np.random.random())
    return (losses, state_of(model), drawn), most, stepper


def num_allocations(model: torch.nn.Module) -> int:
    """Of a step at least, whatever its lengths; the first also meets the weights."""
    stepper, found = make_stepper(model), []
    batches = [make_batch(TASK, seed=seed) for seed in range(7)]
    with EmulatedGPU("1GiB") as gpu:
        for batch in batches:
            begun = gpu.num_allocations
            stepper.step(batch)
            found.append(gpu.num_allocations - begun)
    return min(found)


@pytest.mark.filterwarnings(MOVES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_at_any_allocation_of_a_step_leaves_no_trace_in_a_models_state(kind: str) -> None:
    count = num_allocations(Small(kind))
    expected, _, _ = train(Small(kind), count, fails=False)
    found, _, stepper = train(Small(kind), count, fails=True)
    assert found == expected
    assert stepper.num_recoveries > count * 3 // 4  # the others were inside the optimizer's step
    assert stepper.micro_batch == 6


@pytest.mark.filterwarnings(MOVES)
def test_a_failure_anywhere_in_the_very_first_step_leaves_none_either() -> None:
    """What passes change is not known yet."""
    expected, count, _ = train(Small(*KINDS), 1, fails=False)
    for place in range(1, count + 1, 3):
        model = Small(*KINDS)
        stepper, batch = make_stepper(model), make_batch(TASK, seed=0)
        seed_all()
        with EmulatedGPU("1GiB", fail_at=[place]) as gpu:
            loss = stepper.step(batch)
        assert gpu.num_failures == 1
        assert ([loss], state_of(model)) == expected[:2], place


@pytest.mark.filterwarnings(MOVES)
def test_a_rehearsal_leaves_the_state_as_it_was() -> None:
    model = Small(*KINDS)
    before = state_of(model)
    make_stepper(model).rehearse(make_batch(TASK))
    assert state_of(model) == before


@pytest.mark.filterwarnings(MOVES)
def test_when_nothing_helps_the_state_is_as_before() -> None:
    model = Small(*KINDS)
    stepper, batch = make_stepper(model), make_batch(TASK)
    with EmulatedGPU("1GiB") as gpu:
        stepper.step(batch)
        before = state_of(model)
        gpu.fail_at = set(range(gpu.num_allocations + 40, gpu.num_allocations + 10_000))
        with pytest.raises(Exception, match="does not fit"):
            stepper.step(batch)
    assert state_of(model) == before


def cost(model: torch.nn.Module) -> tuple[int, int, int]:
    """Of three steps."""
    stepper, batch = make_stepper(model), make_batch(TASK)
    with EmulatedGPU("1GiB") as gpu:
        for _ in range(3):
            stepper.step(batch)
    return gpu.num_allocations, gpu.max_allocated_bytes, gpu.max_requested_bytes


@pytest.mark.filterwarnings(MOVES)
def test_what_is_kept_takes_no_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [cost(Small(*KINDS)), cost(Leaving())]
    for name in ("keep", "learn"):
        monkeypatch.setattr(ModelState, name, lambda self: None)
    assert [cost(Small(*KINDS)), cost(Leaving())] == kept


class Leaving(torch.nn.Module):
    """Leaves what a pass computed, with its graph and without, to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(99, 64), torch.nn.Linear(64, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        self.first = self.words(input_ids)
        self.seen = [self.first * 2]
        self.detached = self.first.detach() * 2
        logits: torch.Tensor = self.head(self.first.mean(1))
        return logits


def test_results_that_depend_on_the_split_are_warned_of_by_name() -> None:
    with pytest.warns(UserWarning, match=r"every forward pass changes layer\.0\.norm\.running_\w+, .*same to the bit"):
        make_stepper(Small("running statistics")).step(make_batch(TASK))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("family", [*FAMILIES, "mpnet", "xlm-roberta"])
def test_transformers_models_have_no_state_that_passes_change(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, family, FAMILIES.get(family, {"pad_token_id": 1}))
    model = make_model(family, TASK)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters()), micro_batch=4)
    for seed in range(2):
        stepper.step(make_batch(TASK, seed=seed))
    assert (stepper._state.moving, stepper._state.moves_in_python) == ((), False)


class Late(torch.nn.Module):
    """A buffer that only later passes change."""

    def __init__(self, *, out_of_sight: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, 3)
        self.words = torch.nn.Embedding(99, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.is_late = False
        self._out_of_sight = out_of_sight

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.words(input_ids).mean(1)
        if self.is_late:
            (self.mean.data if self._out_of_sight else self.mean).add_(hidden.detach().mean(0))
        logits: torch.Tensor = self.head(hidden - self.mean)
        return logits


def late(*, out_of_sight: bool, fails: bool) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = Late(out_of_sight=out_of_sight), make_batch(TASK)
    stepper = make_stepper(model)
    with EmulatedGPU("1GiB") as gpu:
        losses = [stepper.step(batch)]
        model.is_late = True
        gpu.fail_at = {gpu.num_allocations + 30} if fails else set()
        losses += [stepper.step(batch)]
        gpu.fail_at = {gpu.num_allocations + 30} if fails else set()
        losses += [stepper.step(batch)]
    return losses, state_of(model)


def test_a_buffer_that_changes_later_is_put_back_too() -> None:
    assert late(out_of_sight=False, fails=True) == late(out_of_sight=False, fails=False)


def test_a_late_change_that_pytorch_does_not_count_is_an_error_that_names_it() -> None:
    assert late(out_of_sight=True, fails=False)
    with pytest.raises(WorkloadError, match=r"a forward pass had changed mean, out of PyTorch's sight"):
        late(out_of_sight=True, fails=True)


class Momentum(torch.nn.Module):
    """Weights that forward itself changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(99, WIDTH, max_norm=1.0)
        self.slow = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.words(input_ids).mean(1)
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(hidden.mean())
        logits: torch.Tensor = self.head(self.slow(hidden))
        return logits


@pytest.mark.filterwarnings(MOVES)
def test_weights_that_forward_changes_are_put_back_once_that_is_known() -> None:
    batch, found = make_batch(TASK), []
    for fails in (False, True):
        model = Momentum()
        stepper = make_stepper(model)
        with EmulatedGPU("1GiB") as gpu:
            stepper.rehearse(batch)
            losses = []
            for place in (1, 20, 30, 40):
                gpu.fail_at = {gpu.num_allocations + place} if fails else set()
                losses.append(stepper.step(batch))
        found.append((losses, state_of(model)))
    assert found[0] == found[1]


def test_weights_that_forward_changes_in_the_first_window_cannot_be_put_back_and_that_is_said() -> None:
    stepper = make_stepper(Momentum())
    with (
        EmulatedGPU("1GiB", fail_at=[40]),
        pytest.raises(WorkloadError, match=r"had changed slow\.weight, and it is a weight") as caught,
    ):
        stepper.step(make_batch(TASK))
    assert "outside of forward" in str(caught.value.hint)
    assert stepper.num_steps == 0


@pytest.mark.filterwarnings(MOVES)
def test_weights_that_forward_changes_are_no_obstacle_where_memory_suffices() -> None:
    """Also where the module's own output is tried first."""
    stepper = make_stepper(Momentum(), loss_fn=None, count_fn=None)
    stepper.step(make_batch(TASK))
    assert (stepper.num_steps, stepper.num_recoveries) == (1, 0)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_buffer_that_stays_is_not_taken_for_one_that_moves() -> None:
    model = Late(out_of_sight=False)
    stepper = make_stepper(model, loss_fn=None, count_fn=None)  # tries the module on two samples first
    stepper.step(make_batch(TASK))
    assert stepper._state.moving == ()


class Holding(torch.nn.Module):
    """Has something, and appends to it where it can."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(99, WIDTH), torch.nn.Linear(WIDTH, 3)
        self.held = held

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if isinstance(self.held, list):
            self.held.append(0)
        logits: torch.Tensor = self.head(self.words(input_ids).mean(1))
        return logits


def test_a_list_too_large_to_be_put_back_is_refused_before_the_first_step() -> None:
    model = Holding([0] * 20_000)
    before = [p.detach().clone() for p in model.parameters()]
    stepper = make_stepper(model)
    with pytest.raises(WorkloadError, match=r"a forward pass changes held, which has 20,000 items"):
        stepper.step(make_batch(TASK))
    assert stepper.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_an_iterator_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"held is an iterator: what a forward pass takes from it cannot be put back"):
        make_stepper(Holding(iter([1, 2]))).step(make_batch(TASK))


def test_passes_whose_python_state_changes_are_not_recorded() -> None:
    model = make_model("bert", TASK)
    packing.apply(model, TASK)
    model.bert.pooler.register_forward_pre_hook(_Counting())  # type: ignore[union-attr, operator]
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), micro_batch=12)
    stepper._graph_use.is_on = True  # as on a GPU
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepper.step(make_batch(TASK))
    assert any("a replayed CUDA graph would not change what Python keeps" in str(one.message) for one in caught)
    assert not stepper.uses_graphs


def test_a_list_that_a_hook_fills_is_put_back_and_not_warned_of() -> None:
    model, seen = Holding(None), []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    stepper, batch = make_stepper(model), make_batch(TASK)
    with warnings.catch_warnings(), EmulatedGPU("1GiB") as gpu:
        warnings.simplefilter("error", UserWarning)
        stepper.step(batch)
        gpu.fail_at = {gpu.num_allocations + 30}
        stepper.step(batch)
    assert stepper.num_recoveries == 1
    assert len(seen) == 4  # two windows of two passes


def test_a_warning_points_to_the_line_of_the_user() -> None:
    with pytest.warns(UserWarning, match="every forward pass changes") as caught:
        make_stepper(Small("counter")).step(make_batch(TASK))
    assert [one.filename for one in caught] == [__file__]


class _Counting:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        self.num_calls += 1
