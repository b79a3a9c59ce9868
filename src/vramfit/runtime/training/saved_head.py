"""What the configuration of a saved model says of its head, read as plain JSON: before transformers is imported."""

import json
from dataclasses import dataclass
from pathlib import Path

from vramfit.workload import Task

HEADS: dict[str, Task] = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "masked-lm",
}
"""How the class of each task is called, after the name of its family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedHead:
    """The head that a model was saved with."""

    task: Task
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
        task = next(task for ending, task in HEADS.items() if name.endswith(ending))
        if task in ("question-answering", "masked-lm"):
            return SavedHead(task=task, label_names=())
        names = {int(number): label for number, label in config["id2label"].items()}
        return SavedHead(task=task, label_names=tuple(str(names[number]) for number in range(len(names))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, RuntimeError):
        return None
