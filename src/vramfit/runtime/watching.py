"""`watch`: live memory of any PyTorch code, on a GPU, on the emulated one, or on the CPU."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from vramfit.emulator.gpu import active_gpu
from vramfit.errors import VramfitError, WorkloadError
from vramfit.monitor.outlets import JsonLines, Outlet, Prometheus
from vramfit.monitor.places import JobSeen
from vramfit.monitor.sources import CudaMemory, HostMemory, MemorySource
from vramfit.monitor.watch import Watch, WatchSettings
from vramfit.records.watch import OutOfMemoryReport, WatchRecord
from vramfit.runtime.device import EmulatedMemory
from vramfit.settings import having
from vramfit.step.recovery import is_out_of_memory
from vramfit.units import MIB, format_bytes

TIMEOUT_S = 60.0
FITS, DOES_NOT_FIT = 0, 3
HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def advise(job: JobSeen, report: OutOfMemoryReport, source: MemorySource) -> Sequence[str]:
    """Sentences that say what fits; none where the model is not one of transformers or the time was too short.

    A process of its own has no part in the memory that ran out, takes no hooks, and can be ended.
    """
    config = getattr(job.model, "config", None)
    budget_bytes = source.budget_bytes()
    if config is None or not hasattr(config, "save_pretrained") or job.batch is None or budget_bytes is None:
        return ()
    with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
        config.save_pretrained(folder)
        command = _command(folder, job, budget_bytes, evaluating=report.phase == "evaluation")
        answer = _ask(command)
    if answer is None:
        return ()
    known = str(getattr(config, "name_or_path", "") or "")
    name = known or type(job.model).__name__
    if report.phase == "evaluation":
        return tuple(_largest(answer, job, name))
    said = [line.replace(folder, name) for line in _plan(answer, job, name, budget_bytes)]
    if known:
        said.append(
            f"vramfit plan {known} --batch {job.batch} --seq {job.seq} --memory {budget_bytes // MIB}MiB shows why, "
            "and the other ways"
        )
    return tuple(said)


def _command(folder: str, job: JobSeen, budget_bytes: int, *, evaluating: bool) -> list[str]:
    from vramfit.models.configuration import task_of_class
    from vramfit.tasks import DEFAULT, find_task

    assert job.model is not None
    task = task_of_class(type(job.model), job.model.config, preferred=DEFAULT)
    shared = ["--task", task, "--seq", str(job.seq), "--memory", str(budget_bytes), *_gpu()]
    labels = getattr(job.model.config, "num_labels", None)
    shared += ["--num-labels", str(labels)] if labels and find_task(task).has_classes else []
    if evaluating:
        precision = precision_of(next(job.model.parameters()).dtype, job.autocast)
        return ["max-batch", folder, "--mode", "infer", "--precision", precision, "--json", *shared]
    return ["plan", folder, "--batch", str(job.batch), "--json", *shared]


def precision_of(weights: torch.dtype, autocast: torch.dtype | None) -> str:
    """The precision of a pass as a workload names it.

    >>> precision_of(torch.bfloat16, None), precision_of(torch.float32, torch.float16)
    ('bf16', 'amp-fp16')
    """
    if weights in HALVES:
        return HALVES[weights]
    return f"amp-{HALVES[autocast]}" if autocast in HALVES else "fp32"


def _gpu() -> list[str]:
    """The GPU's name in the catalogue, for its architecture."""
    if not torch.cuda.is_initialized():
        return []
    from vramfit.devices.catalogue import match_gpu

    gpu = match_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory)
    return ["--gpu", gpu.name] if gpu is not None else []


def _ask(arguments: list[str]) -> dict[str, Any] | None:
    """The answer of the command line; None where it has none in time."""
    try:
        done = subprocess.run(
            # -P: modules of the user's folder stay out of it; no GPU: there is no room for another context
            [sys.executable, "-P", "-m", "vramfit", *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        answer = json.loads(done.stdout) if done.returncode in (FITS, DOES_NOT_FIT) else None
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
        return None
    return answer if isinstance(answer, dict) else None


def _plan(answer: dict[str, Any], job: JobSeen, name: str, budget_bytes: int) -> Iterator[str]:
    if "workload" not in answer:
        yield f"no settings for batch {job.batch} × {job.seq} fit into {format_bytes(budget_bytes)}: {answer['error']}"
        return
    w, reserved = answer["workload"], answer["estimate"]["safe_reserved_bytes"]
    chosen = [f"{s} {w[s]}" for s in having(is_observed=True) if w.get(s) not in (None, "default")]
    split = f"passes of {w['micro_batch']}, {w['accumulate']} a step"
    yield (
        f"batch {job.batch} × {job.seq} of {name} fits into {format_bytes(budget_bytes)} with {split}, "
        f"{', '.join(chosen)}: {format_bytes(reserved)} predicted"
    )


def _largest(answer: dict[str, Any], job: JobSeen, name: str) -> Iterator[str]:
    batch = answer.get("batch")
    if isinstance(batch, int) and 0 < batch < (job.batch or 0):
        yield f"evaluation of {name} at {job.seq} tokens fits with up to {batch} samples a batch, not {job.batch}"
    elif isinstance(batch, int) and batch:
        yield (
            f"a pass of {job.batch} samples alone fits ({batch} would): what else is alive here, such as kept graphs, "
            "outputs or training state, is what filled the memory"
        )


MIN_INTERVAL_S = 0.05


def watch(
    *,
    detailed: bool = False,
    interval_s: float = 0.5,
    jsonl: str | Path | None = None,
    prometheus: str | Path | None = None,
    on_sample: Callable[[WatchRecord], None] | None = None,
    plan_on_failure: bool = True,
    show_findings: bool = True,
    stream: IO[str] | None = None,
) -> Watch:
    """Watch the memory of what runs inside a `with` block, or of a function it decorates.

    Requested, allocated, reserved and process memory by phase (load, forward, backward, optimizer, evaluation), and
    habits that cost memory, each with module, file:line, bytes and the change that mends it. When memory runs out,
    what was alive is written before the error goes on.

    Args:
        detailed: follow every operator: largest tensors by module, operator and line, leaks from step to step, exact
            peaks by phase. Slower; on CUDA it resets torch's own peak counters at each phase.
        interval_s: seconds between samples, at least 0.05.
        jsonl: a file for every sample and finding, as JSON lines.
        prometheus: a file in Prometheus' text format, replaced at every sample.
        on_sample: called with the record so far after every sample, from a thread.
        plan_on_failure: when memory runs out and the model is recognised, look for settings that fit (under a minute).
        show_findings: say at the end what was found, in plain words; `Watch.findings` has it in any case.
        stream: where words go; standard error, unless given.

    Raises:
        WorkloadError: an interval that is too short.

    >>> model = torch.nn.Linear(8, 8)
    >>> with watch() as w:
    ...     _ = model(torch.ones(2, 8))
    >>> w.record.num_forwards
    1
    """
    if not interval_s >= MIN_INTERVAL_S:
        raise WorkloadError([f"interval_s {interval_s} is below {MIN_INTERVAL_S}"])
    outlets: list[Outlet] = []
    if jsonl is not None:
        outlets.append(JsonLines(jsonl))
    if prometheus is not None:
        outlets.append(Prometheus(prometheus))
    settings = WatchSettings(
        detailed=detailed,
        interval_s=interval_s,
        outlets=tuple(outlets),
        on_sample=on_sample,
        is_out_of_memory=lambda error: is_out_of_memory(error) and not isinstance(error, VramfitError),  # explained
        advise=advise if plan_on_failure else None,
        show_findings=show_findings,
        stream=stream,
    )
    return Watch(cast(MemorySource, Present()), settings)


class Present:
    """Whatever memory the program uses by now: an emulated GPU, CUDA once it has begun to, or the host's."""

    def __init__(self) -> None:
        self._now: MemorySource = HostMemory()
        self._at_fork = os.getpid()

    def _source(self) -> MemorySource:
        gpu = active_gpu()
        now = self._now
        if gpu is not None:
            if not isinstance(now, EmulatedMemory) or now.gpu is not gpu:
                self._now = EmulatedMemory(gpu)
        elif isinstance(now, HostMemory) and torch.cuda.is_initialized() and os.getpid() == self._at_fork:
            self._now = CudaMemory(torch.cuda.current_device())
        return self._now

    def __getattr__(self, name: str) -> Any:
        """As the memory that is in use now."""
        return getattr(self._source(), name)
