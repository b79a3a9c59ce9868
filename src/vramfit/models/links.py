"""Files of a model's folder, taken with suspicion: no way out of the folder, no pipes, no devices."""

from pathlib import Path

from vramfit.errors import CheckpointError


def plain_file(folder: Path, name: str) -> Path | None:
    """The regular file of that name in a folder; None when there is none.

    A link may lead to another place inside the folder, or, in the cache of the Hugging Face hub, to the blobs
    of the same repository.

    Raises:
        CheckpointError: a link that leaves or leads nowhere, or something that is no regular file.
    """
    path = folder / name
    where = str(path)
    try:
        if not path.exists():
            if path.is_symlink():
                raise CheckpointError(
                    f"{where} is a link to {path.readlink()}, which does not exist",
                    file=where,
                    hint="download the file again; the cache it came from may have been cleaned",
                )
            return None
        if path.is_symlink() and not _stays(path.resolve(), folder):
            raise CheckpointError(
                f"{where} is a link that leaves the folder, to {path.resolve()}",
                file=where,
                hint="copy the file into the folder if you trust it",
            )
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise CheckpointError(f"{where} is {kind}, not a file", file=where, hint="put the file in its place")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{where} cannot be read: {_reason(error)}", file=where) from None
    return path


def _stays(target: Path, folder: Path) -> bool:
    if target.is_relative_to(folder.resolve()):
        return True
    # hub cache: models--owner--name/snapshots/<revision>/model.safetensors → ../../blobs/<sha>
    for place in (folder.absolute(), folder.resolve()):  # the folder may be a link to a snapshot
        for snapshots in place.parents:
            repository = snapshots.parent
            is_cache = snapshots.name == "snapshots" and repository.name.startswith("models--")
            if is_cache and target.is_relative_to((repository / "blobs").resolve()):
                return True
    return False


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
