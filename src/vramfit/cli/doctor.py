"""`vramfit doctor`: what is wrong with a machine or a model; `vramfit explain`: an out-of-memory message explained;
`vramfit load`: a checkpoint inspected and loaded, and what that took.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from vramfit.cli.first_look import is_path
from vramfit.cli.options import Json, WorkloadOptions, opt, option, verb
from vramfit.cli.terminal import DOES_NOT_FIT, console, leave, print_json, say, show, working
from vramfit.errors import NoPlanFits, VramfitError
from vramfit.records.codec import check_place
from vramfit.records.finding import Finding, worst
from vramfit.report.findings import gpu_of_plan, render_explanation, render_findings, summarize
from vramfit.report.plan import render_plan
from vramfit.report.run import render_load_report
from vramfit.settings import having
from vramfit.stages import tell
from vramfit.tasks import DEFAULT
from vramfit.units import format_bytes
from vramfit.workload import CHOICES

if TYPE_CHECKING:
    from vramfit.loader.load import LoadRequest
    from vramfit.records.estimate import Estimate
    from vramfit.records.watch import Explanation


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is checked; without a model, the machine."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder with config.json and weights, a catalogue name or a hub id; without one, the machine "
            "itself is checked.",
        ),
    ] = None
    task: str = opt(DEFAULT, f"Head to check the model for. One of {', '.join(CHOICES['task'])}.", "NAME")
    num_labels: int | None = opt(None, "Number of labels that you want.", "N")
    scan: bool = opt(False, "Read the weights too: NaN, infinite and all-zero tensors.")

    def check(self) -> list[Finding]:
        """Everything that was found."""
        from vramfit.doctor.checkup import check_environment, check_model

        if self.model is None:
            return check_environment()
        return check_model(self.model, task=self.task, scan=self.scan, num_labels=self.num_labels)


@verb("vramfit doctor ./my-model --task token-classification --scan")
def doctor(
    options: DoctorOptions,
    lock: Annotated[
        Path | None,
        option(
            "Write the exact versions of this environment: a requirements file, or a conda environment for .yml.",
            "FILE",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check the machine (Python, torch, driver, GPU, settings), or a model before it is loaded.

    Exit codes: 0 when no error was found, 1 when something will fail, 2 for a wrong name or value.
    """
    with working(f"Checking {options.model or 'this machine'}"):
        findings = options.check()
    show(findings, lambda _: Group(render_findings(findings), f"\n{summarize(findings)}"), json=json)
    if lock is not None:
        from vramfit.doctor.environment import write_lock

        say(f"Wrote {write_lock(lock)} packages to {lock}")
    if worst(findings) == "error":
        leave(1)


@verb(
    "vramfit explain train.log --model bert-large-uncased --batch 32 --seq 512",
    without=("model", "mode", "loop", *having(is_measured=False)),
    plans=True,
)
def explain(
    options: WorkloadOptions,
    log: Annotated[
        str,
        typer.Argument(metavar="LOG", help="A log, the message itself in quotes, or - for standard input."),
    ] = "-",
    model: Annotated[
        str | None,
        option("The model that ran; with it, explain also finds a plan that fits.", "MODEL", panel="The job"),
    ] = None,
    save: Annotated[Path | None, option("Write the plan as JSON.", "FILE")] = None,
    json: Json = False,
) -> None:
    """Explain an out-of-memory message: the request, who held the memory, the cause, and settings that fit.

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
    if save is not None:
        check_place(save, log, model, what="the plan")
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
        leave(DOES_NOT_FIT)


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
    out = console()
    out.print(render_explanation(explanation))
    if explanation.plan is not None:
        out.print("\n[bold]What fits[/bold]")
        if (said := gpu_of_plan(explanation)) is not None:
            out.print(said, style="yellow")
        out.print(render_plan(explanation.plan, saved_as=saved_as))
    elif explanation.no_plan is None and explanation.message.kind in ("allocator", "driver", "library"):
        out.print("\nWith --model, --batch and --seq, the settings that fit are found too.", style="dim")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Where a checkpoint is loaded to, and what is checked."""

    device: str | None = opt(None, "cuda, cuda:N or cpu. Default: the GPU if there is one.", "NAME")
    random_weights: bool = opt(False, "Use random weights; no checkpoint is needed.")
    seed: int = opt(0, "Seed of random weights: a new head, or all of them.", "N", min=0)
    scan: bool = opt(False, "Read all weights first, and look for NaN and infinite numbers.")
    check: bool = opt(False, "Compare outputs with full precision on sample sentences.")
    batch: int | None = opt(None, "With --offload weights: leave memory for a batch of N samples.", "N", min=1)
    seq: int | None = opt(None, "With --offload weights: leave memory for texts of N tokens.", "N", min=1)


@verb("vramfit load ./my-model --precision bf16 --quantize int8 --check", without=having(at_load=False), infers=True)
def load(options: WorkloadOptions, own: LoadOptions, json: Json = False) -> None:
    """Inspect a checkpoint, load it tensor by tensor, and report what loading took; the model is not kept.

    --memory limits the weights; with --offload weights and --batch or --seq, weights and a forward pass together.
    Exit codes: 0 done, 1 for a checkpoint that is damaged or not this model's, 2 for a wrong name or value,
    3 when it does not fit.
    """
    from vramfit.loader.load import make_request

    job = {name: count for name, count in (("batch", own.batch), ("seq", own.seq)) if count is not None}
    keywords: dict[str, Any] = options.keywords(trains=False)
    drawn = {"random_weights": own.random_weights, "seed": own.seed}
    request = make_request(options.model, device=own.device or "cpu", **drawn, **keywords)
    if job and not request.offloads:
        raise typer.BadParameter("--batch and --seq go with --offload weights: they say how many layers can stay")
    with working(f"Loading {options.model}"):
        from vramfit.loader.comparison import load_and_compare
        from vramfit.loader.load import load_request

        request = request if own.device is not None else replace(request, device=_default_device())
        predicted = _predict(request, job) if job else None
        if predicted is not None:
            weights_bytes = predicted.breakdown["weights"]
            request = replace(request, workload=replace(request.workload, memory=weights_bytes))
        if own.check:
            report = load_and_compare(request, progress=_tell_bytes, scan=own.scan)
        else:
            _, report = load_request(request, progress=_tell_bytes, scan=own.scan)
    show(report, render_load_report, json=json)
    if predicted is not None and not json:
        w, most_bytes = predicted.workload, predicted.safe_reserved_bytes
        say(f"Memory is left for {w.batch} × {w.seq} tokens: at most {format_bytes(most_bytes)} in all.", stderr=False)


def _predict(request: "LoadRequest", job: dict[str, int]) -> "Estimate | None":
    """The job inside the memory given, or what is free on the GPU; its share of weights is the load's budget.

    None where nothing says what is free: that is the load's to refuse.
    """
    import torch

    from vramfit.estimator.predict import estimate
    from vramfit.loader.budget import free_bytes

    w = request.workload
    memory = w.memory if w.memory is not None else free_bytes(torch.device(request.device))
    if memory is None:
        return None
    same = (name for name in having(at_load=True) if name not in ("model", "memory"))
    predicted = estimate(
        request.model,
        mode="infer",
        memory=memory,
        trust_remote_code=request.trust_remote_code,
        **{name: getattr(w, name) for name in same},
        **job,
    )
    if not predicted.fits:
        least = predicted.safe_reserved_bytes
        raise NoPlanFits(
            f"{predicted.workload.batch} × {predicted.workload.seq} tokens take {format_bytes(least)} with every layer "
            f"offloaded, and the memory is {format_bytes(memory)}",
            best=predicted,
            shortfall_bytes=least - memory,
            hint="take a smaller batch, fewer tokens, precision bf16 or quantize int8",
        )
    return predicted


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _tell_bytes(done: int, total: int) -> None:
    if total:  # of weights that are drawn, nothing is read
        tell(f"{format_bytes(done)} of {format_bytes(total)}")
