"""Checkpoints that are whole or not there: written beside, seen on the disk, then renamed; checked before use.

A checkpoint is a folder `step-N` with tensors (safetensors), `state.json`, and `manifest.json`, which has the size
and the hash of every other file. A folder whose name begins with a dot is being made or removed, and means nothing.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from vramfit.errors import CheckpointError, VramfitError
from vramfit.records.codec import FULL_DISK
from vramfit.runtime.training.progress import NAME as JOURNAL
from vramfit.runtime.training.saving import digest, sync_folder, write_tensors, write_text

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


MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole."""

    folder: Path
    step: int

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one of its files, on the host."""
        from safetensors.torch import load_file

        found: dict[str, torch.Tensor] = load_file(self.folder / f"{name}.safetensors")
        return found

    def state(self) -> dict[str, Any]:
        """What is no tensor."""
        found: dict[str, Any] = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        return found


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they lie; made when the first is written.
        keep: how many of the newest stay, beside the best one.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep
        self.damaged: list[str] = []
        """Folders that `newest` found not to be whole."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        *,
        best: int | None,
    ) -> Checkpoint:
        """Write a checkpoint, then remove old ones.

        Args:
            tensors: file name → tensors by name.
            best: the step of the best one so far, which stays.

        Raises:
            VramfitError: the disk is full or cannot be written; older checkpoints are as before.
        """
        final = self.folder / _name(step)
        temporary = self.folder / f".{_name(step)}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove(temporary)
            temporary.mkdir()
            self._fill(temporary, step, tensors, state)
            self._put_in_place(temporary, final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._not_written(step, error) from None
        self.damaged = [name for name in self.damaged if name != final.name]  # it is whole now
        self._prune(step, best)
        return Checkpoint(final, step)

    def _fill(
        self, folder: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
    ) -> None:
        for name, content in tensors.items():
            write_tensors(folder / f"{name}.safetensors", content)
        write_text(folder / STATE, json.dumps(state))
        files = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in sorted(folder.iterdir())}
        write_text(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2))
        sync_folder(folder)

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        if final.exists():  # left by an earlier session that came as far; this one has come there again
            self._take_away(final)
        os.rename(temporary, final)
        sync_folder(self.folder)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where there is none. Damaged ones are named in `damaged`."""
        self.damaged = []
        for step in sorted(self.steps(), reverse=True):
            found = self.at(step)
            if found is not None:
                return found
            self.damaged.append(_name(step))
        return None

    def at(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step; None where there is none, or it is not whole."""
        folder = self.folder / _name(step)
        return Checkpoint(folder, step) if is_whole(folder) else None

    def steps(self) -> list[int]:
        """The steps of all checkpoints, whole or not."""
        if not self.folder.is_dir():
            return []
        names = [p.name.removeprefix("step-") for p in self.folder.iterdir() if p.name.startswith("step-")]
        return sorted(int(name) for name in names if name.isdecimal())

    def clean(self) -> None:
        """Remove what an earlier session was still making or removing when it ended."""
        if self.folder.is_dir():
            for path in self.folder.glob(".step-*"):
                _remove(path)

    def _prune(self, newest: int, best: int | None) -> None:
        """Remove old checkpoints. Damaged ones do not count, and later ones are of a course that was given up."""
        steps = [step for step in self.steps() if step <= newest and _name(step) not in self.damaged]
        for step in steps[: -self._keep]:
            if step != best:
                self._take_away(self.folder / _name(step))

    def _take_away(self, folder: Path) -> None:
        """Remove a checkpoint; it has another name before the first of its files goes."""
        hidden = folder.with_name(f".{folder.name}.old")
        _remove(hidden)
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _not_written(self, step: int, error: OSError) -> VramfitError:
        last = self.newest()
        kept = f"the checkpoint of step {last.step} is whole" if last is not None else "there was none before it"
        what = "the disk is full" if error.errno in FULL_DISK else f"it cannot be written ({error.strerror or error})"
        return VramfitError(
            f"{what}: the checkpoint of step {step} was not saved in {self.folder}; {kept}",
            hint="make room and go on from there: the same command with --resume (resume=True)",
        )


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint is there as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        return bool(files) and all(
            (folder / name).stat().st_size == entry["bytes"] and digest(folder / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
