"""`Request`: what a user asks a plan for; and `Lengths`: how long samples really are, from a list or a file of numbers.

Lengths of texts are counted by `runtime.data`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median_low
from typing import Any

from vramfit.errors import VramfitError, WorkloadError, nearest_names
from vramfit.records.plan import LengthSummary
from vramfit.settings import ALLOWABLE, PLANNED, SETTINGS, completed, having
from vramfit.units import MAX_SHOWN_CHARACTERS, SizeError, parse_bytes, plain, shown
from vramfit.workload import CHOICES, switched

NOT_PLANNED = {
    "mode": ("train", "a plan is for training: estimate and max_batch answer for other modes"),
    "loop": ("stepper", "a plan is for vramfit's Stepper, which keeps the effective batch whatever the split"),
}
"""Keyword → the one value it has in a plan, and why."""
REHEARSAL = (
    "the emulated GPU computes on the CPU: of the settings that fit, those that are quick there are taken (fp32, no "
    "8-bit optimizer, no layer computed twice), unless others are named"
)
"""What a plan of a rehearsal is like."""
SWITCHES = ("exact", "trust_remote_code", "pads_evaluation", "group_by_length", "rehearses")
OWN = ("allow", "margin", "steps", *SWITCHES)
IF_POSSIBLE = tuple(name for name, setting in SETTINGS.items() if setting.if_possible)
SPLIT = having(is_planned=True, is_worked_out=True)
"""Keywords that say how the batch is split."""
ONE_EACH = "one whole number from 1 for each sample"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a plan is to be made for."""

    fixed: Mapping[str, Any]
    """Keywords of `Workload` that were given: they are kept."""
    allow: frozenset[str] = frozenset()
    exact: bool = False
    """Same maths only: no lower precision, no 8-bit optimizer."""
    margin: float | int | None = None
    """A share of the budget below 1, or bytes; None takes the planner's own."""
    trust_remote_code: bool = False
    steps: int | None = None
    """Optimizer steps of the whole run, where they are known: what has to be compiled first must pay."""
    pads_evaluation: bool = False
    """Whether evaluations are padded where steps are packed: another loop runs them."""
    group_by_length: bool = False
    """Whether samples of like length meet in padded batches."""
    rehearses: bool = False
    """Whether the plan is run on an emulated GPU: then what is quick on a CPU is taken, of what fits."""
    wishes: Mapping[str, bool] = field(default_factory=dict)
    """Settings that are on where they can be (True) or off (False); for others, the planner decides."""
    offloads: bool = True
    """Whether what is not needed at the moment may wait in host memory."""

    @property
    def asked(self) -> frozenset[str]:
        """The settings that are not the planner's to choose."""
        return frozenset(name for name in PLANNED if name in self.fixed)

    @property
    def fixes_split(self) -> bool:
        """Whether it says how the batch is split."""
        return not self.asked.isdisjoint(SPLIT)

    def micro_batch(self, batch: int) -> int | None:
        """Samples of a pass, where it says how the batch is split."""
        passes, given = self.fixed.get("accumulate"), self.fixed.get("micro_batch")
        return -(-batch // passes) if passes is not None and given is None else given

    @staticmethod
    def of(keywords: Mapping[str, Any]) -> "Request":
        """A request from the keywords of `plan`; what is None counts as not given.

        Raises:
            WorkloadError: unknown keywords, things that cannot be allowed, a margin that is none; all at once.
        """
        given = {name: plain(value) for name, value in keywords.items() if value is not None}
        strange = [name for name in CHOICES if not isinstance(given.get(name, ""), str | bool)]
        if strange:
            raise WorkloadError([f"{name} {shown(given[name])} is not a text" for name in strange])
        offloads = given.get("offload") is not False
        if not offloads:
            del given["offload"]
        given = completed(given)
        known = list(SETTINGS)
        problems = [
            f"unknown keyword {name!r} (nearest: {', '.join(nearest_names(name, [*known, *OWN]))})"
            for name in given
            if name not in known and name not in OWN
        ]
        for name, (value, why) in NOT_PLANNED.items():
            if given.pop(name, value) != value:
                problems.append(f"{name} {shown(keywords[name])}: {why}")
        allow = _allowed(given.pop("allow", ()), problems)
        margin = _margin(given.pop("margin", None), problems)
        on = {name: given.pop(name, False) for name in SWITCHES}
        steps = given.pop("steps", None)
        wishes = {name: given.pop(name) for name in IF_POSSIBLE if name in given}
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            problems.append(f"steps {shown(steps)} is not a whole number from 1")
        for name, value in {**on, **wishes}.items():
            problems += switched(name, value)
        for name, value in given.items() if on["exact"] is True else ():
            if value is True and name in SETTINGS and SETTINGS[name].not_exact:
                problems.append(f"exact and {name} do not go together: {SETTINGS[name].not_exact}")
        for name, bits in (("int8", 8), ("nf4", 4)):
            if name in allow and not {"lora", "freeze"} & (allow | set(given)):
                problems.append(f"allow {name}: weights in {bits} bits do not learn; allow lora or freeze as well")
        if problems:
            raise WorkloadError(problems)
        return Request(fixed=given, allow=allow, margin=margin, steps=steps, wishes=wishes, offloads=offloads, **on)


def _allowed(value: str | Iterable[str], problems: list[str]) -> frozenset[str]:
    """Names from a list, or from text with commas."""
    if not isinstance(value, str | list | tuple | set | frozenset):
        problems.append(f"allow {shown(value)} is neither a list of names nor a text with commas between them")
        return frozenset()
    names = value.split(",") if isinstance(value, str) else [str(name) for name in value]
    names = [name.strip() for name in names if name.strip()]
    for name in names:
        if name not in ALLOWABLE:
            near = nearest_names(name[:MAX_SHOWN_CHARACTERS], ALLOWABLE, 1)[0]
            problems.append(f"allow {shown(name)} is not one of {', '.join(ALLOWABLE)} (nearest: {near})")
    return frozenset(names) & frozenset(ALLOWABLE)


def _margin(value: Any, problems: list[str]) -> float | int | None:
    """A share such as 0.05 or "5%", or bytes."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1):
        return value
    if isinstance(value, str):
        text = value.strip()
        share = text.removesuffix("%")
        try:
            number = float(share) / (100 if text.endswith("%") else 1)
        except ValueError:
            number = -1.0
        if 0 <= number < 1:
            return number
    try:
        return parse_bytes(value, name="margin")
    except SizeError:
        problems.append(f"margin {shown(value)} is neither a share below 1 (0.05, 5%) nor a size (500MiB)")
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of each sample."""

    values: tuple[int, ...]
    source: str
    """Where they come from."""
    num_truncated: int = 0
    """Samples that are cut."""
    complete: bool = True
    """Whether every sample was seen."""

    @property
    def longest(self) -> int:
        return max(self.values)

    @property
    def varies(self) -> bool:
        return min(self.values) < self.longest

    def cut(self, limit: int) -> "Lengths":
        """The same samples cut to a limit; where not all of them were seen, one as long as it is expected."""
        num_cut = sum(n > limit for n in self.values)
        values = [min(n, limit) for n in self.values]
        if not self.complete:
            values[0] = limit
        return replace(self, values=tuple(values), num_truncated=num_cut)

    def summary(self) -> LengthSummary:
        """For the plan."""
        return LengthSummary(
            num_samples=len(self.values),
            mean=mean(self.values),
            median=median_low(self.values),
            longest=self.longest,
            num_truncated=self.num_truncated,
            source=self.source,
        )


def lengths_of(given: Any) -> Lengths:
    """Lengths from a list of numbers, or a text file with one number a line.

    Raises:
        VramfitError: a file that cannot be read, nothing in it, or something that is no number of tokens.

    >>> lengths_of([12, 512, 80]).longest
    512
    """
    if isinstance(given, Lengths):
        return given
    if isinstance(given, str | Path):
        try:
            lines = Path(given).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise VramfitError(f"cannot read {given}: {why}", hint="give a file with one length a line") from None
        return _checked(lines, str(given))
    try:
        values = list(given.tolist() if hasattr(given, "tolist") else given)  # tensors and arrays
    except TypeError:
        raise VramfitError(f"lengths {shown(given)} are neither a list nor a file", hint=ONE_EACH) from None
    return _checked(values, "a list")


def _checked(values: Iterable[Any], source: str) -> Lengths:
    counts = []
    for number, value in enumerate(values, 1):
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and 0 < int(text) < 2**31):
            raise VramfitError(
                f"lengths, {source}: number {number} is {text[:40]!r}, not a number of tokens",
                hint=ONE_EACH,
            )
        counts.append(int(text))
    if not counts:
        raise VramfitError(f"lengths, {source}: nothing in it", hint=ONE_EACH)
    return Lengths(values=tuple(counts), source=source)
