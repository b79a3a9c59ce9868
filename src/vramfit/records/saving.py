"""Files that are never half written: beside, then renamed."""

import os
import tempfile
from pathlib import Path

from vramfit.errors import VramfitError


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a full disk or a kill leaves the old one.

    Raises:
        VramfitError: the place cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise VramfitError(f"cannot write {path}: {error.strerror}", hint="choose a folder you can write to") from None
