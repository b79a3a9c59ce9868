"""`Mending`: a run whose memory is not what it was planned for plans again, and goes on in the same process.

Only settings that can change between two steps do (`LIVE`): the effective batch and the maths stay as they are.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vramfit.errors import BudgetExceeded, NoPlanFits
from vramfit.records.codec import from_data, to_data
from vramfit.records.plan import Plan
from vramfit.records.run import SettingsChange
from vramfit.runtime.device import enforce
from vramfit.runtime.training import events
from vramfit.runtime.training.preparation import plan_again
from vramfit.runtime.training.signs import WINDOW, InUse, StepSigns, Wanted, Watch
from vramfit.settings import LIVE, SETTINGS
from vramfit.step.recovery import RandomState
from vramfit.units import format_bytes

if TYPE_CHECKING:
    from vramfit.runtime.training.session import Session

FOLLOWS = "accumulate"
"""It follows from the other settings, and is not said."""


class Mending:
    """Watches the steps of a run, and changes its settings where memory asks for it.

    Args:
        session: of a run in one process.
        plan: that the run begins with.
    """

    def __init__(self, session: "Session", plan: Plan) -> None:
        self.changes: list[SettingsChange] = []
        """In all sessions of the run."""
        run = session.run
        self._session, self._run = session, run
        self._is_timed = run.run_device.computes_apart  # times of a CPU say nothing of memory
        first = self._in_use(replace(plan, workload=run.workload), plan.budget_bytes)
        self._watch = Watch(first, predicts=self._is_timed and run.run_device.gpu is not None)
        self._counted = self._seen = (0, 0)
        self._pace: tuple[float | None, int] = (None, 1)

    def begin(self) -> None:
        """Training begins: what the rehearsal left behind does not count."""
        retries = self._run.run_device.read().num_retries
        self._counted = self._seen = (retries, self._session.stepper.num_recoveries)

    def saw(self, num_retries: int, time_s: float, num_tokens: int) -> None:
        """What the allocator has counted by now, and how long a step took."""
        self._seen = (num_retries, self._session.stepper.num_recoveries)
        self._pace = (time_s if self._is_timed else None, num_tokens)

    def after_step(self, step: int) -> None:
        """A step was taken, and the next one has not begun."""
        num_retries, num_recoveries = (now - before for now, before in zip(self._seen, self._counted, strict=True))
        self._counted, (time_s, num_tokens) = self._seen, self._pace
        signs = StepSigns(num_retries=num_retries, num_recoveries=num_recoveries, time_s=time_s, num_tokens=num_tokens)
        wanted = self._watch.see(signs, lambda: self._run.run_device.available_bytes(self._watch.in_use.limit_bytes))
        if wanted is not None:
            self._mend(wanted, step)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"watch": self._watch.state_dict(), "changes": to_data(self.changes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a `state_dict` was taken, with the settings that were in use; a new plan begins anew."""
        self.changes = [from_data(SettingsChange, one) for one in state["changes"]]
        if self._watch.load_state_dict(state["watch"]):
            self._use(self._watch.in_use)

    def _mend(self, wanted: Wanted, step: int) -> None:
        """Plan for what is wanted, unless that was done before, and go on with it."""
        before, why = self._watch.in_use, self._why(wanted)
        if wanted.memory_bytes is None:
            self._say(f"After step {step:,}: {why}, and memory is as planned: the settings stay.")
            return
        began, chosen, plan_s = time.perf_counter(), self._watch.known(wanted.memory_bytes), 0.0
        if chosen is None:
            try:
                chosen = self._plan(wanted.memory_bytes, wanted.available_bytes)
            except Exception as error:  # whatever a plan fails at, the run is well as it is
                self._watch.refuse(wanted)
                self._say(f"After step {step:,}: {why}; the run continues unchanged, since {_reason(error)}.")
                return
            plan_s = time.perf_counter() - began
        self._watch.take(wanted, chosen)
        self._use(chosen)
        if chosen.settings == before.settings:
            return
        predicted = f", predicted at {1000 * chosen.step_time_s:.3g} ms a step" if self._is_timed else ""
        said = f"After step {step:,}: {why}; the run continues with {_in_words(before, chosen)}{predicted}."
        self._say(said)
        self.changes.append(
            SettingsChange(
                step=step,
                cause=wanted.cause,
                said=said,
                available_bytes=wanted.available_bytes,
                before=before.settings,
                after=chosen.settings,
                step_time_s=chosen.step_time_s,
                plan_s=plan_s,
            )
        )

    def _plan(self, memory_bytes: int, available_bytes: int) -> InUse:
        """The plan for some memory, where so much is there; random generators are as before."""
        generators = RandomState.now()
        try:
            made = plan_again(self._run, memory_bytes)
        finally:
            generators.restore()
        return replace(self._in_use(made, available_bytes), planned_bytes=memory_bytes)

    def _in_use(self, plan: Plan, there_bytes: int) -> InUse:
        """The settings of a plan, in so much memory."""
        inside = replace(plan, budget_bytes=there_bytes)
        return InUse(
            settings={name: getattr(plan.workload, name) for name in LIVE},
            planned_bytes=there_bytes,
            there_bytes=there_bytes,
            needed_bytes=plan.predicted_reserved_bytes + plan.margin_bytes // 2,
            limit_bytes=min(there_bytes, inside.limit_bytes + self._run.run_device.held_bytes),
            evaluation_tokens=plan.evaluation_batch * plan.workload.seq,
            step_time_s=plan.step_time_s,
        )

    def _use(self, chosen: InUse) -> None:
        """Go on with these settings."""
        run_device = self._run.run_device
        self._session.stepper.change(replace(self._run.workload, **chosen.settings))
        self._session.inference.max_tokens = chosen.evaluation_tokens
        run_device.release_cache()
        with suppress(BudgetExceeded):  # more is held, in pieces: the cap stays as it was, and the run goes on
            enforce(chosen.limit_bytes, run_device.device)

    def _why(self, wanted: Wanted) -> str:
        """What happened, in words."""
        there, planned = format_bytes(wanted.available_bytes), format_bytes(self._watch.in_use.planned_bytes)
        said = {
            "less memory": f"{there} of the planned {planned} are available",
            "more memory": f"{there} are available again",
            "retries": f"PyTorch gave back all that it had cached {wanted.count:.0f} times in {WINDOW} steps",
            "recoveries": f"memory ran out {wanted.count:.0f} times in {WINDOW} steps",
            "slower": f"steps take {wanted.count:.1f} times as long as they did or were predicted to",
        }
        return said[wanted.cause]

    def _say(self, text: str) -> None:
        self._session.tell(events.Note(text=text, warns=True))


def _in_words(before: InUse, after: InUse) -> str:
    """The settings that differ, as they are from now on."""

    def words() -> Iterator[str]:
        for name, value in after.settings.items():
            if name != FOLLOWS and value != before.settings[name]:
                yield f"{name} {SETTINGS[name].shown(value)}" if value not in (None, False) else f"no {name}"

    return ", ".join(words())


def _reason(error: Exception) -> str:
    if isinstance(error, NoPlanFits):
        return "nothing fits there without changing what is learned or how"
    return f"planning failed ({' '.join(str(error).split())[:200]})"
