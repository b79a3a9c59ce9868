"""`vramfit explain`: an out-of-memory message from a log, in plain words, and the plan that fits."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from vramfit.cli.first_look import is_path
from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import WorkloadOptions, takes_workload
from vramfit.errors import VramfitError
from vramfit.settings import having

if TYPE_CHECKING:
    from vramfit.records.explanation import Explanation

EXAMPLE = "vramfit explain train.log --model bert-large-uncased --batch 32 --seq 512"
DOES_NOT_FIT = 3


@takes_workload(without=("model", "mode", "loop", *having(is_measured=False)), plans=True)
def run(
    options: WorkloadOptions,
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG", help="A log, the message itself in quotes, or - for standard input, also the default."
        ),
    ] = "-",
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model that ran: a plan that fits is found.", rich_help_panel="The job"),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as JSON.")] = None,
    json: Json = False,
) -> None:
    """Explain an out-of-memory message: what was asked and held, by whom, what is to blame, and what fits.

    Reads messages of PyTorch since 2018, of CUDA, cuBLAS and MPS, of the host's allocator and of killed containers.
    Exit codes: 0 done, 1 when there is no such message, 2 for a wrong name or value,
    3 when a plan was asked for and nothing fits.
    """
    keywords = options.keywords()
    if model is None and keywords:
        unused = ", ".join(f"--{name.replace('_', '-')}" for name in keywords)
        raise typer.BadParameter(f"{unused}: settings of a job need --model, which says of what")
    if model is None and save is not None:
        raise typer.BadParameter("--save writes a plan, which needs --model")
    if log == "-" and sys.stdin.isatty():
        console(stderr=True).print("Paste the message, then end with Ctrl-D:", style="dim")
    with _opened(log) as stream:
        explanation = _explain(stream, model, keywords)
    if save is not None and explanation.plan is not None:
        explanation.plan.save(save)
    if json:
        print_json(explanation)
    else:
        _show(explanation, saved_as=None if save is None else str(save))
    if explanation.no_plan is not None:
        raise typer.Exit(DOES_NOT_FIT)


def _explain(stream: IO[str], model: str | None, keywords: dict[str, object]) -> "Explanation":
    from vramfit.doctor.explain import explain
    from vramfit.doctor.messages import read_lines

    if model is None:
        return explain(read_lines(stream))
    with working(f"Reading, and planning {model}"):
        return explain(read_lines(stream), model=model, **keywords)


@contextmanager
def _opened(log: str) -> Iterator[IO[str]]:
    """The log as text, whatever bytes are in it; words that name no file are the message itself."""
    try:
        if log == "-":
            with open(sys.stdin.fileno(), encoding="utf-8", errors="replace", closefd=False) as stream:
                yield stream
        elif len(log.split()) > 1 and not is_path(log):
            yield io.StringIO(log)
        else:
            with open(log, encoding="utf-8", errors="replace") as stream:
                yield stream
    except OSError as error:
        raise VramfitError(f"cannot read {log}: {error.strerror}", hint="give a log file, or - for stdin") from None


def _show(explanation: "Explanation", *, saved_as: str | None) -> None:
    from vramfit.report.findings import gpu_of_plan, render_explanation

    out = console()
    out.print(render_explanation(explanation))
    if explanation.plan is not None:
        from vramfit.report.plan import render_plan

        out.print("\n[bold]What fits[/bold]")
        if (said := gpu_of_plan(explanation)) is not None:
            out.print(said, style="yellow")
        out.print(render_plan(explanation.plan, saved_as=saved_as))
    elif explanation.no_plan is None and explanation.message.kind in ("allocator", "driver", "library"):
        out.print("\nWith --model, --batch and --seq, the settings that fit are found too.", style="dim")
