"""`vramfit train`: fine-tune a model on a file, inside a memory budget."""

import os
import shlex
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import look_at_columns, look_at_data, look_at_gpu, look_at_model
from vramfit.cli.progress import working
from vramfit.cli.ranks import only_one_speaks, speaks
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import number_or_text, parse_counts, parse_freeze, parse_names
from vramfit.tasks import DEFAULT, trained_tasks
from vramfit.units import counted, format_bytes

if TYPE_CHECKING:
    from vramfit.runtime.training.events import Event
    from vramfit.runtime.training.request import TrainRequest

EXAMPLE = "vramfit train reviews.csv --model bert-base-uncased --eval-data dev.csv --output my-model --memory 8GiB"
SHOWN_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""
_DATA, _HOW, _WHERE, _KEEPING = "The data", "How it learns", "The machine", "Evaluation and checkpoints"


def _option(text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=panel)


def run(
    data: Annotated[str, typer.Argument(metavar="DATA", help="CSV, TSV, JSON lines, or a folder that datasets saved.")],
    model: Annotated[str, _option("A folder with weights, a hub id or a catalogue name.", _DATA, "MODEL")],
    output: Annotated[str, _option("The folder to save in.", _DATA, "DIR")],
    eval_data: Annotated[str | None, _option("Evaluate on this; the best model is kept.", _DATA, "FILE")] = None,
    task: Annotated[
        str,
        _option(f"One of {', '.join(trained_tasks())}.", _DATA, "NAME"),
    ] = DEFAULT,
    text_column: Annotated[
        str | None, _option("Column of the texts; two with a comma for pairs.", _DATA, "NAME,…")
    ] = None,
    label_column: Annotated[str | None, _option("Column of the labels.", _DATA, "NAME")] = None,
    max_rows: Annotated[int | None, _option("Read no more rows.", _DATA, "N")] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out rows that cannot be used.", rich_help_panel=_DATA)
    ] = False,
    epochs: Annotated[float, _option("Passes over the data.", _HOW, "X")] = 3,
    max_steps: Annotated[int | None, _option("Batches to learn from, whatever the epochs.", _HOW, "N")] = None,
    batch: Annotated[
        int | None, _option("Samples an optimizer step sees. Default: the plan's, or 32.", _HOW, "N")
    ] = None,
    seq: Annotated[int | None, _option("Cut sequences at so many tokens.", _HOW, "N")] = None,
    lr: Annotated[float, _option("Learning rate.", _HOW, "X")] = 5e-5,
    weight_decay: Annotated[float, _option("Of matrices; not of biases and norms.", _HOW, "X")] = 0.01,
    warmup: Annotated[float, _option("Share of the steps, or a number of steps from 1 on.", _HOW, "X")] = 0.1,
    schedule: Annotated[str, _option("linear, cosine or constant.", _HOW, "NAME")] = "linear",
    max_grad_norm: Annotated[float, _option("Clip the gradient; 0 does not.", _HOW, "X")] = 1.0,
    label_smoothing: Annotated[float, _option("Share of a label spread over all.", _HOW, "X")] = 0.0,
    seed: Annotated[int, _option("Of everything that is drawn.", _HOW, "N")] = 0,
    precision: Annotated[
        str | None, _option("fp32, tf32, amp-fp16, amp-bf16 or bf16; else planned.", _HOW, "NAME")
    ] = None,
    optimizer: Annotated[str | None, _option("adamw, adamw-fused, adamw-8bit, …; else planned.", _HOW, "NAME")] = None,
    checkpointing: Annotated[str | None, _option("full, or the first K layers.", _HOW, "full|K")] = None,
    micro_batch: Annotated[int | None, _option("Samples a forward pass sees.", _HOW, "N")] = None,
    freeze: Annotated[
        str | None, _option("embeddings, encoder, backbone, K layers, or patterns.", _HOW, "NAME|K|…")
    ] = None,
    lora: Annotated[int | None, _option("Rank of LoRA adapters.", _HOW, "RANK")] = None,
    quantize: Annotated[str | None, _option("int8, for weights that do not learn.", _HOW, "NAME")] = None,
    offload: Annotated[
        str | None, _option("optimizer or weights wait in host memory; else planned.", _HOW, "NAME")
    ] = None,
    host_memory: Annotated[str | None, _option("What may wait in host memory, such as 16GiB.", _WHERE, "SIZE")] = None,
    attention: Annotated[str | None, _option("sdpa, eager or packed (no padding); else planned.", _HOW, "NAME")] = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the layers; else where the run is long enough for it to pay.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    fused: Annotated[
        bool | None,
        typer.Option(
            "--fused/--no-fused",
            help="Fused layers in packed passes; else where they can be.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Record packed passes as CUDA graphs; else where a run is long and the host about as slow as the GPU.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        _option("With torchrun: ddp, or fsdp (each GPU has a part of the model); else planned.", _HOW, "NAME"),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Plan with the same maths only: fp32, no 8-bit optimizer.", rich_help_panel=_HOW),
    ] = False,
    allow: Annotated[
        str | None, _option("What a plan may use: freeze, lora, int8, bf16, adafactor, sgd.", _HOW, "NAME,…")
    ] = None,
    memory: Annotated[str | None, _option("What PyTorch may reserve, such as 8GiB.", _WHERE, "SIZE")] = None,
    gpu: Annotated[str | None, _option("Plan for this GPU of the catalogue.", _WHERE, "NAME")] = None,
    plan: Annotated[str | None, _option("A plan that was saved.", _WHERE, "FILE")] = None,
    device: Annotated[
        str | None, _option("cuda, cuda:N, cpu or emulated; the GPU where there is one.", _WHERE, "NAME")
    ] = None,
    fail_at: Annotated[
        str | None, _option("Allocations that fail on the emulated GPU, by number.", _WHERE, "N,…")
    ] = None,
    eval_every: Annotated[int | None, _option("Batches between evaluations; else an epoch.", _KEEPING, "N")] = None,
    save_every: Annotated[int | None, _option("Batches between checkpoints; else an epoch.", _KEEPING, "N")] = None,
    keep: Annotated[int, _option("Newest checkpoints kept, beside the best.", _KEEPING, "N")] = 2,
    patience: Annotated[
        int | None, _option("Stop after so many evaluations without a better one.", _KEEPING, "N")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in DIR.", rich_help_panel=_KEEPING)
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own Python code.", rich_help_panel=_WHERE)
    ] = False,
    json: Json = False,
) -> None:
    """Fine-tune a model and save it as a folder that transformers loads; plans by itself what fits.

    Data is checked before any GPU time is spent. Ctrl-C leaves a checkpoint: the same command with --resume goes on.
    With several GPUs: torchrun --nproc-per-node gpu -m vramfit train …, on each machine; only the first process speaks.
    Leaves with 0, 1 for an error, 2 for a wrong name or value, 3 when it does not fit, 130 when interrupted.
    """
    given = {k: v for k, v in locals().items() if k not in ("json", "text_column")}
    with only_one_speaks():
        _train(given, text_column=text_column, json=json)


def _train(given: dict[str, Any], *, text_column: str | None, json: bool) -> None:
    allow, fail_at, checkpointing = given["allow"], given["fail_at"], given["checkpointing"]
    freeze, max_grad_norm, resume = given["freeze"], given["max_grad_norm"], given["resume"]
    given |= {
        "text_columns": parse_names(text_column),
        "allow": parse_names(allow),
        "fail_at": tuple(parse_counts(fail_at, "--fail-at")),
        "checkpointing": None if checkpointing is None else number_or_text(checkpointing),
        "freeze": None if freeze is None else parse_freeze(freeze),
        "max_grad_norm": max_grad_norm or None,
    }
    from vramfit.runtime.training.interruption import Interrupted, stop_request
    from vramfit.runtime.training.request import TrainRequest

    request = TrainRequest(**given)
    _look(request)
    display = Display()
    try:
        with display:
            with stop_request(resumes=resume) as stop:
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


def _look(request: "TrainRequest") -> None:
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
