"""`Request`: what a user asks a plan for: what is fixed, what may be changed, and how much is to stay free."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vramfit.errors import WorkloadError, nearest_names
from vramfit.settings import ALLOWABLE, PLANNED, SETTINGS
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
OWN = ("allow", "exact", "margin", "steps", "trust_remote_code", "pads_evaluation", "group_by_length", "rehearses")


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
    fused: bool | None = None
    """Whether layers are fused, where they can be; None has them so."""
    graphs: bool | None = None
    """Whether passes are recorded, where they can be; None where that pays."""
    offloads: bool = True
    """Whether what is not needed at the moment may wait in host memory."""

    @property
    def asked(self) -> frozenset[str]:
        """The settings that are not the planner's to choose."""
        return frozenset(name for name in PLANNED if name in self.fixed)

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
        if given.get("offload") == "weights":
            given.setdefault("checkpointing", "full")  # its layers come again for backward
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
        on = {
            name: given.pop(name, False)
            for name in ("exact", "trust_remote_code", "pads_evaluation", "group_by_length", "rehearses")
        }
        steps = given.pop("steps", None)
        switches = {"graphs": given.pop("graphs", None), "fused": given.pop("fused", None)}
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            problems.append(f"steps {shown(steps)} is not a whole number from 1")
        for name, value in {**on, **switches}.items():
            problems += switched(name, value) if value is not None else []
        if on["exact"] is True and given.get("compile") is True:
            problems.append("exact and compile do not go together: fused kernels round otherwise")
        if "int8" in allow and not {"lora", "freeze"} & (allow | set(given)):
            problems.append("allow int8: weights in 8 bits do not learn; allow lora or freeze beside it")
        if problems:
            raise WorkloadError(problems)
        return Request(
            fixed=given,
            allow=allow,
            margin=margin,
            steps=steps,
            **on,
            **switches,
            offloads=offloads,
        )


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
