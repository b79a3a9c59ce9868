"""The four functions that SageMaker's inference toolkits call, for endpoints that run theirs and not `vramfit serve`.

    from vramfit.integrations.sagemaker import input_fn, model_fn, output_fn, predict_fn

`VRAMFIT_SERVE` holds options as for `vramfit serve`, such as `--memory 2GiB --precision bf16`.
"""

import json
import os
import shlex
from typing import TYPE_CHECKING, Any

from vramfit.errors import VramfitError, WorkloadError

if TYPE_CHECKING:
    from vramfit.serve.engine import Engine

JSON = "application/json"
OPTIONS = {
    "--memory": "memory",
    "--task": "task",
    "--precision": "precision",
    "--quantize": "quantize",
    "--offload": "offload",
    "--gpu": "gpu",
    "--device": "devices",
    "--seq": "seq",
    "--pooling": "pooling",
    "--max-tokens": "max_tokens",
}
"""Of `vramfit serve`, those that a toolkit leaves to the model."""


def model_fn(model_dir: str, context: Any = None) -> "Engine":
    """The model of a folder, in the memory that `VRAMFIT_SERVE` allows, else in what is free.

    Raises:
        NoPlanFits: weights and one text of full length do not fit.
        CheckpointError, UnknownModel, WorkloadError: no model there, or wrong options.
    """
    from vramfit.serve.engine import Engine
    from vramfit.serve.loading import load_model
    from vramfit.serve.settings import ServeSettings

    engine = Engine(load_model(ServeSettings(model=model_dir, **_options(os.environ.get("VRAMFIT_SERVE", "")))))
    if engine.run_device.has_budget:
        engine.rehearse()
    return engine


def input_fn(request_body: str | bytes, request_content_type: str = JSON, context: Any = None) -> bytes:
    """The body of a request, as it came.

    Raises:
        VramfitError: it is not said to be JSON.
    """
    if request_content_type.split(";")[0].strip().lower() != JSON:
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


def _options(text: str) -> dict[str, Any]:
    words = shlex.split(text)
    names, values = words[::2], words[1::2]
    problems = [f"VRAMFIT_SERVE: {name} is not one of {', '.join(OPTIONS)}" for name in names if name not in OPTIONS]
    if len(names) != len(values):
        problems.append(f"VRAMFIT_SERVE: {names[-1]} has no value")
    whole = [(n, v) for n, v in zip(names, values, strict=False) if n in ("--seq", "--max-tokens") and not v.isdigit()]
    problems += [f"VRAMFIT_SERVE: {name} {value!r} is not a whole number" for name, value in whole]
    if problems:
        raise WorkloadError(problems)
    made: dict[str, Any] = {OPTIONS[name]: value for name, value in zip(names, values, strict=True)}
    made |= {name: int(made[name]) for name in ("seq", "max_tokens") if name in made}
    return made | ({"devices": tuple(made["devices"].split(","))} if "devices" in made else {})
