"""`vramfit load`: a checkpoint inspected and loaded, and what that took."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import WorkloadOptions, takes_workload

if TYPE_CHECKING:
    from vramfit.loader.load import Progress

NAME = "load"
EXAMPLE = "vramfit load ./my-model --precision bf16 --quantize int8 --check"
NOT_LOADING = (
    "mode",
    "batch",
    "seq",
    "accumulate",
    "micro_batch",
    "lengths",
    "mask",
    "no_dropout",
    "checkpointing",
    "freeze",
    "optimizer",
    "max_grad_norm",
    "lora",
    "compile",
    "loop",
    "gpu",
    "allocator",
    "num_gpus",
    "torch_version",
)
"""Options of a workload that say nothing about how weights lie."""


@takes_workload(without=NOT_LOADING)
def run(
    options: WorkloadOptions,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cuda, cuda:1 or cpu; the GPU where there is one.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Draw the weights: no checkpoint is needed.")
    ] = False,
    scan: Annotated[bool, typer.Option("--scan", help="Read all weights first, for NaN and infinite ones.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare outputs with full precision on sample sentences.")
    ] = False,
    json: Json = False,
) -> None:
    """Inspect a checkpoint, load it tensor by tensor, and report what that took; nothing is kept.

    Leaves with 0, 1 for a checkpoint that is damaged or not this model's, 3 when it does not fit.
    """
    from vramfit.loader.request import make_request

    keywords: dict[str, Any] = options.keywords()
    trust = bool(keywords.pop("trust_remote_code", False))
    request = make_request(
        options.model,
        device=device or "cpu",
        random_weights=random_weights,
        trust_remote_code=trust,
        **keywords,
    )
    with _progress(options.model) as progress:
        from vramfit.loader.checked import load_and_compare
        from vramfit.loader.load import load_request

        request = request if device is not None else replace(request, device=_default_device())
        if check:
            report = load_and_compare(request, progress=progress, scan=scan)
        else:
            _, report = load_request(request, progress=progress, scan=scan)
    if json:
        print_json(report)
        return
    from vramfit.report.load_report import render_load_report

    console().print(render_load_report(report))


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _progress(model: str) -> Iterator["Progress | None"]:
    """A bar with bytes on a terminal, and nothing elsewhere."""
    err = console(stderr=True)
    if not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(True), TransferSpeedColumn()
    with Progress(*columns, console=err, transient=True) as bars:
        task = bars.add_task(f"Loading {model}", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
