"""What is wrong with a command and can be seen before torch is imported: a name, a file, its columns."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.errors import DataError, VramfitError, WorkloadError

if TYPE_CHECKING:
    from vramfit.runtime.data.examples import Examples
    from vramfit.runtime.data.source import DataSource

LOOKED_AT_BYTES = 32 * 2**20
"""Files up to this are read whole before torch is imported, in less time than that takes."""


def look_at_gpu(name: str | None) -> None:
    """Refuse a GPU that the catalogue does not have.

    Raises:
        UnknownGPU: with the nearest names.
    """
    if name is not None:
        from vramfit.devices.catalogue import find_gpu

        find_gpu(name)


def look_at_driver(hint: str) -> None:
    """Refuse a machine on which no torch could find a GPU.

    Raises:
        VramfitError: CUDA's driver is not there.
    """
    from vramfit.devices.probe import has_driver

    if not has_driver():
        raise VramfitError("no CUDA device: there is no NVIDIA driver here", hint=hint)


def look_at_model(name: str, seqs: Sequence[int] = ()) -> None:
    """Refuse what names no model, and lengths that a published one does not have.

    Raises:
        UnknownModel: neither a folder nor a catalogue name nor a possible hub id.
        WorkloadError: a length beyond the model's positions.
    """
    from vramfit.models.catalogue import find_entry, unknown_model
    from vramfit.models.hub import looks_like_hub_id

    if is_path(name):
        return
    entry = find_entry(name)
    if entry is None and not looks_like_hub_id(name):
        raise unknown_model(name, because="no such folder, and not a hub id")
    most = entry.max_positions if entry is not None else None
    beyond = [seq for seq in seqs if most is not None and seq > most]
    if entry is not None and beyond:
        problem = f"seq {max(beyond)} is beyond the {most} positions of {entry.name}: take {most} or fewer"
        raise WorkloadError([problem])


def look_at_file(path: str) -> None:
    """Refuse data that is not there.

    Raises:
        DataError: no such file.
    """
    if path != "-" and not is_path(path):
        raise DataError(f"cannot read {path}: No such file or directory", file=path, hint="name a file that is there")


def look_at_columns(source: "DataSource") -> None:
    """Refuse a file that cannot be read, and one without the columns; its rows are looked at later.

    Raises:
        DataError: no such file, no text, an ending that says nothing, or a column that is not there.
    """
    look_at_file(source.path)
    if not Path(source.path).is_file():  # a pipe can be read once
        return
    from vramfit.runtime.data.examples import find_columns
    from vramfit.runtime.data.rows import open_table

    with open_table(source) as table:
        first = next(table.rows, None)
        if first is not None and not first.problem:
            find_columns(source, table, first.fields)


def look_at_data(source: "DataSource", label_names: Sequence[str] | None = None) -> "Examples | None":
    """Refuse what a file alone decides, its rows and labels too; only its columns where it is too large to read twice.

    Returns what was read; None where that was not all.

    Raises:
        DataError: what reading the data for good would say.
    """
    path = Path(source.path)
    if not is_path(source.path) or not path.is_file() or path.stat().st_size > LOOKED_AT_BYTES:
        look_at_columns(source)
        return None
    from vramfit.runtime.data.examples import read_examples

    return read_examples(source, label_names)


def look_at_data_for(model: str, source: Callable[[str], "DataSource"], task: str | None) -> None:
    """Refuse data for a model whose folder says what task it does, and which labels it has.

    Args:
        source: what is to be read for a task.
        task: as asked for; where it is not the model's, the model will be refused.

    Raises:
        DataError: as `look_at_data`.
    """
    from vramfit.models.resolve import saved_head

    head = saved_head(Path(model).expanduser())
    if head is not None and task in (None, head.task):
        look_at_data(replace(source(head.task), of_model=True, problem=head.problem), head.label_names or None)


def is_path(text: str) -> bool:
    """Whether something is there under this name."""
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long for a name, a NUL inside, an unknown user's home
        return False
