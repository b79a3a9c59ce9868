"""`explain`: an out-of-memory message from a log → what happened, the cause, and the plan that fits."""

from collections.abc import Iterable
from typing import Any

from vramfit.devices.catalogue import all_gpus, find_gpu
from vramfit.doctor.blame import blame
from vramfit.doctor.messages import find_messages, most_telling
from vramfit.errors import NoPlanFits, VramfitError
from vramfit.records.explanation import Explanation, OutOfMemoryMessage
from vramfit.records.plan import Plan

SAME_CAPACITY_BYTES = int(0.006 * 2**30)
"""Messages round to 0.01 GiB."""
NEAR = 0.03
"""What drivers differ by in what they leave of the same GPU, as a share."""
NOTHING_FOUND = (
    "give the lines around the error: a Python traceback, or what the scheduler or the container said at the end"
)


def explain(log: str | Iterable[str], *, model: Any = None, **keywords: Any) -> Explanation:
    """What an out-of-memory message says, in plain words and figures.

    Args:
        log: text, or lines; of any length. The last message that has figures is explained.
        model: as for `plan`; with it, the settings that fit are found.
        **keywords: as for `plan`; `gpu` and `memory` stand above what the message says.

    Raises:
        VramfitError: there is no such message in it.
        WorkloadError, UnknownModel, UnknownGPU: the model, the GPU or the settings given are wrong.

    >>> said = explain("RuntimeError: CUDA out of memory. Tried to allocate 96.00 MiB (GPU 0; 11.17 GiB total "
    ...                "capacity; 10.44 GiB already allocated; 51.94 MiB free; 100.42 MiB cached)")
    >>> said.cause, said.gpu
    ('job', 'k80')
    """
    message, count = most_telling(find_messages(log.splitlines() if isinstance(log, str) else log))
    if message is None:
        raise VramfitError("no out-of-memory message was found", hint=NOTHING_FOUND)
    gpus = [find_gpu(keywords["gpu"]).name] if keywords.get("gpu") else _gpus_of(message)
    gpu = gpus[0] if gpus else None
    cause, headline, holdings, findings = blame(message)
    plan, no_plan = None, None
    budget_bytes = _budget(message)
    if model is not None and model != "":
        plan, no_plan = _plan(model, gpu or _nearest(message), budget_bytes, keywords)
    return Explanation(
        message=message,
        num_messages=count,
        cause=cause,
        headline=headline,
        holdings=holdings,
        findings=findings,
        budget_bytes=budget_bytes,
        gpu=gpu,
        gpus_alike=tuple(gpus[1:]),
        plan=plan,
        no_plan=no_plan,
    )


def _gpus_of(message: OutOfMemoryMessage) -> list[str]:
    """The GPUs of the catalogue that have this capacity, to the digits of the message; the one that can least first.

    Settings for that one run on the others too, and no slower.
    """
    if message.total_bytes is None:
        return []
    total_bytes = message.total_bytes
    near = [g for g in all_gpus() if abs(g.total_memory_bytes - total_bytes) <= SAME_CAPACITY_BYTES]
    return [g.name for g in sorted(near, key=lambda g: (g.compute_capability, g.num_multiprocessors))]


def _nearest(message: OutOfMemoryMessage) -> str | None:
    """The GPU of the catalogue whose capacity is nearest, where one is near: by another driver it may be this one."""
    if message.total_bytes is None:
        return None
    total_bytes = message.total_bytes
    near = [g for g in all_gpus() if abs(g.total_memory_bytes - total_bytes) <= NEAR * total_bytes]
    nearest = min(near, key=lambda g: (abs(g.total_memory_bytes - total_bytes), g.compute_capability), default=None)
    return nearest.name if nearest is not None else None


def _budget(message: OutOfMemoryMessage) -> int | None:
    """What the allocator had and could still have taken."""
    if message.kind != "allocator" or message.reserved_bytes is None:
        return None
    if message.allowed_bytes is not None:
        return message.allowed_bytes
    return message.reserved_bytes + (message.free_bytes or 0) or None


def _plan(
    model: Any, gpu: str | None, budget_bytes: int | None, keywords: dict[str, Any]
) -> tuple[Plan | None, str | None]:
    """Settings that fit into what the message says there was, or into what was given."""
    given = {name: value for name, value in keywords.items() if value is not None}
    if "gpu" not in given and gpu is not None:
        given["gpu"] = gpu
    if "memory" not in given and "gpu" not in keywords and budget_bytes is not None:
        given["memory"] = budget_bytes
    if "memory" not in given and "gpu" not in given:
        return None, "neither the message nor the options say which GPU it was: --gpu or --memory names it"
    from vramfit.planner.plan import plan

    try:
        return plan(model, **given), None
    except NoPlanFits as failure:
        return None, f"{failure}. {failure.hint}" if failure.hint else str(failure)
