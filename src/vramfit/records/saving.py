"""Files that are never half written: beside, then renamed."""

import errno
import os
import secrets
import shutil
from pathlib import Path

from vramfit.errors import VramfitError
from vramfit.units import format_bytes

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a full disk or a kill leaves the old one; what is no file, such as a pipe, is written to.

    Raises:
        VramfitError: the place cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
            return
        final = Path(os.path.realpath(path))  # where a link leads
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
            os.replace(temporary, final)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error, num_bytes=len(content)) from None


def cannot_write(path: Path, error: OSError, *, num_bytes: int | None = None) -> VramfitError:
    """The error for a file that could not be written, with what it needs where the disk is full."""
    what = f"cannot write {path}: {error.strerror or error}"
    if error.errno not in FULL_DISK:
        return VramfitError(what, hint="choose a folder you can write to")
    needed = "" if num_bytes is None else f" ({format_bytes(num_bytes)} to write{_free(path)})"
    return VramfitError(f"{what}{needed}", hint="make room on the disk, or write to another one")


def _free(path: Path) -> str:
    """How much is free where a file would be; a quota may leave less."""
    try:
        return f", {format_bytes(shutil.disk_usage(path.parent).free)} free" if not path.is_char_device() else ""
    except OSError:
        return ""
