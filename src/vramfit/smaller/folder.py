"""The folder that a smaller model is written to: there when it is whole, and never over another one."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vramfit.errors import VramfitError
from vramfit.models.hub import exported_file
from vramfit.records.codec import FULL_DISK, cannot_write

WEIGHTS = ("*.safetensors", "*.onnx", "*.onnx.data", "*.onnx_data", "pytorch_model*.bin")
"""Files that hold weights."""


def check_output(output: Path) -> None:
    """Refuse a place that a model cannot be written to.

    Raises:
        VramfitError: something is there, or there is no folder for it.
    """
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise VramfitError(f"{output} is there already", hint="choose another --output, or delete it first")
    if not output.absolute().parent.is_dir():
        raise VramfitError(
            f"cannot write {output}: there is no folder {output.parent}", hint="choose a place you can write to"
        )


@contextmanager
def fresh_folder(output: Path) -> Iterator[Path]:
    """A folder beside the output that takes its place at the end, and disappears where anything fails.

    Raises:
        VramfitError: something is there already, or the disk is full or cannot be written.
    """
    output = output.absolute()
    check_output(output)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.new")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666  # safetensors lets only the owner read what it writes
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(mode)
        if output.is_dir():
            output.rmdir()  # it was empty
        os.replace(temporary, output)
    except OSError as error:
        raise cannot_write(output, error) from None
    except Exception as error:  # the writer of safetensors has an error of its own for a full disk
        if "os error 28" in str(error):
            raise cannot_write(output, OSError(FULL_DISK[0], "No space left on device")) from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def weights_bytes(model: str) -> int:
    """Bytes of a folder's files that hold the model's weights; 0 for a hub id. Checkpoints of its run do not count."""
    folder = Path(model).expanduser()
    places = ("", "[0-9]_*/")  # of sentence-transformers
    files = {file for place in places for pattern in WEIGHTS for file in folder.glob(place + pattern)}
    if (exported := exported_file(model)) is not None:
        files = {*exported.parent.glob(f"{exported.name}*")}  # the file that runs, and what lies beside it
    return sum(file.stat().st_size for file in files)
