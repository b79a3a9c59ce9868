"""What the configuration of a saved model says of its head, read as plain JSON: before transformers is imported."""

import json
from dataclasses import dataclass
from pathlib import Path

from vramfit.tasks import all_tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedHead:
    """The head that a model was saved with."""

    task: str
    label_names: tuple[str, ...]
    """In the order of their numbers; none for tasks without classes."""


def saved_head(folder: Path) -> SavedHead | None:
    """The head that a folder's config.json names; None where it does not do so plainly: who opens the model will tell.

    Args:
        folder: of the model; need not be there.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (name,) = config["architectures"]
        task = next(t for t in all_tasks() if t.is_trained and t.has_head and name.endswith(t.class_ending))
        if not task.has_classes:
            return SavedHead(task=task.name, label_names=())
        names = {int(number): label for number, label in config["id2label"].items()}
        return SavedHead(task=task.name, label_names=tuple(str(names[number]) for number in range(len(names))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, RuntimeError):
        return None
