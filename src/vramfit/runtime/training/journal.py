"""The journal of a run: one JSON line a step and an evaluation, and TensorBoard's files where it is installed."""

import json
import math
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from vramfit.errors import VramfitError
from vramfit.records.codec import replace_file, to_json
from vramfit.records.run import COURSE_FILE
from vramfit.runtime.training.events import Evaluated, Event, Recorded, Stepped

NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Journal:
    """Writes what happened.

    Args:
        folder: of the run.
        from_step: what an earlier session wrote beyond this step is left out: it is done again.
    """

    def __init__(self, folder: Path, *, from_step: int) -> None:
        self._folder = folder
        self._path = folder / NAME
        _cut(self._path, from_step)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._board = _tensorboard(folder / TENSORBOARD, from_step)

    def write(self, event: Event) -> None:
        """Note a step, its course or an evaluation; other events are no figures."""
        if isinstance(event, Stepped):
            names = ("epoch", "loss", "lr", "tokens_per_s", "num_skipped", "num_recoveries", "num_nonfinite")
            more = ("loss_scale", "micro_batch", "reserved_bytes")
            self._line("train", event.step, {name: getattr(event, name) for name in (*names, *more)})
        elif isinstance(event, Evaluated):
            self._line("eval", event.result.step, {"epoch": event.result.epoch, **event.result.metrics})
        elif isinstance(event, Recorded):
            with suppress(VramfitError):  # a full disk: the next checkpoint says so
                replace_file(self._folder / COURSE_FILE, (to_json(event.course) + "\n").encode())

    def _line(self, kind: str, step: int, values: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with suppress(OSError):  # a full disk: the next checkpoint says so, with what to do
            self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    with suppress(OSError):
                        self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Finish the files."""
        with suppress(OSError):
            self._file.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()


def _cut(path: Path, from_step: int) -> None:
    """Keep the lines of steps up to one; a line that a kill left half is not kept."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= from_step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    replace_file(path, "".join(f"{line}\n" for line in kept).encode())


def _tensorboard(folder: Path, from_step: int) -> Any:
    """A writer of TensorBoard's; None where it is not installed, or does not work: a run can do without."""
    try:
        module = import_module("torch.utils.tensorboard")
        return module.SummaryWriter(str(folder), purge_step=from_step + 1)
    except Exception:  # it fails in many ways beside its protobuf
        return None
