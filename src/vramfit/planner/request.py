"""`Request`: what a user asks a plan for: what is fixed, what may be changed, and how much is to stay free."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from vramfit.errors import WorkloadError, nearest_names
from vramfit.units import SizeError, parse_bytes
from vramfit.workload import Workload

ALLOWABLE: Mapping[str, str] = {
    "bf16": "weights, gradients and optimizer state in bfloat16: small updates are rounded away",
    "freeze": "parameters that do not learn",
    "lora": "only adapters and the head learn",
    "int8": "frozen weights in 8 bits",
    "adafactor": "another optimizer, which keeps its second moment in factors",
    "sgd": "another optimizer, which keeps no moments",
}
"""What a plan uses only where it is allowed → what it means."""
SETTINGS = (
    *("precision", "attention", "checkpointing", "optimizer", "freeze", "lora", "quantize", "offload"),
    *("compile", "casts", "allocator", "micro_batch", "accumulate"),
)
"""Keywords that the planner chooses where the user does not."""
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
        return frozenset(name for name in SETTINGS if name in self.fixed)

    @staticmethod
    def of(keywords: Mapping[str, Any]) -> "Request":
        """A request from the keywords of `plan`; what is None counts as not given.

        Raises:
            WorkloadError: unknown keywords, things that cannot be allowed, a margin that is none; all at once.
        """
        given = {name: value for name, value in keywords.items() if value is not None}
        offloads = given.get("offload") is not False
        if not offloads:
            del given["offload"]
        if given.get("offload") == "weights":
            given.setdefault("checkpointing", "full")  # its layers come again for backward
        known = [f.name for f in fields(Workload)]
        problems = [
            f"unknown keyword {name!r} (nearest: {', '.join(nearest_names(name, [*known, *OWN]))})"
            for name in given
            if name not in known and name not in OWN
        ]
        for name, (value, why) in NOT_PLANNED.items():
            if given.pop(name, value) != value:
                problems.append(f"{name} {keywords[name]!r}: {why}")
        allow = _allowed(given.pop("allow", ()), problems)
        margin = _margin(given.pop("margin", None), problems)
        exact = given.pop("exact", False) is True
        trust = bool(given.pop("trust_remote_code", False))
        order = {name: given.pop(name, False) is True for name in ("pads_evaluation", "group_by_length", "rehearses")}
        steps = given.pop("steps", None)
        switches = {"graphs": given.pop("graphs", None), "fused": given.pop("fused", None)}
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            problems.append(f"steps {steps!r} is not a whole number from 1")
        problems += [
            f"{name} {value!r} is not True or False"
            for name, value in switches.items()
            if not isinstance(value, bool | None)
        ]
        if exact and given.get("compile") is True:
            problems.append("exact and compile do not go together: fused kernels round otherwise")
        if "int8" in allow and not {"lora", "freeze"} & (allow | set(given)):
            problems.append("allow int8: weights in 8 bits do not learn; allow lora or freeze beside it")
        if problems:
            raise WorkloadError(problems)
        return Request(
            fixed=given,
            allow=allow,
            exact=exact,
            margin=margin,
            trust_remote_code=trust,
            steps=steps,
            **order,
            **switches,
            offloads=offloads,
        )


def _allowed(value: str | Iterable[str], problems: list[str]) -> frozenset[str]:
    """Names from a list, or from text with commas."""
    names = value.split(",") if isinstance(value, str) else [str(name) for name in value]
    names = [name.strip() for name in names if name.strip()]
    for name in names:
        if name not in ALLOWABLE:
            near = nearest_names(name, ALLOWABLE, 1)[0]
            problems.append(f"allow {name!r} is not one of {', '.join(ALLOWABLE)} (nearest: {near})")
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
        problems.append(f"margin {value!r} is neither a share below 1 (0.05, 5%) nor a size (500MiB)")
        return None
