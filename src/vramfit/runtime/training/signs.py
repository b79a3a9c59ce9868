"""`Watch`: whether memory is still what a run was planned for, by what each step leaves behind.

It decides by counters alone, and never waits for the device. What is free is asked for once in a few steps, and at
every step while something seems wrong. All its state but step times is in checkpoints: a resumed run decides alike.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from vramfit.records.codec import from_data, to_data
from vramfit.records.run import Cause

EVERY = 5
"""Steps from one look at free memory to the next, while nothing is wrong."""
SURE = 3
"""Steps in a row in which memory is short before it counts as gone: neighbours come and go."""
FIRST_PATIENCE = 10
"""Steps in a row in which there is more before it counts as there to stay; doubled when it was not."""
CALM = 10
"""Times this patience: memory that stayed for so long and was taken then does not make a run more patient."""
WINDOW = 10
"""Steps over which retries and recoveries are counted, and step times are taken the median of."""
MANY_RETRIES = 0.5
"""Of a step: a run with seven a step took ten times as long as predicted."""
MANY_RECOVERIES = 2
WARM_STEPS = 5
"""The first ones after a change load kernels and fill the cache: neither retries nor times count."""
SLOWER = 2.0
"""Times as long as the quickest window of the same settings. Not measured on a GPU."""
FAR_SLOWER = 4.0
"""Times as long as predicted: runs on an H200 with a thin margin took up to 2.1 times."""
BAND = 0.05
"""A share of memory that makes no difference."""
LESS = 0.9
"""Where memory is there and yet too little: what is planned for next, of what the settings in use need."""
LEAST = 0.5
"""Of what the first plan needs: below this, more headroom is not what a run lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSigns:
    """What one step left behind."""

    num_retries: int = 0
    """Times that PyTorch gave back all that it had cached."""
    num_recoveries: int = 0
    """Times that the step was begun again."""
    time_s: float | None = None
    """None where times say nothing: on a CPU."""
    num_tokens: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class InUse:
    """Settings that a run has, or had, and the memory that they were planned for."""

    settings: Mapping[str, Any]
    """Those that can change between two steps."""
    planned_bytes: int
    """What they were planned for."""
    there_bytes: int
    """What was there then: more, where a plan was to leave more free."""
    needed_bytes: int
    """With less than this, the plan's promise is broken."""
    limit_bytes: int
    """What PyTorch may reserve with them."""
    evaluation_tokens: int
    step_time_s: float
    """Predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Other settings are wanted."""

    cause: Cause
    memory_bytes: int | None
    """What to plan for; None where all of it is there, and no plan would help."""
    available_bytes: int
    count: float
    """Retries or recoveries that were counted, or how many times as long steps take."""


@dataclass(kw_only=True, slots=True)
class _Counts:
    """Where a watch is."""

    since: int = 0
    """Steps since the settings changed."""
    patience: int = FIRST_PATIENCE
    num_short: int = 0
    """Steps in a row in which less was there than is needed."""
    num_more: int = 0
    """The same with more than was planned for."""
    has_gone_back: bool = False
    """Whether the last change was to more memory."""
    is_slow_said: bool = False
    failed_bytes: int = 0
    """Nothing fits in so much."""
    rest: int = WARM_STEPS
    """Steps that do not count yet."""
    recent: list[tuple[int, int]] = field(default_factory=list)
    """Retries and recoveries of the last steps."""


class Watch:
    """Watches the steps of a run.

    Args:
        first: the settings that it begins with.
        predicts: whether predicted times are those of this very GPU.
    """

    def __init__(self, first: InUse, *, predicts: bool = False) -> None:
        self.first = self.in_use = first
        self._known = [first]
        self._counts = _Counts()
        self._pace = Pace()
        self._predicts = predicts

    def see(self, signs: StepSigns, ask_available: Callable[[], int]) -> Wanted | None:
        """A step was taken; says what is wanted now, if anything."""
        counts = self._counts
        counts.since += 1
        if counts.rest:
            counts.rest -= 1
        else:
            counts.recent = [*counts.recent[-(WINDOW - 1) :], (signs.num_retries, signs.num_recoveries)]
        self._pace.see(signs)
        trouble = self._trouble()
        if not (trouble or counts.num_short or counts.num_more or counts.since % EVERY == 0):
            return None
        available = min(ask_available(), self.first.planned_bytes)
        is_short = available < self.in_use.needed_bytes
        counts.num_short = counts.num_short + 1 if is_short else 0
        is_more = available >= (1 + BAND) * max(self.in_use.there_bytes, counts.failed_bytes)
        counts.num_more = counts.num_more + 1 if is_more else 0
        if trouble is not None:  # seen to now: it counts again where it comes again
            counts.recent, counts.rest = [], WINDOW
            self._pace.restart()
        if is_short:
            is_sure = trouble is not None or counts.num_short >= SURE
            may_fit = available > (1 + BAND) * counts.failed_bytes
            cause, count = trouble[:2] if trouble is not None else ("less memory", 0.0)
            return _wanted(cause, count, available, available) if is_sure and may_fit else None
        if trouble is not None:
            return self._more_headroom(trouble, available)
        if counts.num_more >= counts.patience:
            return _wanted("more memory", 0.0, available, available)
        return None

    def known(self, memory_bytes: int) -> InUse | None:
        """Settings that were planned before, for about this memory, and fit into it."""
        low, high = (1 - BAND) * memory_bytes, (1 + BAND) * memory_bytes
        fitting = [k for k in self._known if k.needed_bytes <= memory_bytes and low <= k.planned_bytes <= high]
        return max(fitting, key=lambda k: k.planned_bytes, default=None)

    def take(self, wanted: Wanted, chosen: InUse) -> None:
        """The run goes on with these settings, which may be the same ones in other memory."""
        before = self._counts
        patience = before.patience
        if wanted.cause != "more memory" and before.has_gone_back and before.since < CALM * patience:
            patience *= 2
        has_gone_back = wanted.cause == "more memory"
        self._counts = _Counts(patience=patience, has_gone_back=has_gone_back, is_slow_said=before.is_slow_said)
        if chosen.settings != self.in_use.settings:
            self._pace = Pace()
        self.in_use = replace(chosen, there_bytes=wanted.available_bytes)
        if chosen not in self._known:
            self._known.append(chosen)

    def refuse(self, wanted: Wanted) -> None:
        """Nothing fits in what was wanted: it is not asked for again before there is more."""
        assert wanted.memory_bytes is not None  # else nothing was planned
        self._counts.failed_bytes = wanted.memory_bytes

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "first": to_data(self.first),
            "in_use": to_data(self.in_use),
            "known": to_data(self._known),
            "counts": asdict(self._counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on where a `state_dict` was taken; not where the run was planned anew since. Says whether it did."""
        if from_data(InUse, state["first"]) != self.first:
            return False
        self.in_use = from_data(InUse, state["in_use"])
        self._known = [from_data(InUse, one) for one in state["known"]]
        self._counts = _Counts(**state["counts"])
        self._pace = Pace()
        return True

    def _trouble(self) -> tuple[Cause, float, bool] | None:
        """What shows that memory is too little, a number for it, and whether the allocator has seen it."""
        recent = self._counts.recent
        num_retries, num_recoveries = (sum(step[i] for step in recent) for i in range(2))
        if num_recoveries >= MANY_RECOVERIES:
            return "recoveries", num_recoveries, True
        if num_retries >= MANY_RETRIES * WINDOW:
            return "retries", num_retries, True
        ratio = self._pace.ratio(self.in_use.step_time_s if self._predicts else None)
        return None if ratio is None else ("slower", ratio, num_retries + num_recoveries > 0)

    def _more_headroom(self, trouble: tuple[Cause, float, bool], available: int) -> Wanted | None:
        """Memory is there, and does not do: what is planned for less leaves more of it free."""
        cause, count, is_of_memory = trouble
        if not is_of_memory:
            is_said, self._counts.is_slow_said = self._counts.is_slow_said, True
            return None if is_said else _wanted(cause, count, None, available)
        memory_bytes = int(LESS * self.in_use.needed_bytes)
        least_bytes = max(LEAST * self.first.needed_bytes, self._counts.failed_bytes + 1)
        return _wanted(cause, count, memory_bytes, available) if memory_bytes >= least_bytes else None


def _wanted(cause: Cause, count: float, memory_bytes: int | None, available_bytes: int) -> Wanted:
    return Wanted(cause=cause, memory_bytes=memory_bytes, available_bytes=available_bytes, count=count)


class Pace:
    """How long steps take, for each token, beside the run's own quickest ones and the prediction."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._quickest = float("inf")

    def see(self, signs: StepSigns) -> None:
        """A step was taken."""
        if signs.time_s is None:
            return
        self._num_seen += 1
        if self._num_seen > WARM_STEPS:
            self._steps.append((signs.time_s, signs.time_s / max(signs.num_tokens, 1)))
        if len(self._steps) == WINDOW:
            self._quickest = min(self._quickest, self._median(1))

    def restart(self) -> None:
        """Steps count anew."""
        self._steps.clear()

    def ratio(self, predicted_s: float | None) -> float | None:
        """Times as long as before, or as predicted, where that is much; None elsewhere.

        Args:
            predicted_s: of a step; None where that was predicted for another GPU.
        """
        if len(self._steps) < WINDOW:
            return None
        own = self._median(1) / self._quickest
        beside = 0.0 if predicted_s is None else self._median(0) / predicted_s
        return max(own, beside) if own >= SLOWER or beside >= FAR_SLOWER else None

    def _median(self, which: int) -> float:
        return median(step[which] for step in self._steps)
