"""Paths that come from a checkpoint, taken with suspicion: no way out of the folder, no pipes, no devices."""

import json
from pathlib import Path
from typing import Any

from vramfit.errors import CheckpointError

MAX_JSON_BYTES = 40 * 10**6
"""The largest tokenizers (256,000 words) take 35 MB."""
_MAX_CONTAINERS = 1_500_000
"""Lists and objects in one JSON file: each costs Python some 70 bytes for the 2 it takes in the file."""


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
            raise CheckpointError(f"{where} is {kind}, not a file", file=where, hint="put the weight file in its place")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{where} cannot be read: {_reason(error)}", file=where) from None
    return path


def _stays(target: Path, folder: Path) -> bool:
    if target.is_relative_to(folder.resolve()):
        return True
    # hub cache: models--owner--name/snapshots/<revision>/model.safetensors → ../../blobs/<sha>
    absolute = folder.absolute()
    for snapshots in absolute.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            return target.is_relative_to((repository / "blobs").resolve())
    return False


def is_plain_name(name: str) -> bool:
    """Whether a text names a file right in the folder: no way up, no absolute path, no control characters."""
    return (
        0 < len(name) <= 255
        and name not in (".", "..")
        and not any(c in "/\\:" or ord(c) < 32 for c in name)
        and name.isprintable()
    )


def read_json_object(path: Path, *, what: str) -> dict[str, Any]:
    """The JSON object in a file; memory stays bounded by the file's size.

    Args:
        path: a regular file.
        what: what the file is called in an error, such as "index".

    Raises:
        CheckpointError: not readable, too large, not JSON, or no object.
    """
    where = str(path)
    hint = f"download the {what} again"
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{where} is {num_bytes:,} bytes, too large for a {what} (limit {MAX_JSON_BYTES:,})", file=where
            )
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {_reason(error)}", file=where) from None
    if content.count(b"{") + content.count(b"[") > _MAX_CONTAINERS:
        raise CheckpointError(f"{where} is no {what}: it holds more than {_MAX_CONTAINERS:,} lists", file=where)
    try:
        data = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:200]
        raise CheckpointError(f"{where} is not JSON: {reason}", file=where, hint=hint) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} holds no JSON object", file=where, hint=hint)
    return data


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
