"""The record of a finished run, its settings in words, and the memory history of single steps.

A report draws the measured history over the predicted one.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from vramfit import __version__
from vramfit.records.plan import Plan
from vramfit.records.run import RunRecord, Status, StepCourse, sample
from vramfit.runtime.data.samples import make_metrics
from vramfit.runtime.device import RunDevice
from vramfit.settings import CHOSEN, SETTINGS, chosen_in_words
from vramfit.settings.distillation import OfTeaching
from vramfit.tasks.parts.reading import texts_of
from vramfit.units import format_bytes
from vramfit.workload import Workload

if TYPE_CHECKING:
    from vramfit.runtime.training.loop import Loop
    from vramfit.runtime.training.session import Session

TAUGHT = tuple(name for name, setting in SETTINGS.items() if isinstance(setting, OfTeaching))
"""What a run with a teacher says of it."""
MANY_RETRIES, LEAST_RETRIES = 0.5, 20
"""Of a step, and in all: a run with seven a step took ten times as long as predicted."""


def settings_of(workload: Workload) -> dict[str, Any]:
    """The settings that a run has, but for those left alone."""
    given = {name: getattr(workload, name) for name in ("batch", "micro_batch", "seq", *CHOSEN)}
    if workload.num_gpus > 1:
        given |= {"num_gpus": workload.num_gpus, "parallel": workload.parallel or "ddp"}
    if SETTINGS["problem"].words(workload) is not None:
        given["problem"] = workload.problem
    if workload.distill is not None:
        given |= {name: getattr(workload, name) for name in TAUGHT}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def settings_in_words(workload: Workload) -> str:
    """One line for the start of a run."""
    w = workload
    ranks = f" on {w.num_gpus} processes ({w.parallel or 'ddp'})" if w.num_gpus > 1 else ""
    split = f"{ranks} in micro-batches of {w.micro_batch}" if w.micro_batch != w.batch else ""
    learned = SETTINGS["problem"].words(w)
    head = [] if learned is None else [learned]
    return ", ".join([f"batch {w.batch}{split}", f"up to {w.seq} tokens", *head, *chosen_in_words(w)])


def make_record(session: "Session", loop: "Loop", status: Status) -> RunRecord:
    """What a finished run has to say."""
    run, progress, stepper = session.run, loop.progress, session.stepper
    request, data, plan, run_device = run.request, run.data, run.plan, run.run_device
    evaluated = make_metrics(data.evaluation) if data.evaluation is not None else None
    losses = progress.last_losses(session.order.num_batches)
    training_s = progress.time_s - sum(result.time_s for result in progress.evaluations)
    return RunRecord(
        model=request.model,
        model_class=type(session.model).__name__.removeprefix("FSDP" if run.processes.shards else ""),
        task=request.task,
        data=request.data,
        eval_data=request.eval_data,
        teacher=request.teacher,
        output=request.output,
        device=run_device.name,
        status=status,
        num_samples=data.train.num_samples,
        num_truncated=data.train.num_truncated,
        longest_before_truncation=data.train.longest_before_truncation,
        num_bad_rows=len(data.train.bad_rows),
        num_texts=len(texts_of(data.train.references[0])),
        label_names=tuple(data.train.label_names),
        settings=settings_of(run.workload),
        num_epochs=progress.epochs(session.order.num_batches),
        num_steps=stepper.num_steps,
        num_skipped=stepper.num_skipped,
        loss_scale=stepper.loss_scale,
        num_recoveries=stepper.num_recoveries + session.inference.num_recoveries,
        final_micro_batch=stepper.micro_batch,
        changes=tuple(session.mending.changes) if session.mending is not None else (),
        train_loss=sum(losses) / len(losses) if losses else None,
        num_loss_batches=len(losses),
        evaluations=tuple(progress.evaluations),
        best_metric=evaluated.best_metric if evaluated is not None else None,
        best_value=progress.best_value,
        best_step=progress.best_step,
        budget_bytes=plan.budget_bytes if plan is not None else None,
        predicted_reserved_bytes=_predicted_bytes(plan, evaluates=data.evaluation is not None),
        most_reserved_bytes=_most_bytes(plan, run_device),
        measured_reserved_bytes=run_device.reserved_bytes,
        measured_allocated_bytes=run_device.allocated_bytes,
        num_retries=run_device.num_retries,
        predicted_step_time_s=plan.step_time_s if plan is not None and run_device.emulated is None else None,
        step_time_s=training_s / progress.step if progress.step else None,
        compile_s=progress.compile_s,
        time_s=progress.time_s + progress.compile_s,
        num_tokens=progress.num_tokens,
        tokens_per_s=progress.num_tokens / max(training_s + progress.compile_s, 1e-9),
        num_sessions=progress.num_sessions,
        environment=environment_of(run_device),
        notes=(
            *data.train.notes,
            *(data.evaluation.notes if data.evaluation is not None else ()),
            *session.notes,
            *_short_of_memory(run_device.num_retries or 0, progress.step),
        ),
    )


def _predicted_bytes(plan: Plan | None, *, evaluates: bool) -> int | None:
    """Of training, and of evaluations beside it where there are any: with much room, they take more."""
    if plan is None:
        return None
    return max(e.safe_reserved_bytes for e in ((plan.estimate, plan.evaluation) if evaluates else (plan.estimate,)))


def _most_bytes(plan: Plan | None, run_device: RunDevice) -> int | None:
    """What the allocator was held to; an emulated GPU computes with other kernels, and is held to its size."""
    if plan is None or run_device.emulated is not None:
        return None
    return min(plan.budget_bytes, plan.most_reserved_bytes + run_device.held_bytes)


def _short_of_memory(num_retries: int, num_steps: int) -> list[str]:
    """What to know of a run that PyTorch kept busy with making room.

    >>> _short_of_memory(3, 10), len(_short_of_memory(700, 100))
    ([], 1)
    """
    if num_retries < max(MANY_RETRIES * num_steps, LEAST_RETRIES):
        return []
    return [
        f"memory was short: PyTorch gave back all that it had cached {num_retries:,} times in {num_steps:,} steps, and "
        "each time takes as long as a part of one: more --memory or a smaller --micro-batch is faster"
    ]


def environment_of(run_device: RunDevice) -> dict[str, str]:
    """What a run ran with."""
    found = {"vramfit": __version__, "python": platform.python_version()}
    found |= {name: version(name) for name in ("torch", "transformers")}
    found["system"] = f"{platform.system()} {platform.machine()}"
    if run_device.device.type == "cuda":
        properties = torch.cuda.get_device_properties(run_device.device)
        found["gpu"] = f"{properties.name}, {format_bytes(properties.total_memory)}"
        found["cuda"] = str(torch.version.cuda)
    return found


MAX_KEPT = 4
"""Steps of a session: each only where its batch is larger than those before."""
MAX_EVENTS = 1_000_000


class MemoryHistory:
    """Decides which steps are worth it: those of the largest batches, the first of all left out."""

    def __init__(self, run_device: RunDevice, texts: int = 1) -> None:
        self.texts = texts
        """Sequences of a sample."""
        self._run_device = run_device
        self._largest = 0
        self._num_left = MAX_KEPT

    @contextmanager
    def step(
        self, number: int, batch: int, micro_batch: int, seq: int, lengths: tuple[int, ...] = ()
    ) -> Iterator[list[StepCourse]]:
        """Inside, a step is taken; afterwards the list has its course, if it was recorded.

        Args:
            number: of the step, from 1.
            batch: samples.
            micro_batch: samples of a forward pass.
            seq: tokens of the longest, padding included.
            lengths: of the sequences, where they are packed: `micro_batch` times `seq` is what a pass may hold then.
        """
        found: list[StepCourse] = []
        num_tokens = sum(lengths) or batch * seq
        if number < 2 or num_tokens <= self._largest or not self._num_left or not can_keep(self._run_device):
            yield found
            return
        with kept_history(self._run_device) as course:
            yield found
        if course:
            self._largest = num_tokens
            self._num_left -= 1
            found.append(
                StepCourse(
                    step=number,
                    device=self._run_device.name,
                    batch=batch,
                    micro_batch=micro_batch,
                    seq=seq,
                    num_events=len(course),
                    requested_bytes=sample(course),
                    lengths=lengths,
                    texts=self.texts,
                )
            )


def can_keep(run_device: RunDevice) -> bool:
    """Whether requests can be seen there, and nobody else is recording them."""
    if run_device.emulated is not None:
        return True
    is_recording = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return run_device.device.type == "cuda" and is_recording is not None and not is_recording()


@contextmanager
def kept_history(run_device: RunDevice) -> Iterator[list[int]]:
    """Inside, requests are written down; afterwards the list has what was live after each."""
    course: list[int] = []
    if run_device.emulated is not None:
        with run_device.emulated.recorded(course):
            yield course
        return
    start = torch.cuda.memory_stats(run_device.device)["requested_bytes.all.current"]
    # without stacks, an entry costs next to nothing
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MAX_EVENTS)
    try:
        yield course
    finally:
        events = torch.cuda.memory._snapshot(run_device.device)["device_traces"][run_device.device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
    course += live_after(start, events)


def live_after(start_bytes: int, events: list[dict[str, Any]]) -> Iterator[int]:
    """What is live after each request and free of PyTorch's own trace; other entries are no requests."""
    live = start_bytes
    for event in events:
        if event["action"] == "alloc":
            live += event["size"]
        elif event["action"] == "free_completed":
            live -= event["size"]
        else:
            continue
        yield live
