"""`vramfit sagemaker`: training jobs asked for on the smallest instance that they fit on."""

import json as json_format
from typing import Annotated, Any

import typer

from vramfit.cli.terminal import Json, console, print_json
from vramfit.tasks import DEFAULT

EXAMPLE = (
    "vramfit sagemaker launch bert-large-uncased --data s3://bucket/train.csv --output s3://bucket/runs "
    "--image 123456789012.dkr.ecr.eu-west-1.amazonaws.com/vramfit --role arn:aws:iam::123456789012:role/train"
)
ACTIONS = ("launch",)
_JOB, _AWS = "The job", "On AWS"


def _option(text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=panel)


def run(
    action: Annotated[str, typer.Argument(metavar="launch", help="What to do.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalogue name, a hub id or a folder.")],
    data: Annotated[str | None, _option("S3 address of the training data.", _AWS, "s3://…")] = None,
    eval_data: Annotated[str | None, _option("S3 address of what to evaluate on.", _AWS, "s3://…")] = None,
    weights: Annotated[
        str | None, _option("S3 address of the model's folder; else fetched by its name.", _AWS, "s3://…")
    ] = None,
    output: Annotated[str | None, _option("S3 address for model and checkpoints.", _AWS, "s3://…")] = None,
    image: Annotated[str | None, _option("The container (see docs/sagemaker.md).", _AWS, "URI")] = None,
    role: Annotated[str | None, _option("Role that the job runs as.", _AWS, "ARN")] = None,
    region: Annotated[str | None, _option("Where; else as AWS is configured.", _AWS, "NAME")] = None,
    name: Annotated[str | None, _option("Of the job; else made of the time.", _AWS, "NAME")] = None,
    instance: Annotated[
        str | None, _option("Take this one; else the smallest on which there is a plan.", _AWS, "ml.…")
    ] = None,
    instances: Annotated[int, _option("How many of them.", _AWS, "N")] = 1,
    spot: Annotated[
        bool,
        typer.Option("--spot", help="Spare capacity, that may be taken away and comes back.", rich_help_panel=_AWS),
    ] = False,
    max_hours: Annotated[float, _option("The job is ended after so many.", _AWS, "X")] = 24,
    volume: Annotated[int, _option("Disk of the instance in GiB.", _AWS, "N")] = 50,
    task: Annotated[str, _option("The head.", _JOB, "NAME")] = DEFAULT,
    batch: Annotated[int, _option("Samples an optimizer step sees.", _JOB, "N")] = 32,
    seq: Annotated[int, _option("Tokens a sequence.", _JOB, "N")] = 128,
    allow: Annotated[
        str | None, _option("What a plan may use: freeze, lora, int8, bf16, adafactor, sgd.", _JOB, "NAME,…")
    ] = None,
    hyperparameter: Annotated[
        list[str] | None, _option("Further ones of vramfit train; may be repeated.", _JOB, "NAME=VALUE")
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
    given = dict(_pair(text) for text in hyperparameter or [])
    if allow is not None:
        given["allow"] = allow
    from vramfit.integrations.sagemaker.launching import LaunchSettings, choose_instance

    settings = LaunchSettings(
        model=model, data=data, eval_data=eval_data, weights=weights, output=output, image=image, role=role, name=name,
        task=task, batch=batch, seq=seq, hyperparameters=given, instance=instance, num_instances=instances, spot=spot,
        max_hours=max_hours, volume_gib=volume,
    )  # fmt: skip
    if submit and settings.missing:
        raise typer.BadParameter(f"--submit needs {', '.join(f'--{one}' for one in settings.missing)}")
    from vramfit.cli.plan import plan_instances

    fits = plan_instances(model, settings.plan_keywords())
    chosen = choose_instance(settings, fits)
    request = settings.request(chosen.instance)
    arn = None
    if submit:
        from vramfit.integrations.sagemaker.launching import submit as send

        arn = send(request, region=region)
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
