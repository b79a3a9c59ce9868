"""Plans that several tests look at: each is made once in a process."""

from typing import Any

from vramfit.planner import plan as planner
from vramfit.records.plan import Plan

_made: dict[str, Plan] = {}


def plan(model: Any, **keywords: Any) -> Plan:
    """As `vramfit.plan`; a frozen record, kept for whoever asks the same. Errors are raised anew each time."""
    key = repr((model, sorted(keywords.items())))
    if key not in _made:
        _made[key] = planner.plan(model, **keywords)
    return _made[key]
