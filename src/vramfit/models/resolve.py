"""From whatever names a model (catalogue name, folder, hub id, configuration, module) to its class."""

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from vramfit.errors import CheckpointError, VramfitError, WorkloadError
from vramfit.models.catalogue import find_entry, unknown_model
from vramfit.models.configuration import (
    check_sizes,
    class_for_task,
    make_config,
    parse_config,
    read_config_file,
    task_of_class,
)
from vramfit.models.hub import (
    NotOnHubError,
    fetch_config,
    has_own_code,
    load_remote_config,
    looks_like_hub_id,
    plain_file,
    remote_class,
)
from vramfit.models.sentence_folder import marks_of, read_parts, transformer_folder
from vramfit.tasks import DEFAULT, all_tasks, encoder_alone, find_task
from vramfit.tasks.embedding import HeadParts
from vramfit.tasks.parts.heads import problem_of

if TYPE_CHECKING:
    from torch import nn

Origin = Literal["catalogue", "folder", "hub", "config", "module"]
MAX_LABELS = 10**6
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoundModel:
    """A model whose configuration is known, and whose class is not imported yet: that takes a second or more."""

    name: str
    """What to call it: the catalogue name, the folder, the hub id, or the class of an object."""
    origin: Origin
    """Where the configuration came from."""
    config: Any
    """The transformers configuration, a copy that is ours; None for a module that has none."""
    task: str
    """The task; for a module, the one its class is for."""
    own_class: Callable[[], type] | None = None
    """Gives the class where it is not transformers' own for the task."""
    folder: Path | None = None
    """The folder the configuration lies in, for `origin` folder."""
    parts: HeadParts | None = None
    """What the folder says of a head that pools, for a task with one."""
    module: "nn.Module | None" = field(default=None, repr=False)
    """The module that was given, untouched."""

    @property
    def max_length(self) -> int | None:
        """Tokens at which the folder says that texts are cut, for a task that pools."""
        return None if self.parts is None else self.parts.max_length

    def resolve(self, num_labels: int | None = None) -> "ResolvedModel":
        """The model with its class, and with its labels set in the configuration.

        Raises:
            WorkloadError: the model has no head for the task, or a module has another number of labels.
        """
        known = {one.name: getattr(self, one.name) for one in fields(self)}
        model_class = class_for_task(self.config, self.task) if self.own_class is None else self.own_class()
        resolved = ResolvedModel(model_class=model_class, **known)
        if num_labels is None and self.module is None:
            num_labels = find_task(self.task).num_labels()
        if num_labels is not None:
            _set_labels(resolved, num_labels)
        return resolved

    def checked_first(self, call: Callable[[], T]) -> T:
        """What a call gives that goes before `resolve`; where it fails, what is wrong with the model is said first."""
        try:
            return call()
        except VramfitError:
            self.resolve()
            raise


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResolvedModel(FoundModel):
    """A model that is known well enough to be built."""

    model_class: type
    """The class that `task` needs."""

    @property
    def saved_with(self) -> str | None:
        """The transformers version the configuration was written with."""
        return getattr(self.config, "transformers_version", None)

    @property
    def is_of_transformers(self) -> bool:
        """Whether the model is built from a configuration by a class of transformers: its code is known."""
        return self.module is None and self.model_class.__module__.startswith("transformers.")


def resolve(
    model: Any,
    *,
    task: str = DEFAULT,
    num_labels: int | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> ResolvedModel:
    """Find a model's configuration and the class its task needs.

    A folder with `config.json` comes before a catalogue name, as in transformers. A catalogue name or one
    of its hub ids never touches the network, unless a `revision` asks for the hub's own.

    Args:
        model: a catalogue name, a hub id, a folder with `config.json`, the path of one, a
            `PretrainedConfig` or an `nn.Module`. Objects are never changed.
        task: one of the workload's tasks; for a module, its class decides.
        num_labels: size of a classification head; None keeps the configuration's.
        trust_remote_code: run Python code that the model's repository brings.
        revision: branch, tag or commit on the hub.

    Raises:
        UnknownModel: nothing goes by that name; has the three nearest.
        CheckpointError: a configuration that is damaged or impossible; names file and field.
        WorkloadError: the model has no head for the task, or `num_labels` is not a count.

    >>> resolve("google-bert/bert-base-uncased", num_labels=3).model_class.__name__
    'BertForSequenceClassification'
    """
    if num_labels is not None and (type(num_labels) is not int or not 1 <= num_labels <= MAX_LABELS):
        more = f": the encoder without a head is task {encoder_alone().name}" if num_labels == 0 else ""
        raise WorkloadError([f"num_labels {num_labels!r} is not a whole number from 1 to {MAX_LABELS:,}{more}"])
    found = find_model(model, task=task, trust_remote_code=trust_remote_code, revision=revision)
    return found.resolve(num_labels)


def find_model(
    model: Any, *, task: str = DEFAULT, trust_remote_code: bool = False, revision: str | None = None
) -> FoundModel:
    """The first half of `resolve`: finds a model's configuration, and imports no model code of transformers.

    Raises:
        UnknownModel, CheckpointError, WorkloadError: as `resolve`.
    """
    if isinstance(model, str | os.PathLike):
        return _from_name(os.fsdecode(model), task, trust_remote_code, revision)
    return _from_object(model, task)


def _from_name(name: str, task: str, trust: bool, revision: str | None) -> FoundModel:
    file = _config_file(name)
    if file is not None and file.exists():
        return _from_file(file, name, task, trust)
    entry = find_entry(name)
    if entry is not None and revision is None:
        config = make_config(entry.config_data(), where=entry.name)
        return FoundModel(name=entry.name, origin="catalogue", config=config, task=task)
    if file is not None:
        raise CheckpointError(
            f"{name} has no config.json", file=str(file), hint="name the folder that `save_pretrained` wrote"
        )
    hub_id = entry.hub_id if entry is not None else name
    if not looks_like_hub_id(hub_id):
        raise unknown_model(name, because="no such folder, and not a hub id")
    return _from_hub(hub_id, task, trust, revision)


def _config_file(name: str) -> Path | None:
    """Where the configuration of a folder would lie; the file itself if one is named; None for no path."""
    if not name.strip():
        return None
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            (path / "config.json").exists()  # refuses now what cannot be entered
            path = transformer_folder(path)
            return plain_file(path, "config.json") or path / "config.json"
        return path if path.exists() else None
    except PermissionError:
        raise CheckpointError(f"{name} cannot be read: permission denied", file=name) from None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL inside, a home of nobody: no path
        return None


def _from_file(file: Path, name: str, task: str, trust: bool) -> FoundModel:
    data = marks_of(file.parent) | read_config_file(file)
    given = Path(name).expanduser()
    parts = parts_for(task, given if given.is_dir() else file.parent)
    where, own = str(file), str(file.parent)
    known = _by_own_code(task, own) if trust and has_own_code(data) else {"config": make_config(data, where=where)}
    return FoundModel(name=name, origin="folder", task=task, folder=file.parent, parts=parts, **known)


def _by_own_code(task: str, source: str, revision: str | None = None) -> dict[str, Any]:
    """Configuration and class that come with a model. **Runs its code.**"""
    config = load_remote_config(source, revision=revision)
    return {"config": config, "own_class": partial(remote_class, config, task, source, revision=revision)}


def parts_for(task: str, folder: Path) -> HeadParts | None:
    """What a folder says of the head, for a task that pools.

    Raises:
        CheckpointError: parts that are damaged, or that vramfit does not have.
    """
    return read_parts(folder) if find_task(task).pools_itself else None


def _from_hub(hub_id: str, task: str, trust: bool, revision: str | None) -> FoundModel:
    try:
        content = fetch_config(hub_id, revision=revision)
    except NotOnHubError as reason:
        raise unknown_model(hub_id, because=f"no such folder; {reason}") from None
    where = f"{hub_id}/config.json"
    data = parse_config(content, where=where)
    is_own = trust and has_own_code(data)
    known = _by_own_code(task, hub_id, revision) if is_own else {"config": make_config(data, where=where)}
    return FoundModel(name=hub_id, origin="hub", task=task, **known)


def _from_object(model: Any, task: str) -> FoundModel:
    from torch import nn
    from transformers.configuration_utils import PretrainedConfig

    if isinstance(model, PretrainedConfig):
        name = getattr(model, "name_or_path", "") or type(model).__name__
        check_sizes(model.to_dict(), type(model).attribute_map, where=type(model).__name__)
        return FoundModel(name=name, origin="config", config=copy.deepcopy(model), task=task)
    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        config = copy.deepcopy(config) if isinstance(config, PretrainedConfig) else None
        own_task = task if config is None else task_of_class(type(model), config, preferred=task)
        kind = type(model)
        return FoundModel(
            name=kind.__name__, origin="module", config=config, task=own_task, own_class=lambda: kind, module=model
        )
    raise WorkloadError([f"a model is a name, a folder, a configuration or an nn.Module, not {type(model).__name__}"])


def _set_labels(resolved: ResolvedModel, num_labels: int) -> None:
    """On our copy of the configuration; a module's head is already as large as it is."""
    if resolved.module is None:
        resolved.config.num_labels = num_labels
        return
    has = getattr(resolved.config, "num_labels", None)
    if has != num_labels:
        raise WorkloadError([f"num_labels {num_labels} is asked for, but the module given has {has}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedHead:
    """The head that a model was saved with."""

    task: str
    label_names: tuple[str, ...]
    """In the order of their numbers; none for tasks without classes."""
    problem: str | None = None
    """What it has learned, of a task whose head may learn several things."""


def saved_head(folder: Path) -> SavedHead | None:
    """The head that a folder's config.json names; None where it does not do so plainly: who opens the model will tell.

    Args:
        folder: of the model; need not be there.
    """
    try:
        config = marks_of(folder) | json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (name,) = config["architectures"]
        tasks = [t for t in all_tasks() if t.is_trained and t.has_head and name.endswith(t.class_ending)]
        saved = SimpleNamespace(**{"num_labels": len(config.get("id2label") or "ab")} | config)
        task = next((t for t in tasks if t.recognises(saved)), tasks[0])
        if not task.has_classes:
            return SavedHead(task=task.name, label_names=())
        names = {int(number): label for number, label in config["id2label"].items()}
        ordered = tuple(str(names[number]) for number in range(len(names)))
        return SavedHead(task=task.name, label_names=ordered, problem=problem_of(config) if task.has_problems else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError):
        return None
