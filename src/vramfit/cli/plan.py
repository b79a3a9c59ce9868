"""`vramfit plan`: the fastest settings that fit; `vramfit sagemaker`: a training job on the smallest instance."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import look_at_data
from vramfit.cli.options import Json, WorkloadOptions, argument, opt, option, parse_lengths, parse_names, verb
from vramfit.cli.terminal import DOES_NOT_FIT, console, leave, print_json, say, show, working
from vramfit.errors import NoPlanFits
from vramfit.integrations.sagemaker import launching
from vramfit.integrations.sagemaker.launching import LAUNCH_OPTIONS
from vramfit.records.codec import check_place
from vramfit.report.plan import no_plan_data, render_instances, render_no_plan, render_plan
from vramfit.stages import beside, within

if TYPE_CHECKING:
    from vramfit.planner.request import Lengths
    from vramfit.records.plan import InstanceFit

_CHOICE, _LENGTHS, _JOB, _AWS = "What the plan may use", "Real lengths", "The job", "On AWS"
_CHANGES = "freeze, lora, int8 or nf4 (frozen weights), bf16 (weights), adafactor, sgd"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan may choose, the lengths it is timed on, and where it is written."""

    allow: str | None = opt(None, f"Different training that the plan may use: {_CHANGES}.", "NAME,…", panel=_CHOICE)
    exact: bool = opt(False, "Same maths only: fp32, no 8-bit optimizer.", panel=_CHOICE)
    no_offload: bool = opt(False, "Do not offload to host memory.", panel=_CHOICE)
    steps: int | None = opt(None, "Optimizer steps of the run; long runs repay compiling.", "N", min=1, panel=_CHOICE)
    margin: str | None = opt(
        None, "Headroom: the part of the budget that stays free, such as 5% or 500MiB.", "SHARE|SIZE", panel=_CHOICE
    )
    lengths: str | None = opt(
        None, "Tokens of each sample: numbers, or a file with one number per line.", "FILE|N,…", panel=_LENGTHS
    )
    data: Path | None = opt(None, "Training data, read and timed as vramfit train does.", "FILE", panel=_LENGTHS)
    text_column: str | None = opt(
        None, "Column of the texts; two for pairs (a,b). Default: found by usual names.", "NAME", panel=_LENGTHS
    )
    tokenizer: str | None = opt(None, "Tokenizer that counts tokens. Default: the model's own.", "DIR", panel=_LENGTHS)
    save: Path | None = opt(None, "Write the plan as JSON.", "FILE")
    sagemaker: bool = opt(False, "Plan for every SageMaker instance instead, and show where the job fits.")

    def keywords(self, options: WorkloadOptions) -> dict[str, Any]:
        """Keywords of `plan`, but for the model and real lengths."""
        if self.lengths is not None and self.data is not None:
            raise typer.BadParameter("--lengths and --data both say how long samples are: give one")
        if self.no_offload and "offload" in options.given:
            raise typer.BadParameter("--offload and --no-offload contradict each other")
        own = {"allow": self.allow, "exact": self.exact or None, "margin": self.margin, "steps": self.steps}
        return {**options.keywords(), **own, **({"offload": False} if self.no_offload else {})}

    def look_at_data(self, task: str) -> None:
        """Refuse data that cannot be read, before torch is imported."""
        from vramfit.runtime.data.source import without_labels

        found = look_at_data(without_labels(str(self.data), task, parse_names(self.text_column)))
        for note in found.notes if found is not None else ():
            say(f"Note: {note}")

    def lengths_of_data(self, model: str, keywords: dict[str, Any]) -> "Lengths":
        """Tokens of the samples of the data, counted while the model's class is imported."""
        from vramfit.models.anatomy import max_positions
        from vramfit.models.resolve import find_model
        from vramfit.runtime.data.samples import LONGEST, lengths_of_data, load_counter

        task = {"task": keywords["task"]} if "task" in keywords else {}
        found = find_model(model, **task, trust_remote_code=keywords.get("trust_remote_code", False))
        limits = [max_positions(found.config) or LONGEST, keywords.get("seq")]
        count = found.checked_first(
            lambda: lengths_of_data(
                str(self.data),
                task=found.task,
                counter=load_counter(self.tokenizer or model),
                max_length=min(n for n in limits if n),
                text_columns=parse_names(self.text_column),
            )
        )
        with beside(count) as lengths:
            found.resolve()
            return lengths()


@verb("vramfit plan bert-large-uncased --gpu t4 --batch 32 --seq 512", without=("lengths", "mode", "loop"), plans=True)
def plan(options: WorkloadOptions, own: PlanOptions, json: Json = False) -> None:
    """Find the fastest settings that fit a GPU, keeping the effective batch; say why, and what they cost.

    Settings that you give are kept; the plan chooses the others.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when nothing fits.
    """
    keywords = own.keywords(options)
    if own.save is not None:
        check_place(own.save, own.data, options.model, what="the plan")
    if own.sagemaker:
        fits = plan_instances(options.model, keywords)
        show(fits, render_instances, json=json)
        if not any(fit.fits for fit in fits):
            leave(DOES_NOT_FIT)
        return
    if own.data is not None:
        own.look_at_data(keywords.get("task", ""))
    known = None if own.lengths is None else parse_lengths(own.lengths)
    try:
        with working(f"Planning {options.model}"):
            from vramfit.planner.plan import plan

            if own.data is not None:
                known = own.lengths_of_data(options.model, keywords)
                keywords["group_by_length"] = True
            _say_shorter(keywords.get("seq"), known)
            made = plan(options.model, lengths=known, **keywords)
    except NoPlanFits as failure:
        show(no_plan_data(failure) if json else failure, render_no_plan, json=json)
        leave(DOES_NOT_FIT)
    if own.save is not None:
        made.save(own.save)
    show(made, lambda made: render_plan(made, saved_as=None if own.save is None else str(own.save)), json=json)


def _say_shorter(seq: int | None, lengths: "Lengths | None") -> None:
    """Say that a plan is for the longest sample where that is shorter than the length asked for."""
    if seq is not None and lengths is not None and lengths.complete and lengths.longest < seq:
        say(f"Note: --seq {seq:,}: no sample is longer than {lengths.longest:,} tokens, and the plan is for these")


def plan_instances(model: str, keywords: dict[str, Any]) -> list["InstanceFit"]:
    """A plan for every SageMaker instance, while a line says how far it is."""
    at = ""

    def tell(name: str, done: int, total: int) -> None:
        nonlocal at
        at = f"{name}, {done} of {total} GPUs done"

    with working(f"Planning {model}"), within(lambda: at):
        from vramfit.planner.elsewhere import fit_instances

        return fit_instances(model, on_gpu=tell, **keywords)


@verb(
    "vramfit sagemaker launch bert-large-uncased --data s3://bucket/train.csv --output s3://bucket/runs "
    "--image 123456789012.dkr.ecr.eu-west-1.amazonaws.com/vramfit --role arn:aws:iam::123456789012:role/train",
    settings={option.keyword: option for option in LAUNCH_OPTIONS},
    without=("trust_remote_code",),
    lists=(),
    panels={"job": _JOB, "aws": _AWS},
)
def sagemaker(
    options: WorkloadOptions,
    action: Annotated[str, argument("The action.", "launch")],
    model: Annotated[str, argument("A catalogue name, a hub id or a folder.", "MODEL")],
    hyperparameter: Annotated[
        list[str] | None, option("An option of vramfit train; may be repeated.", "NAME=VALUE", panel=_JOB)
    ] = None,
    submit: Annotated[bool, option("Send the request; without this, it is only shown.", None, "--submit")] = False,
    json: Json = False,
) -> None:
    """Plan a SageMaker training job on the smallest instance that it fits; with --submit, start it.

    The plan for every other instance is shown too.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when it fits nowhere.
    """
    if action != "launch":
        raise typer.BadParameter(f"{action!r} is not launch")
    further = dict(_pair(text) for text in hyperparameter or [])
    settings = launching.LaunchSettings(model=model, hyperparameters=further, **options.given)
    needs = ", ".join(f"--{one}" for one in settings.missing)
    if submit and needs:
        raise typer.BadParameter(f"--submit needs {needs}")
    fits = plan_instances(model, settings.plan_keywords())
    chosen = launching.choose_instance(settings, fits)
    request = settings.request(chosen.instance)
    arn = launching.submit(request, region=settings.region) if submit else None
    if json:
        print_json({"instance": chosen, "instances": fits, "request": request, "missing": settings.missing, "arn": arn})
        return
    console().print(render_instances(fits))
    say(f"\nOn {chosen.instance}{', this would be sent:' if arn is None else f': {arn}'}", stderr=False)
    if arn is None:
        say(json_format.dumps(request, indent=2), stderr=False)
        say(
            f"Nothing was sent. With --submit it is{f' (it needs {needs})' if needs else ''}.",
            stderr=False,
            style="dim",
        )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--hyperparameter {text!r} is not NAME=VALUE")
    return name, value
