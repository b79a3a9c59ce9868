"""`vramfit sagemaker`: training jobs asked for on the smallest instance that they fit on."""

import inspect
import json as json_format
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import given_of, parameters_of
from vramfit.integrations.sagemaker.launching import LAUNCH_OPTIONS, LaunchSettings, choose_instance
from vramfit.integrations.sagemaker.launching import submit as send

EXAMPLE = (
    "vramfit sagemaker launch bert-large-uncased --data s3://bucket/train.csv --output s3://bucket/runs "
    "--image 123456789012.dkr.ecr.eu-west-1.amazonaws.com/vramfit --role arn:aws:iam::123456789012:role/train"
)
ACTIONS = ("launch",)
PANELS = {"job": "The job", "aws": "On AWS"}


def _takes_job(verb: Callable[..., None]) -> Callable[..., None]:
    """The function that typer reads: the parameters of a verb, and one for each option of a job."""
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in list(inspect.signature(verb).parameters.values())[1:]]
    parameters = [*own, *parameters_of(LAUNCH_OPTIONS, panels=PANELS)]

    @wraps(verb)
    def run(**values: Any) -> None:
        verb(given_of(LAUNCH_OPTIONS, values), **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@_takes_job
def run(
    options: dict[str, Any],
    action: Annotated[str, typer.Argument(metavar="launch", help="What to do.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalogue name, a hub id or a folder.")],
    hyperparameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Further ones of vramfit train; may be repeated.",
            rich_help_panel=PANELS["job"],
        ),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Send the request. Else it is only shown.")] = False,
    json: Json = False,
) -> None:
    """Ask SageMaker to train a model on the smallest instance it fits; without --submit, show the request.

    Also says what the job would take on every other instance.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when it fits nowhere.
    """
    if action not in ACTIONS:
        raise typer.BadParameter(f"{action!r} is not {' or '.join(ACTIONS)}")
    further = dict(_pair(text) for text in hyperparameter or [])
    settings = LaunchSettings(model=model, hyperparameters=further, **options)
    if submit and settings.missing:
        raise typer.BadParameter(f"--submit needs {', '.join(f'--{one}' for one in settings.missing)}")
    from vramfit.cli.plan import plan_instances

    fits = plan_instances(model, settings.plan_keywords())
    chosen = choose_instance(settings, fits)
    request = settings.request(chosen.instance)
    arn = None
    if submit:
        arn = send(request, region=settings.region)
    if json:
        print_json({"instance": chosen, "instances": fits, "request": request, "missing": settings.missing, "arn": arn})
        return
    _show(chosen.instance, fits, request, settings.missing, arn)


def _show(instance: str, fits: list[Any], request: dict[str, Any], missing: tuple[str, ...], arn: str | None) -> None:
    from vramfit.report.plan import render_instances

    out = console()
    out.print(render_instances(fits))
    words = f"On {instance}, this would be sent:" if arn is None else f"On {instance}: {arn}"
    out.print(f"\n{words}", markup=False, soft_wrap=True)
    if arn is None:
        out.print(json_format.dumps(request, indent=2), markup=False, soft_wrap=True)
        needs = f" (it needs {', '.join(f'--{one}' for one in missing)})" if missing else ""
        out.print(f"Nothing was sent. With --submit it is{needs}.", style="dim", markup=False, soft_wrap=True)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--hyperparameter {text!r} is not NAME=VALUE")
    return name, value
