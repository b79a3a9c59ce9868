"""Text and JSON that come from a checkpoint, taken with suspicion, and the error for one fault of one file."""

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vramfit.errors import CheckpointError

DOWNLOAD_AGAIN = "download the file again; compare its size and sha256 with the ones on its page"
SAVE_AGAIN = "save the model again with save_pretrained"
MAX_JSON_BYTES = 40 * 10**6
"""The largest tokenizers (256,000 words) take 35 MB."""
_MAX_CONTAINERS = 1_500_000
"""Lists and objects in one JSON file: each costs Python some 70 bytes for the 2 it takes in the file."""
NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "cuda error: out of memory")
"""How torch words a host allocation that failed (c10/core/impl/alloc_cpu.cpp, aten/src/ATen/MapAllocator.cpp), and
CUDA pinned memory that it does not get."""


def bad_file(path: Path, what: str, hint: str, *, tensor: str = "") -> CheckpointError:
    """The error for one fault: `what` goes on after the path, as in "x.safetensors is empty"."""
    return CheckpointError(f"{path} {what}", file=str(path), tensor=tensor, hint=hint)


def shown(value: object) -> str:
    """A value from a file, printable and at most 100 characters long."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=repr)
    except RecursionError:
        text = f"a {type(value).__name__} nested too deeply"
    text = "".join(c if c.isprintable() else "?" for c in text[:100])
    return text if len(text) < 100 else f"{text[:97]}..."


def sizes(shape: Sequence[int]) -> str:
    """A shape to read.

    >>> sizes((30522, 768)), sizes(())
    ('30522×768', 'scalar')
    """
    return "×".join(map(str, shape)) if shape else "scalar"


def some(names: Sequence[str], count: int = 3) -> str:
    """The first few of many names, and how many more there are.

    >>> some(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    listed = ", ".join(shown(name) for name in names[:count])
    return listed if len(names) <= count else f"{listed} and {len(names) - count} more"


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
        raise CheckpointError(f"{where} cannot be read: {reason(error)}", file=where) from None
    if content.count(b"{") + content.count(b"[") > _MAX_CONTAINERS:
        raise CheckpointError(f"{where} is no {what}: it holds more than {_MAX_CONTAINERS:,} lists", file=where)
    try:
        data = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise CheckpointError(f"{where} is not JSON: {why}", file=where, hint=hint) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} holds no JSON object", file=where, hint=hint)
    return data


def reason(error: OSError) -> str:
    """What the system says of a file that cannot be read."""
    return (error.strerror or str(error) or type(error).__name__).lower()


def one_line(error: Exception) -> str:
    """The message of an error in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the host had no memory to give."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return any(words in str(error).lower() for words in NO_MEMORY)
    return isinstance(error, MemoryError)
