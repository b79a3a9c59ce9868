"""`vramfit train`: fine-tune a model on a file, inside a memory budget."""

import gc
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramfit.cli.first_look import look_at_columns, look_at_data, look_at_gpu, look_at_model
from vramfit.cli.options import Json, ReceiptFile, WorkloadOptions, verb
from vramfit.cli.terminal import console, leave, only_rank_zero_prints, prints, say, show, working
from vramfit.errors import VramfitError
from vramfit.records.codec import check_place
from vramfit.report.run import metrics_in_words, render_run
from vramfit.runtime.training.request import OPTIONS, TrainRequest
from vramfit.units import counted, format_bytes

if TYPE_CHECKING:
    from vramfit.records.run import RunRecord
    from vramfit.runtime.training.events import Event

SHOWN_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""
PANELS = {
    "data": "The data",
    "job": "Training",
    "learning": "Training",
    "how": "Training",
    "keeping": "Evaluation and checkpoints",
    "machine": "The machine",
}

DEFAULTS = {"batch": "the plan's, or 32", "seq": "what the model takes", "max_grad_norm": "1.0; 0 does not clip"}


@verb(
    "vramfit train reviews.csv --model bert-base-uncased --eval-data dev.csv --output my-model --memory 8GiB",
    settings=OPTIONS,
    positional="data",
    required=("model", "output"),
    lists=(),
    plans=True,
    panels=PANELS,
    defaults=DEFAULTS,
)
def train(options: WorkloadOptions, receipt: ReceiptFile = None, json: Json = False) -> None:
    """Fine-tune a model with settings that are planned to fit, and save a folder that transformers loads.

    Data is checked before any GPU time is spent. Ctrl-C writes a checkpoint; the same command with --resume continues.
    With several GPUs: torchrun --nproc-per-node gpu -m vramfit train …, on each machine; only rank 0 prints.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when it does not fit, 130 when interrupted.
    """
    given = {name: OPTIONS[name].value.parse(v) if isinstance(v, str) else v for name, v in options.given.items()}
    if given.get("max_grad_norm") == 0:
        given["max_grad_norm"] = None
    with only_rank_zero_prints():
        _train(TrainRequest(model=options.model, **given), receipt, json=json)


def _train(request: TrainRequest, receipt: Path | None, *, json: bool) -> None:
    _look(request)
    if receipt is not None:
        _look_at_receipt(request, receipt)

    def start(on_event: Any) -> Any:
        from vramfit.runtime.training.train import train

        return train(request, on_event=on_event)

    record = run_and_show(start, resumes=request.resume, json=json)
    if receipt is not None and prints():
        _write_receipt(record, receipt)


def run_and_show(start: Callable[[Any], Any], *, resumes: bool, json: bool) -> Any:
    """Start a run, show what happens in it and its record; a signal ends it with what to do next.

    Args:
        start: is given what shows events; gives the record.
        resumes: whether the run goes on with an earlier one.

    Returns:
        The record.
    """
    from vramfit.runtime.training.events import Interrupted, stop_request

    display = Display()
    try:
        with display:
            with stop_request(resumes=resumes) as stop:
                _import()  # takes seconds, and a signal may come
                stop.check()
            record = start(display.show)
    except Interrupted as stopped:
        say(f"{stopped}.")
        if stopped.hint is not None:
            say(f"  → go on with: {_resume_command()}")
        leave(stopped.exit_code)
    if prints():
        show(record, render_run, json=json)
    return record


def _import() -> None:
    """Import what trains. To look for garbage on the way would take a fifth of it; and what is there now stays."""
    gc.disable()
    try:
        import vramfit.runtime.training.train  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def _look_at_receipt(request: TrainRequest, path: Path) -> None:
    """Refuse a receipt that there will be none of."""
    check_place(path, request.data, request.eval_data, request.model, request.teacher, what="the receipt")
    if request.device == "cpu":
        raise VramfitError("a run on the CPU has no receipt: nothing counts what is reserved there")


def _write_receipt(record: "RunRecord", path: Path) -> None:
    """The receipt of a run that has ended, with the plan that was saved before it began."""
    from vramfit.records.plan import Plan
    from vramfit.records.receipt import write_receipt
    from vramfit.runtime.receipts import receipt_of_run
    from vramfit.runtime.training.checkpoints import PLAN

    plan_file = Path(record.output) / PLAN
    if not plan_file.exists():
        raise VramfitError("no receipt: this run had no plan, since there is no GPU here")
    write_receipt(receipt_of_run(record, Plan.load(plan_file)), path)
    say(f"Wrote the receipt {path}.")


def _look(request: TrainRequest) -> None:
    """Say what is wrong with names, files, columns and labels before torch is imported."""
    from vramfit.runtime.data.examples import check_learnable

    look_at_gpu(request.gpu)
    look_at_model(request.model)
    source = request.source(request.data)
    found = look_at_data(source)
    if found is not None:
        check_learnable(source, found)
    if request.eval_data is not None and found is not None:
        evaluated = replace(request.source(request.eval_data), problem=found.problem)
        look_at_data(evaluated, found.label_names or None)
    elif request.eval_data is not None:
        look_at_columns(request.source(request.eval_data))


def _resume_command() -> str:
    arguments = [a for a in sys.argv[1:] if a != "--resume"]
    command = ["torchrun", "…", "-m"] if "TORCHELASTIC_RUN_ID" in os.environ else []
    return shlex.join([*command, "vramfit", *arguments, "--resume"]).replace("'…'", "…")


class Display:
    """Shows a run on stderr: on a terminal stages, then a bar with loss, tokens/s and memory; elsewhere plain lines."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._stack = ExitStack()
        self._bars: Any = None
        self._task: Any = None
        self._budget_bytes: int | None = None
        self._last_line_s = 0.0

    def __enter__(self) -> "Display":
        self._stack.enter_context(working("Preparing the run", self._console))
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()
        self._bars = self._task = None

    def show(self, event: "Event") -> None:
        """Show one event."""
        from vramfit.runtime.training import events

        if isinstance(event, events.Note):
            self._line(event.text, style="yellow" if event.warns else "")
        elif isinstance(event, events.Loading):
            self._bar("Loading", event.done_bytes // 2**20, event.total_bytes // 2**20, "MiB")
        elif isinstance(event, events.Started):
            self._budget_bytes = event.budget_bytes
            begin = f"Going on after step {event.step:,}" if event.step else "Training"
            self._line(f"{begin}: {counted(event.num_steps, 'step')}, {event.settings}.")
        elif isinstance(event, events.Stepped):
            self._step(event)
        elif isinstance(event, events.Evaluating):
            self._bar("Evaluating", event.num_done, event.num_samples, "samples")
        elif isinstance(event, events.Evaluated):
            best = " (best so far)" if event.result.is_best else ""
            self._line(f"Step {event.result.step:,}: {metrics_in_words(event.result.metrics)}{best}")

    def _step(self, event: Any) -> None:
        import time

        figures = self._figures(event)
        if self._console.is_terminal:
            self._bar("Training", event.step, event.num_steps, figures)
            return
        now = time.monotonic()
        if event.step == event.num_steps or now - self._last_line_s >= SHOWN_EVERY_S:
            self._last_line_s = now
            self._line(f"step {event.step:,}/{event.num_steps:,}  {figures}")

    def _figures(self, event: Any) -> str:
        parts = [f"loss {event.loss:.4f}", f"{event.tokens_per_s:,.0f} tokens/s"]
        if event.reserved_bytes is not None:
            budget = f" of {format_bytes(self._budget_bytes)}" if self._budget_bytes else ""
            parts.append(f"{format_bytes(event.reserved_bytes)}{budget}")
        counts = {"recoveries": event.num_recoveries, "skipped": event.num_skipped, "not finite": event.num_nonfinite}
        parts += [f"{name} {count}" for name, count in counts.items() if count]
        if event.loss_scale is not None:
            parts.append(f"scale {event.loss_scale:g}")
        return "  ".join(parts)

    def _bar(self, name: str, done: int, total: int, figures: str) -> None:
        if not self._console.is_terminal:
            return
        if self._bars is None:
            self._bars = self._begin_bars()
            self._task = self._bars.add_task(name, figures="")
        self._bars.update(self._task, description=name, completed=done, total=max(total, 1), figures=figures)

    def _begin_bars(self) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}", markup=False),
        )
        self._stack.close()  # the bars take the place of the stages
        return self._stack.enter_context(Progress(*columns, console=self._console, transient=True))

    def _line(self, text: str, style: str = "") -> None:
        # a terminal would break long lines inside words
        self._console.print(text, style=style, markup=False, soft_wrap=not self._console.is_terminal)
