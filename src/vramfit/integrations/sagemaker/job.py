"""`Job`: what SageMaker tells a training job, through variables where a launcher has set them, else through files."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.devices.catalogue import find_instance
from vramfit.errors import DataError, UnknownGPU, VramfitError

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


def read_job(hyperparameters: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None) -> Job:
    """The job that this process belongs to.

    Args:
        hyperparameters: from a command line; None reads those of the job.
        environment: None takes the process's own.

    Raises:
        VramfitError: a file of the job's configuration that is damaged.
    """
    env = os.environ if environment is None else environment
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


def base_folder(environment: Mapping[str, str] | None = None) -> Path:
    """`/opt/ml`, or where `SAGEMAKER_BASE_DIR` says."""
    env = os.environ if environment is None else environment
    return Path(env.get("SAGEMAKER_BASE_DIR") or BASE)


def output_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where the failure file goes, whatever else is known of the job."""
    env = os.environ if environment is None else environment
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
