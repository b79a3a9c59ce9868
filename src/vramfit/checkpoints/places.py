"""Names and JSON that come from a checkpoint, taken with suspicion; `models.links` has its files."""

import json
from pathlib import Path
from typing import Any

from vramfit.errors import CheckpointError

MAX_JSON_BYTES = 40 * 10**6
"""The largest tokenizers (256,000 words) take 35 MB."""
_MAX_CONTAINERS = 1_500_000
"""Lists and objects in one JSON file: each costs Python some 70 bytes for the 2 it takes in the file."""


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
