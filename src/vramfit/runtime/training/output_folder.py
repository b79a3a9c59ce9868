"""The folder that a run writes into: made, held by one process at a time, and removed where nothing came of the run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from vramfit.errors import CheckpointError, VramfitError
from vramfit.runtime.training.checkpoints import CheckpointStore
from vramfit.runtime.training.journal import NAME as JOURNAL

LOCK = ".lock"
PLAN = "plan.json"
CHECKPOINTS = "checkpoints"
MAX_ATTEMPTS = 100
"""At a folder that others keep removing."""
WAIT_S = 0.1
"""For a lock file that another process is just removing."""


@contextmanager
def held(output: Path) -> Iterator[None]:
    """Inside, no other run writes into the folder; it is made where it is missing.

    The system lets go of the lock however the process ends: a lock file that was left stands in nobody's way. Where
    locks cannot be had, the run goes on without. A folder that was made here and ends with nothing but a plan in it is
    removed again.

    Raises:
        VramfitError: another process holds it, or it cannot be made.
    """
    made = [folder for folder in (output, *output.parents) if not os.path.exists(folder)]
    lock = _lock(output)
    try:
        yield
    finally:
        _leave(output, lock, made)


def _lock(output: Path) -> FileLock | None:
    """The lock of the folder, held; None where there are no locks."""
    lock = FileLock(output / LOCK)
    for _ in range(MAX_ATTEMPTS):
        _make(output)
        try:
            lock.acquire(timeout=WAIT_S, poll_interval=WAIT_S / 10)
        except Timeout:
            raise VramfitError(
                f"another process trains into {output}", hint="wait until it has ended, or choose another --output"
            ) from None
        except FileNotFoundError:  # a run that failed has just removed its folder
            continue
        except PermissionError:
            return None
        except OSError:  # a file system without locks
            (output / LOCK).unlink(missing_ok=True)
            return None
        return lock
    return None


def _leave(output: Path, lock: FileLock | None, made: list[Path]) -> None:
    """Remove the lock file, and folders made here that are empty but for a plan, while the lock is still held."""
    with suppress(OSError):
        if made and {path.name for path in output.iterdir()} <= {LOCK, PLAN}:
            (output / PLAN).unlink(missing_ok=True)
        if lock is not None:
            (output / LOCK).unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()  # refused where something is in it
    if lock is not None:
        lock.release()


def _make(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise VramfitError(f"{output} is a file, and the output is a folder", hint="choose another --output") from None
    except OSError as error:
        raise VramfitError(f"cannot make {output}: {error.strerror}", hint="choose a folder you can write to") from None


def not_a_model(path: Path) -> CheckpointError | None:
    """What to say of a folder without a model that belongs to a run: its output, or one of its checkpoints."""
    output = path.parent.parent if path.parent.name == CHECKPOINTS else path
    steps = CheckpointStore(output / CHECKPOINTS).steps()
    if (path / "config.json").exists() or not (steps or (output / JOURNAL).exists()):
        return None
    if (output / "config.json").exists():
        return CheckpointError(
            f"{path} is a checkpoint, which only a run can go on from",
            file=str(path),
            hint=f"name the folder that the model is in: {output}",
        )
    what = "holds" if path == output else f"is a checkpoint of {output},"
    since = f"its last checkpoint is of step {steps[-1]:,}" if steps else "it came to no checkpoint"
    return CheckpointError(
        f"{path} {what} an unfinished run, which saves its model at the end; {since}",
        file=str(path),
        hint=f"finish it: vramfit train … --output {output} --resume, with what else it was started with",
    )
