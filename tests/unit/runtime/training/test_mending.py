"""Runs on an emulated GPU whose memory a neighbour takes and gives back, and what they do about it."""

import csv
import io
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.unit.runtime.training.small_runs import BAD, GOOD, PLAIN, request_of, same_weights, weights, write_model

import vramfit
from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import BudgetExceeded, NoPlanFits
from vramfit.monitor.sources import Reading
from vramfit.records.codec import from_json, to_json
from vramfit.records.plan import Plan
from vramfit.records.run import RunRecord, SettingsChange
from vramfit.report.run import render_run
from vramfit.runtime.device import RunDevice
from vramfit.runtime.receipts import receipt_of_run
from vramfit.runtime.training import mending, preparation
from vramfit.runtime.training.events import Event, Note, Started, Stepped
from vramfit.runtime.training.preparation import plan_again
from vramfit.runtime.training.session import Session
from vramfit.runtime.training.signs import EVERY
from vramfit.runtime.training.train import train
from vramfit.settings import LIVE

MEMORY, TAKEN = 70 * 2**20, 28 * 2**20
NUM_STEPS, TAKEN_AT, BACK_AT = 48, 10, 28
SIZES = {"intermediate_size": 1024, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
USUAL = {"batch": 16, "device": "emulated", "memory": MEMORY, "gpu": "t4", "max_steps": NUM_STEPS}


@dataclass
class Told:
    """A run, and what was seen of it."""

    record: RunRecord
    steps: list[Stepped]
    notes: list[str]
    output: Path

    @property
    def said(self) -> list[str]:
        return [note for note in self.notes if note.startswith("After step")]


Neighbour = Callable[[int, EmulatedGPU], None]
"""Takes and gives back after a step; a run that begins or goes on has taken the step it begins after."""


def come_and_go(step: int, gpu: EmulatedGPU) -> None:
    """Forty percent from one step to another."""
    gpu.release()
    if TAKEN_AT <= step < BACK_AT:
        gpu.take(TAKEN)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and long sentences: their activations are most of what a step takes."""
    folder, draw = tmp_path_factory.mktemp("mending"), random.Random(0)
    write_model(folder / "source", **SIZES)
    with (folder / "train.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(96):
            words = [draw.choice(PLAIN[:4]) for _ in range(draw.randint(31, 37))]
            writer.writerow([" ".join([draw.choice(BAD if i % 2 else GOOD), *words]), "bad" if i % 2 else "good"])
    return folder


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[RunDevice]:
    return seen_devices(monkeypatch)


def seen_devices(monkeypatch: pytest.MonkeyPatch) -> list[RunDevice]:
    """The devices of runs from here on, the last one last."""
    found: list[RunDevice] = []

    def make(*arguments: Any, **keywords: Any) -> RunDevice:
        found.append(RunDevice(*arguments, **keywords))
        return found[-1]

    monkeypatch.setattr("vramfit.runtime.training.train.RunDevice", make)
    return found


def tell(home: Path, name: str, devices: list[RunDevice], neighbour: Neighbour | None = None, **changes: Any) -> Told:
    steps: list[Stepped] = []
    notes: list[str] = []

    def see(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        if isinstance(event, Stepped):
            steps.append(event)
        gpu = devices[-1].emulated if devices else None
        if isinstance(event, Started | Stepped) and neighbour is not None and gpu is not None:
            neighbour(event.step, gpu)

    output = home / name
    record = train(request_of(home, output=str(output), **(USUAL | changes)), on_event=see)
    return Told(record, steps, notes, output)


@pytest.fixture(scope="module")
def plain(home: Path) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        return tell(home, "plain", seen_devices(patch))


@pytest.fixture(scope="module")
def disturbed(home: Path) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        return tell(home, "disturbed", seen_devices(patch), come_and_go, save_every=8)


def best_plan(home: Path, memory_bytes: int) -> Plan:
    """What `vramfit plan` chooses for so much memory."""
    with (home / "train.csv").open(encoding="utf-8") as file:
        lengths = [len(row["text"].split()) + 2 for row in csv.DictReader(file)]
    given = {"batch": 16, "gpu": "t4", "max_grad_norm": 1.0, "rehearses": True, "group_by_length": True}
    return vramfit.plan(str(home / "source"), memory=memory_bytes, seq=40, lengths=lengths, **given)


def test_settings_follow_a_neighbour_within_twenty_steps(home: Path, disturbed: Told) -> None:
    less, more = disturbed.record.changes
    assert (less.cause, more.cause) == ("less memory", "more memory")
    assert TAKEN_AT <= less.step <= TAKEN_AT + 20
    assert BACK_AT <= more.step <= BACK_AT + 20
    for change, memory in ((less, MEMORY - TAKEN), (more, MEMORY)):
        best = best_plan(home, memory)
        assert change.after["micro_batch"] == best.micro_batch
        assert change.after["checkpointing"] == best.workload.checkpointing
        assert change.step_time_s == pytest.approx(best.step_time_s, rel=0.1)
    by_step = {e.step: e.micro_batch for e in disturbed.steps}
    assert by_step[TAKEN_AT] == by_step[NUM_STEPS] == more.after["micro_batch"]
    assert by_step[less.step + 1] == by_step[more.step] == less.after["micro_batch"]


def test_no_step_is_lost_and_the_maths_is_the_same(plain: Told, disturbed: Told) -> None:
    assert plain.record.changes == ()
    assert disturbed.record.num_steps == plain.record.num_steps == NUM_STEPS
    assert disturbed.record.num_recoveries == 0
    assert [e.step for e in disturbed.steps] == list(range(1, NUM_STEPS + 1))
    assert disturbed.record.num_tokens == plain.record.num_tokens
    assert [e.loss for e in disturbed.steps] == pytest.approx([e.loss for e in plain.steps], rel=1e-3, abs=1e-5)
    for name, tensor in weights(disturbed.output).items():
        assert tensor.sub(weights(plain.output)[name]).abs().max() < 1e-3


def test_each_change_is_said_once_and_is_in_the_record_and_the_report(disturbed: Told) -> None:
    less, more = disturbed.record.changes
    assert disturbed.said == [less.said, more.said]
    micro_batch = less.after["micro_batch"]
    assert less.said == (
        f"After step {less.step}: 42.00 MiB of the planned 70.00 MiB are available; the run continues with "
        f"micro_batch {micro_batch}."
    )
    assert more.said.endswith("70.00 MiB are available again; the run continues with micro_batch 16.")
    assert from_json(RunRecord, to_json(disturbed.record)) == disturbed.record
    shown = Console(record=True, width=400, file=io.StringIO())
    shown.print(render_run(disturbed.record))
    assert less.said in " ".join(shown.export_text().split())


def test_a_killed_run_goes_on_to_the_same_weights_with_the_same_changes(
    home: Path, disturbed: Told, devices: list[RunDevice]
) -> None:
    """Before memory is known to be less, with other settings in use, and before it is known to be back."""
    resumed = partial(tell, home, "resumed", devices, save_every=8, resume=True)
    for killed_at in (TAKEN_AT + 1, TAKEN_AT + 8, BACK_AT + 5):

        def come_and_die(step: int, gpu: EmulatedGPU, killed_at: int = killed_at) -> None:
            come_and_go(step, gpu)
            if step == killed_at:
                raise KilledError

        with pytest.raises(KilledError):
            resumed(come_and_die)
    told = resumed(come_and_go)
    assert same_weights(told.output, disturbed.output)
    assert [known(c) for c in told.record.changes] == [known(c) for c in disturbed.record.changes]
    assert (told.record.num_sessions, told.record.num_steps) == (4, NUM_STEPS)


class KilledError(Exception):
    """As kill -9: nothing is saved any more."""


def known(change: SettingsChange) -> SettingsChange:
    """Without how long planning took."""
    return replace(change, plan_s=0.0)


def test_a_neighbour_that_comes_and_goes_every_step_changes_nothing(home: Path, devices: list[RunDevice]) -> None:
    def toggle(step: int, gpu: EmulatedGPU) -> None:
        gpu.release()
        if step % 2:
            gpu.take(TAKEN)

    told = tell(home, "toggled", devices, toggle, max_steps=30)
    assert (told.record.changes, told.said, told.record.num_steps) == ((), [], 30)


def test_a_run_keeps_its_settings_where_that_is_asked_for(home: Path, devices: list[RunDevice]) -> None:
    told = tell(home, "kept", devices, come_and_go, mend=False, max_steps=24)
    assert {e.micro_batch for e in told.steps} == {16}
    assert (told.record.changes, told.said) == ((), [])


def test_several_processes_keep_their_settings(devices: list[RunDevice]) -> None:
    request = SimpleNamespace(mend=True)
    several = SimpleNamespace(run=SimpleNamespace(plan=object(), request=request), _processes=SimpleNamespace(size=2))
    assert Session._mending(several) is None  # type: ignore[arg-type]


def test_while_nothing_is_wrong_nothing_is_planned_and_little_is_asked(
    home: Path, devices: list[RunDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step reads the allocator's counters once, as without mending, and waits for nothing."""
    called = dict.fromkeys(("read", "available_bytes", "release_cache"), 0)

    def count(name: str) -> None:
        method = getattr(RunDevice, name)

        def counted(self: RunDevice, *arguments: Any) -> Any:
            called[name] += 1
            return method(self, *arguments)

        monkeypatch.setattr(RunDevice, name, counted)

    for name in called:
        count(name)
    monkeypatch.setattr(mending, "plan_again", None)
    found = {}
    for mend in (False, True):
        tell(home, f"counted {mend}", devices, max_steps=20, mend=mend)
        found[mend] = called.copy()
        called.update(dict.fromkeys(called, 0))
    assert found[True]["read"] == found[False]["read"] + 1  # as training begins
    assert (found[True]["available_bytes"], found[True]["release_cache"]) == (20 // EVERY, 0)


def test_a_cache_that_is_given_back_too_often_has_the_run_planned_with_more_headroom(
    home: Path, devices: list[RunDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter is made up: three times between any two looks at it."""
    found = iter(range(0, 1000, 3))

    def read(self: RunDevice) -> Reading:
        return replace(self._memory.read(), num_retries=next(found))

    monkeypatch.setattr(RunDevice, "read", read)
    told = tell(home, "retries", devices, max_steps=9)
    (change,) = told.record.changes
    assert change.cause == "retries"
    assert change.after["micro_batch"] < 16
    assert "PyTorch gave back all that it had cached 6 times in 10 steps" in change.said


def test_recoveries_that_repeat_have_the_run_planned_with_more_headroom(home: Path, devices: list[RunDevice]) -> None:
    def fail(step: int, gpu: EmulatedGPU) -> None:
        if step in (6, 8):
            gpu.fail_at = {gpu.num_allocations + 100}

    told = tell(home, "recoveries", devices, fail, max_steps=12)
    (change,) = told.record.changes
    assert (change.cause, change.step, told.record.num_recoveries) == ("recoveries", 9, 2)
    assert change.after["micro_batch"] < 16
    assert told.record.num_steps == 12


def test_steps_that_take_longer_and_longer_have_the_run_planned_with_more_headroom(
    home: Path, devices: list[RunDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's own: a second a step, and three from some step on, in which memory runs out once."""
    now = [0.0]

    def tick(step: int, gpu: EmulatedGPU) -> None:
        now[0] += 3.0 if step >= 18 else 1.0
        if step == 20:
            gpu.fail_at = {gpu.num_allocations + 100}

    monkeypatch.setattr("vramfit.runtime.training.loop.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(RunDevice, "computes_apart", property(lambda self: True))
    told = tell(home, "slower", devices, tick, max_steps=28)
    (change,) = told.record.changes
    assert change.cause == "slower"
    assert change.after["micro_batch"] < 16
    assert "times as long" in change.said


def test_an_evaluation_is_as_large_as_planned_for_the_texts_of_the_run(
    home: Path, devices: list[RunDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan is for 48 tokens, those that follow for the 40 of the data."""
    given = {"batch": 16, "memory": MEMORY, "gpu": "t4", "max_grad_norm": 1.0, "rehearses": True}
    vramfit.plan(str(home / "source"), seq=48, **given).save(home / "plan.json")
    made: list[Plan] = []
    sessions: list[Session] = []
    monkeypatch.setattr(mending, "plan_again", lambda *given: made.append(plan_again(*given)) or made[-1])
    monkeypatch.setattr(Session, "end", lambda self: sessions.append(self))
    tell(home, "shorter", devices, come_and_go, max_steps=20, plan=str(home / "plan.json"))
    (plan,), (session,) = made, sessions
    assert plan.workload.seq < 48
    assert session.inference.max_tokens == plan.evaluation_batch * plan.workload.seq


def test_where_nothing_fits_the_run_says_so_once_and_goes_on(home: Path, devices: list[RunDevice]) -> None:
    def take_all(step: int, gpu: EmulatedGPU) -> None:
        gpu.release()
        if step >= 4:
            gpu.take("60MiB")

    told = tell(home, "hopeless", devices, take_all, max_steps=20)
    (said,) = told.said
    assert "10.00 MiB of the planned 70.00 MiB are available; the run continues unchanged" in said
    assert (told.record.changes, told.record.num_steps) == ((), 20)


def test_a_planner_that_fails_does_not_end_the_run(
    home: Path, devices: list[RunDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Any, memory_bytes: int) -> Plan:
        raise RuntimeError("a bug")

    monkeypatch.setattr(mending, "plan_again", fail)
    told = tell(home, "failing", devices, come_and_go, max_steps=24)
    assert ["planning failed (a bug)" in said for said in told.said] == [True]
    assert told.record.num_steps == 24


def test_a_cap_that_cannot_be_set_does_not_end_the_run(
    home: Path, devices: list[RunDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change, PyTorch may hold more than the new cap: memory in pieces cannot be given back."""

    def hold_more(num_bytes: int, device: torch.device) -> int:
        raise BudgetExceeded("held", predicted_bytes=num_bytes, observed_bytes=num_bytes + 1, phase="load")

    monkeypatch.setattr(mending, "enforce", hold_more)
    told = tell(home, "held", devices, come_and_go, max_steps=16)
    assert (len(told.record.changes), told.record.num_steps) == (1, 16)


def test_random_numbers_are_drawn_as_if_nothing_had_been_planned(
    home: Path, tmp_path: Path, devices: list[RunDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(run: Any, memory_bytes: int) -> Plan:
        torch.rand(7)
        random.random()
        return plan_again(run, memory_bytes)

    write_model(tmp_path / "source", intermediate_size=1024)  # with dropout
    shutil.copy(home / "train.csv", tmp_path)
    runs = []
    for name in ("quiet", "drawing"):
        runs.append(tell(tmp_path, name, devices, come_and_go, max_steps=16))
        monkeypatch.setattr(mending, "plan_again", draw)
    assert [len(told.record.changes) for told in runs] == [1, 1]
    assert same_weights(runs[0].output, runs[1].output)


def test_only_what_can_change_in_a_run_differs_in_a_plan_it_goes_on_with(home: Path, devices: list[RunDevice]) -> None:
    """At 60 MiB a fresh plan has the weights wait in host memory, which a run cannot begin to do."""
    assert best_plan(home, 60 * 2**20).workload.offload == "weights"
    kept: list[Plan] = []

    def keep(run: Any, memory_bytes: int) -> Plan:
        kept.append(plan_again(run, memory_bytes))
        return kept[-1]

    def take(step: int, gpu: EmulatedGPU) -> None:
        gpu.release()
        if step >= 2:
            gpu.take("22MiB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mending, "plan_again", keep)
        told = tell(home, "kept settings", devices, take, max_steps=8)
    (made,) = kept
    (change,) = told.record.changes
    assert made.workload.offload is None
    assert made.predicted_reserved_bytes <= 48 * 2**20
    assert change.after == {name: getattr(made.workload, name) for name in LIVE}


def test_nothing_fits_where_only_other_settings_would(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    run = SimpleNamespace(
        request=request_of(home, **USUAL),
        workload=best_plan(home, MEMORY).workload,
        data=SimpleNamespace(resolved=SimpleNamespace(model_class=None)),
        run_device=None,
    )
    monkeypatch.setattr(preparation, "default_attention", lambda model_class: "sdpa")
    monkeypatch.setattr(preparation, "_asked_of_plan", lambda *given: {})
    monkeypatch.setattr(preparation, "batches_of", lambda *given: {})
    other = SimpleNamespace(workload=replace(run.workload, optimizer="sgd"))
    monkeypatch.setattr(preparation, "_plan", lambda *given: other)
    with pytest.raises(NoPlanFits, match="what would fit differs in optimizer"):
        plan_again(run, MEMORY)  # type: ignore[arg-type]


def test_a_receipt_of_a_run_that_changed_has_no_step_time(disturbed: Told, plain: Told) -> None:
    plan = Plan.load(disturbed.output / "plan.json")
    assert receipt_of_run(disturbed.record, plan).measured.step_time_s is None
    assert receipt_of_run(plain.record, plan).measured.step_time_s is not None
