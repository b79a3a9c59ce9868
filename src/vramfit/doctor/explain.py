"""`explain`: an out-of-memory message from a log → what happened, the cause, and the plan that fits.

The cause is one request, a limit, other processes, fragmentation, or the job.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from vramfit.devices.catalogue import all_gpus, find_gpu
from vramfit.doctor.messages import find_messages, most_telling
from vramfit.errors import NoPlanFits, VramfitError
from vramfit.records.finding import Finding
from vramfit.records.plan import Plan
from vramfit.records.watch import Cause, Explanation, Holding, OutOfMemoryMessage
from vramfit.units import GIB, MIB, format_bytes

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


LARGEST_CONTEXT_BYTES = GIB
"""What CUDA and its libraries were seen to take of a process stays below (527 to 701 MiB on an H200)."""
ROUNDING_BYTES = 11 * MIB
"""Two figures that were rounded to 0.01 GiB."""
LITTLE_CACHED = 0.1
"""Share of reserved memory that is cached; below it, fragmentation is not the cause."""
LARGE_SHARE = 0.7
"""Share of the GPU in live tensors; from here on the job itself is mentioned, whatever the cause is."""
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9)"
LESS = (
    "smaller micro-batches with accumulation keep the effective batch; checkpointing, amp and a fused optimizer keep "
    "the model: `vramfit plan MODEL --gpu GPU --batch N --seq N` finds the fastest that fits"
)

Blame = tuple[Cause, str, tuple[Holding, ...], tuple[Finding, ...]]


def blame(message: OutOfMemoryMessage) -> Blame:
    """Cause, headline, who held what, and findings, most important first."""
    if message.kind in ("host allocator", "host killed"):
        return _host(message)
    if message.kind == "mps":
        return _mps(message)
    if message.requested_bytes is None or message.allocated_bytes is None:
        return _without_figures(message)
    cause, finding = _gpu_cause(message)
    others = [f for f in _also(message) if f.check != finding.check]
    return cause, _headline(message), tuple(_holdings(message)), (finding, *others)


def _headline(m: OutOfMemoryMessage) -> str:
    asked = f"PyTorch asked for {format_bytes(m.requested_bytes or 0)} more"
    device = f" on GPU {m.device}" if m.device is not None else ""
    have = f", with {format_bytes(m.allocated_bytes or 0)} in tensors"
    room = f" and {format_bytes(m.free_bytes)} free" if m.free_bytes is not None else ""
    total = f" of {format_bytes(m.total_bytes)}" if m.total_bytes is not None else ""
    return f"{asked}{device}{have}{room}{total}."


def _holdings(m: OutOfMemoryMessage) -> Iterator[Holding]:
    yield Holding(name="allocated", num_bytes=m.allocated_bytes or 0, who="tensors of this process")
    if m.cached_bytes is not None:
        yield Holding(name="cached", num_bytes=m.cached_bytes, who="PyTorch's allocator: reserved, in no tensor")
    if m.process_bytes is not None and m.reserved_bytes is not None:
        context = max(m.process_bytes - m.reserved_bytes, 0)
        yield Holding(name="context", num_bytes=context, who="CUDA and its libraries, in this process")
        others_bytes = m.others_bytes
        if m.other_processes:
            for p in m.other_processes:
                yield Holding(name="other process", num_bytes=p.used_bytes, who=f"process {p.pid}")
        elif others_bytes is not None and others_bytes > ROUNDING_BYTES:
            yield Holding(name="others", num_bytes=others_bytes, who="other processes, or the driver")
    elif m.outside_bytes is not None:
        yield Holding(
            name="outside",
            num_bytes=m.outside_bytes,
            who="the CUDA context (mostly 0.3 to 0.7 GiB) and other processes",
        )
    if m.free_bytes is not None:
        yield Holding(name="free", num_bytes=m.free_bytes, who="nobody")


def _gpu_cause(m: OutOfMemoryMessage) -> tuple[Cause, Finding]:
    requested, free = m.requested_bytes or 0, m.free_bytes or 0
    cached, foreign = m.cached_bytes or 0, _foreign(m)
    if m.total_bytes is not None and requested > m.total_bytes:
        return "one request", _one_request(m)
    if m.allowed_bytes is not None and (m.reserved_bytes or 0) + requested + ROUNDING_BYTES > m.allowed_bytes:
        return "limit", _limit(m)
    if _has_room(m):
        return "free but refused", _refused(m)
    if foreign is not None and foreign >= max(requested - free, (m.total_bytes or 0) // 10):
        return "other process", _other_process(m, foreign)
    if cached + free >= requested and not _is_last_straw(m):
        return "fragmentation", _fragmentation(m)
    return "job", _job(m)


def _is_last_straw(m: OutOfMemoryMessage) -> bool:
    """Whether so little is cached that fragmentation only hastened the failure."""
    return (m.cached_bytes or 0) < LITTLE_CACHED * (m.reserved_bytes or 0)


def _has_room(m: OutOfMemoryMessage) -> bool:
    return m.free_bytes is not None and m.free_bytes > (m.requested_bytes or 0) + ROUNDING_BYTES


def _foreign(m: OutOfMemoryMessage) -> int | None:
    """What others hold: as the message says, or what is too much for a CUDA context."""
    if m.others_bytes is not None:
        return m.others_bytes
    if m.outside_bytes is None:
        return None
    return max(m.outside_bytes - LARGEST_CONTEXT_BYTES, 0)


def _also(m: OutOfMemoryMessage) -> Iterator[Finding]:
    """Further findings that do not explain the failure alone."""
    foreign, requested = _foreign(m), m.requested_bytes or 0
    if foreign is not None and foreign >= max(512 * MIB, ROUNDING_BYTES):
        yield _other_process(m, foreign)
    if not _has_room(m) and (m.cached_bytes or 0) + (m.free_bytes or 0) >= requested:
        yield _fragmentation(m)
    context = (m.process_bytes or 0) - (m.reserved_bytes or 0)
    if m.process_bytes is not None and context > LARGEST_CONTEXT_BYTES:
        yield Finding.warning(
            "explain.outside-pytorch",
            f"this process holds {format_bytes(context)} outside PyTorch's allocator",
            "CUDA itself takes 0.3 to 0.7 GiB; the rest is another framework's (TensorFlow, JAX, CuPy), NCCL's "
            "buffers, or kernels that allocate by themselves",
            "import and use one framework in a process; limit the other one's share",
        )
    if m.total_bytes is not None and (m.allocated_bytes or 0) > m.total_bytes:
        yield Finding.warning(
            "explain.shared-memory",
            f"{format_bytes(m.allocated_bytes or 0)} are allocated on a GPU of {format_bytes(m.total_bytes)}: "
            "the driver had moved tensors to host memory",
            "Windows' driver does so when the GPU is full; every step then waits for the bus",
            'NVIDIA control panel → "CUDA - Sysmem Fallback Policy" → "Prefer No Sysmem Fallback"',
        )
    if m.private_pool_bytes:
        yield Finding.info(
            "explain.private-pools",
            f"{format_bytes(m.private_pool_bytes)} lie in private pools of CUDA graphs",
            "nothing else can use them while the graphs live",
            'torch.compile(mode="default") makes no graphs',
        )
    if m.total_bytes is None or (m.allocated_bytes or 0) >= LARGE_SHARE * m.total_bytes:
        yield _job(m, to_blame=False)


def _one_request(m: OutOfMemoryMessage) -> Finding:
    return Finding.error(
        "explain.one-request",
        f"a single tensor of {format_bytes(m.requested_bytes or 0)} is larger than the whole GPU "
        f"({format_bytes(m.total_bytes or 0)})",
        "no setting of the allocator and no free memory helps: such a size is most often a wrong shape, "
        "attention scores over very long inputs, or a whole data set in one batch",
        "look at the shapes in the last line of your own code in the traceback; cut the input, or work in pieces",
    )


def _limit(m: OutOfMemoryMessage) -> Finding:
    room = f", although {format_bytes(m.free_bytes)} of the GPU were free" if m.free_bytes else ""
    return Finding.error(
        "explain.limit",
        f"this process may reserve {format_bytes(m.allowed_bytes or 0)} and no more{room}",
        "torch.cuda.set_per_process_memory_fraction, or a framework that calls it, has set a limit",
        f"raise the fraction, or plan for the limit: `vramfit plan MODEL --memory {(m.allowed_bytes or 0) // MIB}MiB`",
    )


def _other_process(m: OutOfMemoryMessage, foreign: int) -> Finding:
    named = ", ".join(f"process {p.pid} {format_bytes(p.used_bytes)}" for p in m.other_processes[:4])
    certain = m.others_bytes is not None
    enough = foreign + (m.free_bytes or 0) >= (m.requested_bytes or 0)
    return Finding(
        check="explain.other-process",
        severity="error" if enough else "warning",
        what=f"{'others hold' if certain else 'something else holds about'} {format_bytes(foreign)} of this GPU"
        + (f": {named}" if named else ""),
        why=("without them the request would have fitted" if enough else "that alone does not explain the failure")
        + ("" if certain else "; the message does not name processes: a CUDA context takes up to 0.7 GiB, not more"),
        fix="nvidia-smi shows who; a notebook or a killed run that still lives is the usual one. Otherwise choose "
        "another GPU (CUDA_VISIBLE_DEVICES)",
    )


def _fragmentation(m: OutOfMemoryMessage) -> Finding:
    cached, free, requested = m.cached_bytes or 0, m.free_bytes or 0, m.requested_bytes or 0
    held = max(m.reserved_bytes or 0, 1)
    share = f"{100 * cached / held:.0f} %"
    small = _is_last_straw(m)
    return Finding(
        check="explain.fragmentation",
        severity="warning" if small else "error",
        what=f"{format_bytes(cached)} are cached and {format_bytes(free)} free, {format_bytes(requested)} were asked "
        "for: there was room, but not in one piece",
        why=f"the cache is {share} of what PyTorch holds"
        + (": this was the last straw, not the burden" if small else ", in pieces"),
        fix=f"{EXPANDABLE}; fewer different lengths (pad to a multiple of 64)",
    )


def _refused(m: OutOfMemoryMessage) -> Finding:
    return Finding.error(
        "explain.refused",
        f"{format_bytes(m.free_bytes or 0)} were free when the message was written, and "
        f"{format_bytes(m.requested_bytes or 0)} were refused",
        "the free figure is read after the failure: another process may have given memory back in between, a "
        "memory fraction may be set (older messages do not show it), or host memory or its page file was full, which "
        "Windows' driver needs as much of",
        "watch the GPU while it runs (`vramfit watch PID`), look for set_per_process_memory_fraction, free host memory",
    )


def _job(m: OutOfMemoryMessage, *, to_blame: bool = True) -> Finding:
    share = ""
    if m.total_bytes:
        share = f" ({100 * (m.allocated_bytes or 0) / m.total_bytes:.0f} % of the GPU)"
    return Finding(
        check="explain.job",
        severity="error" if to_blame else "info",
        what=f"{format_bytes(m.allocated_bytes or 0)} are in live tensors{share}"
        + (": the job itself is too large here" if to_blame else ": little memory left for anything else"),
        why="weights, gradients, optimizer state and the activations of one pass",
        fix=LESS,
    )


def _without_figures(m: OutOfMemoryMessage) -> Blame:
    if m.kind == "library":
        headline = "A library below PyTorch (cuBLAS, cuDNN, NCCL or Triton) could not get memory of its own."
        what = "the GPU was full, outside the reach of PyTorch's allocator"
        why = (
            "it takes memory outside PyTorch's allocator, often for its handle or workspace: the GPU was full already, "
            "by this process or another; label ids beyond num_labels can show the same error"
        )
        fix = "leave memory for it (torch.cuda.set_per_process_memory_fraction(0.95)), or make the job smaller: " + LESS
    elif m.kind == "driver":
        headline = "The CUDA driver had no memory left, outside PyTorch's allocator or before it began."
        what = "the GPU was full, and the message has no figures"
        why = (
            "PyTorch's own message has figures; this one comes when the CUDA context, a copy or a kernel's own memory "
            "finds no room: most often the GPU was full of other processes at the start"
        )
        fix = "nvidia-smi shows who holds the GPU; choose another (CUDA_VISIBLE_DEVICES), or make the job smaller"
    else:
        headline = "PyTorch's allocator ran out of memory; the message has no figures, or they were cut off."
        what = "figures are missing"
        why, fix = "without figures it cannot be said by whose fault", "give the whole line of the error"
    finding = Finding.error(f"explain.{m.kind}", what, why, fix)
    return "unknown", headline, (), (finding,)


def _mps(m: OutOfMemoryMessage) -> Blame:
    headline = "Apple's MPS ran out of memory, of which the whole machine has a share."
    if m.requested_bytes is not None:
        headline = (
            f"MPS asked for {format_bytes(m.requested_bytes)} more, with {format_bytes(m.allocated_bytes or 0)} in "
            f"tensors, and may use {format_bytes(m.allowed_bytes or 0)}."
        )
    other = (m.process_bytes or 0) - (m.allocated_bytes or 0)
    holdings = (
        Holding(name="allocated", num_bytes=m.allocated_bytes or 0, who="tensors of this process"),
        Holding(name="other", num_bytes=other, who="Metal's own buffers in this process"),
    )
    finding = Finding.error(
        "explain.mps",
        "the limit that PyTorch keeps to on this machine was reached",
        "MPS shares the machine's memory; its limit is a share of what macOS recommends for the GPU",
        "a smaller batch; torch.mps.empty_cache(); PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lifts the limit, at the "
        "risk of the whole system. vramfit predicts NVIDIA GPUs only",
    )
    return "job" if m.requested_bytes is not None else "unknown", headline, holdings if other > 0 else (), (finding,)


def _host(m: OutOfMemoryMessage) -> Blame:
    if m.kind == "host killed":
        held = f" when it held {format_bytes(m.process_bytes)}" if m.process_bytes else ""
        headline = f"A process was killed (signal 9, exit code 137){held}: the host's memory ran out, not the GPU's."
        why = (
            "the kernel or the container's limit ends a process without a word of its own: data held by every "
            "DataLoader worker, a checkpoint read twice over, or too small a limit"
        )
        fix = (
            "num_workers=0 or fewer, a larger container (--memory, --shm-size), data that is streamed; "
            "`dmesg` says whether it was the kernel. A checkpoint is loaded tensor by tensor by `vramfit load`"
        )
    else:
        asked = f" {format_bytes(m.requested_bytes)}" if m.requested_bytes is not None else " memory"
        headline = f"The host (CPU) was asked for{asked} and had no room: RAM ran out, not the GPU's memory."
        why = "a tensor on the CPU: a checkpoint, the data set, gathered predictions, or the model before .to(device)"
        fix = (
            "stream the data, gather predictions in pieces, load with `vramfit.load`, which holds one tensor at a "
            "time; or a machine with more RAM"
        )
    what = "nothing about the GPU has to change: the host needs less, or more RAM"
    finding = Finding.error("explain.host", what, why, fix)
    return "host", headline, (), (finding,)
