"""`Job`: what SageMaker tells a training job, through variables or files; and its hyperparameters as a `TrainRequest`.

Hyperparameters are texts; the names that scripts usually have are understood.
"""

import json
import os
import shlex
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.devices.catalogue import find_instance
from vramfit.errors import DataError, UnknownGPU, VramfitError, WorkloadError, nearest_names
from vramfit.runtime.training.request import OPTIONS, TrainRequest
from vramfit.settings.precision import Precision
from vramfit.settings.values import Switch, Value

BASE = "/opt/ml"
TRAIN = ("train", "training")
EVALUATION = ("validation", "eval", "evaluation", "test", "dev")
DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".txt", ".conll")
SAVED_DATASET = ("state.json", "dataset_info.json")
"""What `datasets` leaves in a folder that it saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training job on one host."""

    hyperparameters: dict[str, str]
    """As they were given: texts."""
    channels: dict[str, Path]
    model_dir: Path
    output_data_dir: Path
    checkpoint_dir: Path
    """Kept in S3 where the job has a checkpoint configuration, and back after an interruption."""
    hosts: tuple[str, ...]
    current_host: str
    num_gpus: int
    """Of this host."""
    instance: str | None

    def data_file(self, names: Sequence[str], wanted: str | None, *, option: str) -> Path | None:
        """The data of the first of some channels that there is; None where there is none of them.

        Args:
            names: of the channel, the usual one first.
            wanted: a file in it, where there are several.
            option: the hyperparameter that names it.

        Raises:
            DataError: a channel without data, or with several files.
        """
        found = next((name for name in names if name in self.channels), None)
        if found is None:
            return None
        folder = self.channels[found]
        if not folder.exists():
            raise DataError(f"channel {found}: there is no {folder}", file=str(folder))
        if wanted is not None:
            if not (folder / wanted).exists():
                there = ", ".join(_names(folder)) or "nothing"
                raise DataError(f"channel {found} has no {wanted!r}; it has {there}", file=str(folder))
            return folder / wanted
        if folder.is_file() or any((folder / name).exists() for name in SAVED_DATASET):
            return folder
        files = [p for p in sorted(folder.iterdir()) if p.suffix in DATA_SUFFIXES and not p.name.startswith(".")]
        if len(files) == 1:
            return files[0]
        what = f"{len(files)} files of data" if files else "no file of data"
        there = ", ".join(_names(folder)) or "nothing"
        raise DataError(
            f"channel {found} has {what}: {there}",
            file=str(folder),
            hint=f"name one: hyperparameter {option}" if files else f"data is a file {', '.join(DATA_SUFFIXES)}",
        )


def read_job(hyperparameters: Mapping[str, str] | None = None, env: Mapping[str, str] = os.environ) -> Job:
    """The job that this process belongs to.

    Args:
        hyperparameters: from a command line; None reads those of the job.
        env: variables; the process's own, unless given.

    Raises:
        VramfitError: a file of the job's configuration that is damaged.
    """
    base = base_folder(env)
    config = base / "input" / "config"
    resources = _json(env.get("SM_RESOURCE_CONFIG"), config / "resourceconfig.json")
    instance = env.get("SM_CURRENT_INSTANCE_TYPE") or resources.get("current_instance_type")
    hosts = tuple(_list(env.get("SM_HOSTS")) or resources.get("hosts") or ["localhost"])
    return Job(
        hyperparameters=dict(hyperparameters) if hyperparameters is not None else _hyperparameters(env, config),
        channels=_channels(env, base, config),
        model_dir=Path(env.get("SM_MODEL_DIR") or base / "model"),
        output_data_dir=Path(env.get("SM_OUTPUT_DATA_DIR") or output_folder(env) / "data"),
        checkpoint_dir=Path(env.get("SM_CHECKPOINT_DIR") or base / "checkpoints"),
        hosts=hosts,
        current_host=env.get("SM_CURRENT_HOST") or resources.get("current_host") or hosts[0],
        num_gpus=_num_gpus(env, instance),
        instance=instance,
    )


def base_folder(env: Mapping[str, str] = os.environ) -> Path:
    """`/opt/ml`, or where `SAGEMAKER_BASE_DIR` says."""
    return Path(env.get("SAGEMAKER_BASE_DIR") or BASE)


def output_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where the failure file goes, whatever else is known of the job."""
    return Path(env.get("SM_OUTPUT_DIR") or base_folder(env) / "output")


def _hyperparameters(env: Mapping[str, str], config: Path) -> dict[str, str]:
    """Those of the job; where a launcher set a variable for each, these count for what the others lack."""
    given = _json(env.get("SM_HPS"), config / "hyperparameters.json")
    known = {_name(name) for name in given}
    single = {name.removeprefix("SM_HP_").lower(): value for name, value in env.items() if name.startswith("SM_HP_")}
    made = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    return made | {name: value for name, value in single.items() if _name(name) not in known}


def _name(name: str) -> str:
    return name.replace("-", "_").lower()


def _channels(env: Mapping[str, str], base: Path, config: Path) -> dict[str, Path]:
    data = base / "input" / "data"
    named = _json(env.get("SM_INPUT_DATA_CONFIG"), config / "inputdataconfig.json")
    found = {name: data / name for name in named}
    if not found and data.is_dir():
        found = {folder.name: folder for folder in sorted(data.iterdir()) if folder.is_dir()}
    prefix = "SM_CHANNEL_"
    for name, value in env.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix).lower()] = Path(value)
    return found


def _num_gpus(env: Mapping[str, str], instance: str | None) -> int:
    if env.get("SM_NUM_GPUS", "").isdigit():
        return int(env["SM_NUM_GPUS"])
    try:
        return find_instance(instance).num_gpus if instance else 0
    except UnknownGPU:
        return 0


def _json(text: str | None, path: Path) -> dict[str, Any]:
    where = "a variable of the launcher" if text else str(path)
    if not text and not path.exists():
        return {}
    try:
        data = json.loads(text or path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise VramfitError(f"{where} is not JSON: {error}", hint="it is SageMaker's to write") from None
    if not isinstance(data, dict):
        raise VramfitError(f"{where} is not a JSON object", hint="it is SageMaker's to write")
    return data


def _list(text: str | None) -> list[str]:
    """A list in JSON, or names with commas between."""
    if not text:
        return []
    try:
        made = json.loads(text)
    except ValueError:
        return [part.strip() for part in text.split(",") if part.strip()]
    return [str(item) for item in made] if isinstance(made, list) else [str(made)]


def _names(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.iterdir())][:8]


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
"""Hyperparameters that are no options of a run: file names in the channels."""
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
            raise WorkloadError([f"{text!r} has no name: hyperparameters are --name value"])
        else:
            found[name], name = text, None
    return found


def serve_options(env: Mapping[str, str] = os.environ) -> list[str]:
    """The words of `VRAMFIT_SERVE`.

    Raises:
        WorkloadError: a quote that is not closed.
    """
    text = env.get("VRAMFIT_SERVE", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise WorkloadError([f"VRAMFIT_SERVE is {text!r}: {str(error).lower()}"]) from None


def make_request(job: Job) -> TrainRequest:
    """What a job asks `train` for.

    Raises:
        WorkloadError: hyperparameters that are not known or not what they should be, all at once.
        DataError: a channel that is missing, empty, or holds several files.
    """
    given, files = read_hyperparameters(job.hyperparameters)
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
        TrainRequest(**({"model": "m", "data": "d", "output": "o"} | read_hyperparameters(hyperparameters)[0]))
    except WorkloadError as error:
        return list(error.problems)
    return []


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


def read_hyperparameters(hyperparameters: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Keywords of `TrainRequest`, and the files of channels.

    Raises:
        WorkloadError: hyperparameters that are not known or not what they should be, all at once.
    """
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
        elif name in AMP or name in known:
            value = read_value(
                f"hyperparameter {given}", text, Switch() if name in AMP else OPTIONS[name].value, problems
            )
            if name in AMP and value is not True:
                continue
            name, value = (Precision.keyword, AMP[name]) if name in AMP else (name, value)
            if made.setdefault(name, value) != value:
                problems.append(
                    f"hyperparameter {given} makes {name} {value}, and another makes it {made[name]}: give one"
                )
        elif name in THE_JOBS:
            problems.append(f"hyperparameter {given} is the job's to decide: it comes from channels and folders")
        else:
            nearest = nearest_names(name, [*known, *OURS], 1)[0]
            problems.append(f"hyperparameter {given} is not known (nearest: {nearest})")
    if problems:
        raise WorkloadError(problems)
    return made, files


def read_value(name: str, text: str, kind: Value, problems: list[str]) -> Any:
    """A value from text, as the command line reads it; numbers such as 2.0 are whole ones too."""
    value = kind.normal(kind.parse(text.strip().removesuffix(".0") if kind.option_type is int else text))
    if kind.option_type is not str and isinstance(value, str):
        problems += kind.problems(name, value)
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
