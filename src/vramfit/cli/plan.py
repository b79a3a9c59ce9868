"""`vramfit plan`: the fastest settings that fit, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import look_at_data
from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import WorkloadOptions, parse_lengths, parse_names, takes_workload
from vramfit.errors import NoPlanFits
from vramfit.stages import within

if TYPE_CHECKING:
    from vramfit.planner.request import Lengths
    from vramfit.records.plan import InstanceFit, Plan

EXAMPLE = "vramfit plan bert-large-uncased --gpu t4 --batch 32 --seq 512"
DOES_NOT_FIT = 3
_CHOICE, _LENGTHS = "What may be chosen", "Real lengths"
_CHANGES = "freeze, lora, int8 (frozen weights), bf16 (weights), adafactor, sgd"


@takes_workload(without=("lengths", "mode", "loop"), plans=True)
def run(
    options: WorkloadOptions,
    allow: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help=f"Changes of the training that may be made: {_CHANGES}.", rich_help_panel=_CHOICE
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Same maths only: fp32, no 8-bit optimizer.", rich_help_panel=_CHOICE)
    ] = False,
    no_offload: Annotated[
        bool, typer.Option("--no-offload", help="Nothing may wait in host memory.", rich_help_panel=_CHOICE)
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Optimizer steps of the whole run.", rich_help_panel=_CHOICE),
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE|SIZE", help="What stays free of the budget, such as 5% or 500MiB.", rich_help_panel=_CHOICE
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|N,…",
            help="Tokens of each sample: a file with one a line, or numbers.",
            rich_help_panel=_LENGTHS,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Data to learn from, read and timed as train does it.",
            rich_help_panel=_LENGTHS,
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Its column of texts, guessed unless given; two for pairs (a,b).",
            rich_help_panel=_LENGTHS,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Counts their tokens; the model's own, unless given.", rich_help_panel=_LENGTHS
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as JSON.")] = None,
    sagemaker: Annotated[
        bool, typer.Option("--sagemaker", help="Plan for every SageMaker instance instead: which does it fit?")
    ] = False,
    json: Json = False,
) -> None:
    """Find the fastest settings that fit a GPU, keeping the effective batch; say why, and what they cost.

    What is given is kept, the rest is chosen.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when nothing fits.
    """
    if lengths is not None and data is not None:
        raise typer.BadParameter("--lengths and --data both say how long samples are: give one")
    if no_offload and "offload" in options.given:
        raise typer.BadParameter("--offload and --no-offload contradict each other")
    keywords = {**options.keywords(), "allow": allow, "exact": exact or None, "margin": margin, "steps": steps}
    if no_offload:
        keywords["offload"] = False
    if sagemaker:
        _show_instances(plan_instances(options.model, keywords), json=json)
        return
    if data is not None:
        from vramfit.runtime.data.source import without_labels

        found = look_at_data(without_labels(str(data), keywords.get("task", ""), parse_names(text_column)))
        for note in found.notes if found is not None else ():
            _note(note)
    known = None if lengths is None else parse_lengths(lengths)
    with working(f"Planning {options.model}"):
        from vramfit.planner.plan import plan

        if data is not None:
            known = _lengths_of(data, options.model, keywords, parse_names(text_column), tokenizer)
            keywords["group_by_length"] = True
        _say_shorter(keywords.get("seq"), known)
        made: Plan | NoPlanFits
        try:
            made = plan(options.model, lengths=known, **keywords)
        except NoPlanFits as error:
            made = error
    if isinstance(made, NoPlanFits):
        _show_failure(made, json=json)
        raise typer.Exit(DOES_NOT_FIT)
    if save is not None:
        made.save(save)
    if json:
        print_json(made)
        return
    from vramfit.report.plan import render_plan

    console().print(render_plan(made, saved_as=None if save is None else str(save)))


def _note(text: str) -> None:
    console(stderr=True).print(f"Note: {text}", markup=False, soft_wrap=True)


def _say_shorter(seq: int | None, lengths: "Lengths | None") -> None:
    """Say that a plan is for the longest sample where that is shorter than the length asked for."""
    if seq is not None and lengths is not None and lengths.complete and lengths.longest < seq:
        _note(f"--seq {seq:,}: no sample is longer than {lengths.longest:,} tokens, and the plan is for these")


def _lengths_of(
    data: Path, model: str, keywords: dict[str, Any], text_columns: tuple[str, ...], tokenizer: str | None
) -> "Lengths":
    """Tokens of the samples of a data set."""
    from vramfit.models.anatomy import max_positions
    from vramfit.models.resolve import resolve
    from vramfit.runtime.data.samples import LONGEST, lengths_of_data

    task = {"task": keywords["task"]} if "task" in keywords else {}
    resolved = resolve(model, **task, trust_remote_code=keywords.get("trust_remote_code", False))
    limits = [max_positions(resolved.config) or LONGEST, keywords.get("seq")]
    return lengths_of_data(
        str(data),
        task=resolved.task,
        tokenizer=tokenizer or model,
        max_length=min(n for n in limits if n),
        text_columns=text_columns,
    )


def _show_failure(failure: NoPlanFits, *, json: bool) -> None:
    from vramfit.report.no_plan import no_plan_data, render_no_plan

    if json:
        print_json(no_plan_data(failure))
    else:
        console().print(render_no_plan(failure))


def plan_instances(model: str, keywords: dict[str, Any]) -> list["InstanceFit"]:
    """A plan for every SageMaker instance, while a line says how far it is."""
    at = ""

    def show(name: str, done: int, total: int) -> None:
        nonlocal at
        at = f"{name}, {done} of {total} GPUs done"

    with working(f"Planning {model}"), within(lambda: at):
        from vramfit.planner.elsewhere import fit_instances

        return fit_instances(model, on_gpu=show, **keywords)


def _show_instances(fits: list["InstanceFit"], *, json: bool) -> None:
    if json:
        print_json(fits)
    else:
        from vramfit.report.plan import render_instances

        console().print(render_instances(fits))
    if not any(fit.fits for fit in fits):
        raise typer.Exit(DOES_NOT_FIT)
