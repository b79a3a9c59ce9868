"""Hyperparameters, which are texts, as the settings of a run; the names that scripts usually have are understood."""

import json
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vramfit.errors import DataError, WorkloadError, nearest_names
from vramfit.integrations.sagemaker.job import EVALUATION, TRAIN, Job
from vramfit.runtime.training.request import OPTIONS, TrainRequest
from vramfit.settings.values import Switch, Value

ALIASES = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "train_batch_size": "batch",
    "per_device_train_batch_size": "batch",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_length": "seq",
    "max_seq_length": "seq",
    "max_seq_len": "seq",
    "model_name": "model",
    "model_id": "model",
    "model_name_or_path": "model",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
    "lr_scheduler_type": "schedule",
    "text_column": "text_columns",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
}
"""What scripts call it → what it is called here."""
OURS = ("train_file", "validation_file")
"""Hyperparameters beside those of a run: files of the channels."""
THE_JOBS = ("data", "eval_data", "output", "resume", "plan")
"""What the job decides."""
IGNORED_PREFIXES = ("sagemaker_", "_tuning_", "model_dir", "output_data_dir", "checkpoint_dir")
"""What launchers add for themselves."""
AMP = {"fp16": "amp-fp16", "bf16": "amp-bf16"}
"""Switches of the Trainer → precisions."""
NOTHING = ("", "none", "null")
RUN, UNPACKED = "run", "start"
"""Folders beneath the checkpoints: of the run, and of a model that came packed."""


def read_arguments(arguments: Iterable[str]) -> dict[str, str]:
    """`--key value`, `--key=value` and `--switch` as hyperparameters.

    Raises:
        WorkloadError: a value without a name.

    >>> read_arguments(["--epochs", "2", "--fp16", "True", "--lr=-1", "--exact"])
    {'epochs': '2', 'fp16': 'True', 'lr': '-1', 'exact': 'true'}
    """
    found: dict[str, str] = {}
    name = None
    for text in arguments:
        is_name = text.startswith("-") and not _is_number(text)
        if is_name:
            name, equals, value = text.lstrip("-").partition("=")
            found[name] = value if equals else "true"
            name = None if equals else name
        elif name is None:
            raise WorkloadError([f"{text!r} stands by itself: hyperparameters are --name value"])
        else:
            found[name], name = text, None
    return found


def make_request(job: Job) -> TrainRequest:
    """What a job asks `train` for.

    Raises:
        WorkloadError: hyperparameters that are not known or not what they should be, all at once.
        DataError: a channel that is missing, empty, or holds several files.
    """
    given, files = _settings(job.hyperparameters)
    data = job.data_file(TRAIN, files.get("train_file"), option="train-file")
    if data is None:
        there = ", ".join(sorted(job.channels)) or "none"
        raise DataError(
            f"there is no channel {TRAIN[0]!r}; the job has {there}",
            hint=f"give the data as input channel {TRAIN[0]!r}, and what to evaluate on as {EVALUATION[0]!r}",
        )
    evaluation = job.data_file(EVALUATION, files.get("validation_file"), option="validation-file")
    if "model" not in given:
        given["model"] = _model(job)
    return TrainRequest(
        data=str(data),
        eval_data=None if evaluation is None else str(evaluation),
        output=str(job.checkpoint_dir / RUN),
        resume=True,
        **given,
    )


def check_hyperparameters(hyperparameters: Mapping[str, str]) -> list[str]:
    """What is wrong with some, in words; nothing where all is well."""
    try:
        TrainRequest(**({"model": "m", "data": "d", "output": "o"} | given_settings(hyperparameters)))
    except WorkloadError as error:
        return list(error.problems)
    return []


def given_settings(hyperparameters: Mapping[str, str]) -> dict[str, Any]:
    """Keywords of `TrainRequest`.

    Raises:
        WorkloadError: hyperparameters that are not known or not what they should be, all at once.
    """
    return _settings(hyperparameters)[0]


def _model(job: Job) -> str:
    """The channel `model`: a folder with weights, one that holds such a folder, or what an earlier job packed."""
    folder = job.channels.get("model")
    if folder is None:
        raise WorkloadError(
            ["model is needed: a hyperparameter with a name or a folder, or an input channel 'model' with the weights"]
        )
    packed = sorted(folder.glob("*.tar.gz")) if folder.is_dir() else []
    if packed and not (folder / "config.json").exists():
        folder = _unpacked(packed[0], job.checkpoint_dir / UNPACKED)
    inside = [folder, *(p for p in sorted(folder.iterdir()) if p.is_dir())] if folder.is_dir() else [folder]
    return str(next((p for p in inside if (p / "config.json").exists()), folder))


def _unpacked(archive: Path, folder: Path) -> Path:
    try:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot unpack {archive.name} of channel model: {error}", file=str(archive)) from None
    return folder


def _settings(hyperparameters: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Keywords of `TrainRequest`, and the files of channels."""
    known = [name for name in OPTIONS if name not in THE_JOBS]
    made: dict[str, Any] = {}
    files: dict[str, str] = {}
    problems: list[str] = []
    for given, raw in hyperparameters.items():
        written = given.replace("-", "_").lower()
        if written.startswith(IGNORED_PREFIXES):
            continue
        text = _unquoted(raw)
        name = ALIASES.get(written, written)
        if text.strip().lower() in NOTHING:
            continue
        if name in OURS:
            files[name] = text
        elif name in AMP:
            if _read(given, text, Switch(), problems) is True:
                made["precision"] = AMP[name]
        elif name in known:
            made[name] = _read(given, text, OPTIONS[name].value, problems)
        elif name in THE_JOBS:
            problems.append(f"hyperparameter {given} is the job's to decide: it comes from channels and folders")
        else:
            nearest = nearest_names(name, [*known, *OURS], 1)[0]
            problems.append(f"hyperparameter {given} is not known (nearest: {nearest})")
    if problems:
        raise WorkloadError(problems)
    return made, files


def _read(given: str, text: str, kind: Value, problems: list[str]) -> Any:
    """A value from text; numbers such as 2.0 are whole ones too."""
    value = kind.normal(kind.parse(text.strip().removesuffix(".0") if kind.option_type is int else text))
    if kind.option_type is not str and isinstance(value, str):
        wanted = {bool: "True or False", int: "a whole number", float: "a number"}[kind.option_type]
        problems.append(f"hyperparameter {given} is {text!r}, not {wanted}")
    return value


def _unquoted(text: str) -> str:
    """SageMaker's SDK writes every value as JSON: a text then has quotes around it."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
