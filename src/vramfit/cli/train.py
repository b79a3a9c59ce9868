"""`vramfit train`: fine-tune a model on a file, inside a memory budget."""

import inspect
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import look_at_columns, look_at_data, look_at_gpu, look_at_model
from vramfit.cli.progress import only_one_speaks, speaks, working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import given_of, parameters_of
from vramfit.runtime.training.request import OPTIONS, TrainRequest
from vramfit.units import counted, format_bytes

if TYPE_CHECKING:
    from vramfit.runtime.training.events import Event

EXAMPLE = "vramfit train reviews.csv --model bert-base-uncased --eval-data dev.csv --output my-model --memory 8GiB"
SHOWN_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""
PANELS = {
    "data": "The data",
    "job": "How it learns",
    "learning": "How it learns",
    "how": "How it learns",
    "keeping": "Evaluation and checkpoints",
    "machine": "The machine",
}

DEFAULTS = {"batch": "the plan's, or 32", "seq": "what the model takes", "max_grad_norm": "1.0; 0 does not clip"}


def _takes_run(verb: Callable[..., None]) -> Callable[..., None]:
    """The function that typer reads: one parameter for each option of a run."""
    apart = ("data", "model", "output")
    options = [option for name, option in OPTIONS.items() if name not in apart]
    data = typer.Argument(metavar="DATA", help=OPTIONS["data"].help)
    parameters = [_parameter("data", Annotated[str, data])]
    for name in ("model", "output"):
        option = typer.Option(
            help=OPTIONS[name].help, metavar=OPTIONS[name].value.metavar, rich_help_panel=PANELS["data"]
        )
        parameters.append(_parameter(name, Annotated[str, option]))
    parameters += parameters_of(options, plans=True, panels=PANELS, defaults=DEFAULTS)

    @wraps(verb)
    def run(json: bool, **values: Any) -> None:
        required = {name: values.pop(name) for name in apart}
        given = given_of(options, values)
        parsed = {name: OPTIONS[name].value.parse(v) if isinstance(v, str) else v for name, v in given.items()}
        verb(required | parsed, json=json)

    parameters.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, annotation=Json, default=False))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


@_takes_run
def run(given: dict[str, Any], *, json: bool) -> None:
    """Fine-tune a model and save it as a folder that transformers loads; plans by itself what fits.

    Data is checked before any GPU time is spent. Ctrl-C leaves a checkpoint: the same command with --resume goes on.
    With several GPUs: torchrun --nproc-per-node gpu -m vramfit train …, on each machine; only the first process speaks.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when it does not fit, 130 when interrupted.
    """
    if given.get("max_grad_norm") == 0:
        given["max_grad_norm"] = None
    with only_one_speaks():
        _train(TrainRequest(**given), json=json)


def _train(request: TrainRequest, *, json: bool) -> None:
    from vramfit.runtime.training.interruption import Interrupted, stop_request

    _look(request)
    display = Display()
    try:
        with display:
            with stop_request(resumes=request.resume) as stop:
                from vramfit.runtime.training.train import train

                stop.check()
            record = train(request, on_event=display.show)
    except Interrupted as stopped:
        err = console(stderr=True)
        err.print(f"{stopped}.", markup=False, soft_wrap=True)
        if stopped.hint is not None:
            err.print(f"  → go on with: {_resume_command()}", markup=False, soft_wrap=True)
        raise typer.Exit(stopped.exit_code) from None
    if not speaks():
        return
    if json:
        print_json(record)
        return
    from vramfit.report.run import render_run

    console().print(render_run(record))


def _look(request: TrainRequest) -> None:
    """Say what is wrong with names, files, columns and labels before torch is imported."""
    from vramfit.runtime.data.examples import check_classes

    look_at_gpu(request.gpu)
    look_at_model(request.model)
    source = request.source(request.data)
    found = look_at_data(source)
    if found is not None:
        check_classes(source, found.label_names)
    if request.eval_data is not None and found is not None:
        look_at_data(request.source(request.eval_data), found.label_names or None)
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
            from vramfit.report.run import metrics_in_words

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
