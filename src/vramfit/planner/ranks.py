"""A plan for several GPUs: every GPU with the whole model, or each with a part, whichever is faster and fits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.planner.plan import plan_for_one
from vramfit.records.plan import Plan, Reason

SHARDS_PRICE = 1.1
"""Shards must be predicted faster by this: what they copy in and out of buffers is not timed."""
WHOLE_ONLY = frozenset({"lora", "int8", "adafactor"})
"""What may be allowed, and does not go with shards."""
WHYS = {
    "ddp": "every GPU has the whole model, and they talk once a step",
    "fsdp": "each GPU has a part of weights, gradients and moments, and gathers a layer when its turn comes",
}


def plan_for_ranks(model: Any, lengths: Any, keywords: Mapping[str, Any]) -> Plan:
    """The plan of a job on several GPUs.

    Raises:
        NoPlanFits: neither fits; of the two, the one that lacks less.
        WorkloadError: offloading, which is for one GPU.
    """
    asked = keywords.get("parallel")
    if keywords.get("offload") not in (None, False):
        raise WorkloadError([f"offload {keywords['offload']} is for one GPU: leave it out, shards take its place"])
    ways = ("ddp", "fsdp") if asked is None else (asked,)
    found: dict[str, Plan] = {}
    failures: dict[str, NoPlanFits] = {}
    for parallel in ways:
        try:
            found[parallel] = plan_for_one(model, lengths, _asked_of(parallel, keywords))
        except NoPlanFits as failure:
            failures[parallel] = failure
    if not found:
        raise min(failures.values(), key=lambda failure: failure.shortfall_bytes)
    best = min(found, key=lambda name: found[name].step_time_s * (SHARDS_PRICE if name == "fsdp" else 1))
    return replace(found[best], reasons=(_reason(best, found, failures, asked), *found[best].reasons))


def _asked_of(parallel: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    given = {**keywords, "parallel": parallel, "offload": False}
    allow = given.get("allow")
    if parallel == "fsdp" and allow:
        names = allow.split(",") if isinstance(allow, str) else list(allow)
        given["allow"] = [name for name in names if name.strip() not in WHOLE_ONLY]
    return given


def _reason(chosen: str, found: Mapping[str, Plan], failures: Mapping[str, NoPlanFits], asked: Any) -> Reason:
    why = WHYS[chosen]
    others = [name for name in WHYS if name != chosen]
    if asked is not None:
        why += "; as asked for"
    for name in others:
        if name in failures:
            why += f"; {name} does not fit"
        elif name in found:
            step = found[name].step_time_s
            why += f"; {name} takes {step:.3g} s a step, this {found[chosen].step_time_s:.3g} s"
    return Reason(setting=f"parallel {chosen}", kind="free", why=why)
