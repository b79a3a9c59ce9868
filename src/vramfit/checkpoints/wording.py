"""How this room words what it finds: values cut to what can be shown, one error for one fault of one file."""

import json
from collections.abc import Sequence
from pathlib import Path

from vramfit.errors import CheckpointError

DOWNLOAD_AGAIN = "download the file again; compare its size and sha256 with the ones on its page"
SAVE_AGAIN = "save the model again with save_pretrained"


def bad_file(path: Path, what: str, hint: str, *, tensor: str = "") -> CheckpointError:
    """The error for one fault: `what` goes on after the path, as in "x.safetensors is empty"."""
    return CheckpointError(f"{path} {what}", file=str(path), tensor=tensor, hint=hint)


def shown(value: object) -> str:
    """A value from a file, printable and at most 100 characters long."""
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
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
