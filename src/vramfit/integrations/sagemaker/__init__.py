"""SageMaker: the entry point of training jobs, the handlers of endpoints, and requests for jobs.

A training script is two lines, in script mode and in a container alike:

    from vramfit.integrations.sagemaker import main
    main()

The four handlers are what SageMaker's inference toolkits call, for endpoints that run theirs and not `vramfit serve`:

    from vramfit.integrations.sagemaker import input_fn, model_fn, output_fn, predict_fn

`VRAMFIT_SERVE` holds options as for `vramfit serve`, such as `--memory 2GiB --precision bf16`.
"""

import json
from typing import TYPE_CHECKING, Any

from vramfit.errors import VramfitError, WorkloadError
from vramfit.integrations.sagemaker.entry import main
from vramfit.integrations.sagemaker.job import read_arguments, read_value, serve_options
from vramfit.settings import having
from vramfit.settings.values import Count, Text, Texts, Value

if TYPE_CHECKING:
    from vramfit.serve.engine import Engine

__all__ = ["input_fn", "main", "model_fn", "output_fn", "predict_fn"]
JSON = "application/json"
OPTIONS: dict[str, Value] = {
    **{name: Text() for name in ("memory", "task", *having(of_weights=True), "gpu", "pooling")},
    "device": Texts(),
    "seq": Count(),
    "max-tokens": Count(),
}
"""Of `vramfit serve`, those that a toolkit leaves to the model."""


def model_fn(model_dir: str, context: Any = None) -> "Engine":
    """The model of a folder, in the memory that `VRAMFIT_SERVE` allows, else in what is free.

    Raises:
        NoPlanFits: weights and one text of full length do not fit.
        CheckpointError, UnknownModel, WorkloadError: no model there, or wrong options.
    """
    from vramfit.serve.engine import open_engine
    from vramfit.serve.settings import ServeSettings

    return open_engine(ServeSettings(model=model_dir, **_options()))


def input_fn(request_body: str | bytes, request_content_type: str = JSON, context: Any = None) -> bytes:
    """The body of a request, as it came.

    Raises:
        VramfitError: it is not said to be JSON.
    """
    if (request_content_type or JSON).split(";")[0].strip().lower() != JSON:
        raise VramfitError(f"content type {request_content_type} is not {JSON}", hint="send JSON")
    return request_body.encode() if isinstance(request_body, str) else bytes(request_body)


def predict_fn(data: bytes, model: "Engine", context: Any = None) -> Any:
    """The answers to a request; memory that runs out splits the batch, and is not heard of here.

    Raises:
        VramfitError: a request that cannot be answered; the message says why.
    """
    reply = model.answer(data)
    said = json.loads(reply.body)
    if reply.status != 200:
        raise VramfitError(said["error"], hint=said["hint"])
    return said


def output_fn(prediction: Any, accept: str = JSON, context: Any = None) -> str:
    """The answers as JSON.

    Raises:
        VramfitError: something else than JSON is wanted.
    """
    kinds = [part.split(";")[0].strip().lower() for part in (accept or JSON).split(",")]
    if not {JSON, "*/*", "application/*"} & set(kinds):
        raise VramfitError(f"{accept} cannot be given, only {JSON}", hint=f"Accept: {JSON}")
    return json.dumps(prediction, ensure_ascii=False)


def _options() -> dict[str, Any]:
    """Keywords of `ServeSettings`, read as hyperparameters are."""
    made: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in read_arguments(serve_options()).items():
        where = f"VRAMFIT_SERVE: --{name}"
        if name not in OPTIONS:
            problems.append(f"{where} is not one of --{', --'.join(OPTIONS)}")
        elif value == "true":
            problems.append(f"{where} has no value")
        else:
            keyword = "devices" if name == "device" else name.replace("-", "_")
            made[keyword] = read_value(where, value, OPTIONS[name], problems)
    if problems:
        raise WorkloadError(problems)
    return made
