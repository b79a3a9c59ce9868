"""`DataSource`: which file is read, for which task, and which of its columns."""

from dataclasses import dataclass
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.tasks import DEFAULT, Task, find_task, task_names, trained_tasks

STANDARD_INPUT = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """A data set as the user names it.

    >>> DataSource(path="train.csv").name
    'train.csv'

    Raises:
        WorkloadError: a task without data of its own, too many columns for it, or no rows asked for.
    """

    path: str
    """`.csv`, `.tsv`, `.jsonl`, `.json` (SQuAD's form too), `.txt`, `.conll`, a folder that `datasets` saved, or `-`
    for standard input: JSON lines or plain text."""
    task: str = DEFAULT
    """One that is trained."""
    text_columns: tuple[str, ...] = ()
    """One column, or two for pairs of texts; guessed from the names where empty. In a file without a header, positions
    from 1."""
    label_column: str | None = None
    """Guessed from the names where None."""
    needs_labels: bool = True
    """False for prediction: labels are not looked for."""
    skip_bad_rows: bool = False
    """Keep bad rows out and report them, where otherwise they are an error."""
    max_rows: int | None = None
    """Read no more rows than this."""
    of_model: bool = False
    """Whether the task is a trained model's: errors then name no other one."""

    def __post_init__(self) -> None:
        problems = []
        if self.task not in trained_tasks():
            kind = "has no data set to read" if self.task in task_names() else "is no task"
            problems.append(f"task {self.task!r} {kind}; those that do: {', '.join(trained_tasks())}")
        elif self.text_columns:
            least, most = self.kind.num_texts
            if not least <= len(self.text_columns) <= most:
                wanted = f"{least}" if least == most else f"{least} or {most}"
                problems.append(f"{self.task} reads {wanted} columns of text, not {len(self.text_columns)}")
        if self.max_rows is not None and self.max_rows < 1:
            problems.append(f"max_rows {self.max_rows} is not a whole number from 1")
        if problems:
            raise WorkloadError(problems)

    @property
    def kind(self) -> Task:
        """Its task."""
        return find_task(self.task)

    @property
    def name(self) -> str:
        """For messages."""
        return "standard input" if self.path == STANDARD_INPUT else self.path


def without_labels(path: str, task: str, text_columns: tuple[str, ...] = (), max_rows: int | None = None) -> DataSource:
    """A data set of which only the lengths are wanted; of a task that none is read for, texts or pairs of them."""
    settings: dict[str, Any] = {"needs_labels": False, "skip_bad_rows": True, "max_rows": max_rows}
    read_for = task if task in trained_tasks() else DEFAULT
    return DataSource(path=path, task=read_for, text_columns=text_columns, **settings)
