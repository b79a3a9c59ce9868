"""How much of the house a reader passes through to follow one call: files entered, and frames to the first tensor.

A file is entered where a function of it is called; module and class bodies and comprehensions do not count. Frames are
those of vramfit's own functions that are open, `estimate` included, when a trace writes down the first tensor. Each job
runs in a process of its own, imports included. Run from the repository: python scripts/files_entered.py [--list JOB]
"""

import argparse
import contextlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OWN = str(ROOT / "src" / "vramfit") + os.sep
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
FIRST_TENSOR = (OWN + os.path.join("trace", "ledger.py"), "request")


def is_entered(code: CodeType) -> bool:
    """Whether a call of this code enters a file of vramfit's."""
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # bodies of modules and classes are not
    return is_function and code.co_filename.startswith(OWN) and code.co_name not in COMPREHENSIONS


@contextlib.contextmanager
def watched(entered: set[str], frames: list[str]) -> Iterator[None]:
    """Note the files that are entered meanwhile, in any thread, and the frames at the first traced tensor."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not is_entered(frame.f_code):
            return
        entered.add(frame.f_code.co_filename.removeprefix(OWN))
        if not frames and (frame.f_code.co_filename, frame.f_code.co_name) == FIRST_TENSOR:
            frames.extend(reversed(list(_own_frames(frame))))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _own_frames(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if is_entered(frame.f_code):
            yield f"{frame.f_code.co_filename.removeprefix(OWN)}:{frame.f_code.co_name}"
        frame = frame.f_back


def estimate(_: Path) -> Callable[[], Any]:
    """An estimate of bert-base on a GPU whose times are known."""
    import vramfit

    return lambda: vramfit.estimate("bert-base-uncased", gpu="t4")


def train(folder: Path) -> Callable[[], Any]:
    """A small fine-tuning run on the CPU."""
    from tests.unit.runtime.training.small_runs import run

    return lambda: run(folder, epochs=1)


def fit_trainer(folder: Path) -> Callable[[], Any]:
    """A small Trainer fitted on the CPU; its training is not counted."""
    from tests.unit.integrations.small_trainers import make_trainer

    from vramfit.integrations.trainer import fit_trainer

    trainer = make_trainer(folder, per_device_train_batch_size=8)
    return lambda: fit_trainer(trainer, memory="1GiB")


JOBS = {job.__name__: job for job in (estimate, train, fit_trainer)}


def entered_by(name: str) -> tuple[list[str], list[str]]:
    """The files that a job enters, and its frames at the first traced tensor; for a fresh process."""
    sys.path.insert(0, str(ROOT))
    entered, frames = set[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.environ["VRAMFIT_CACHE"] = str(Path(folder) / "cache")  # nothing was answered before
        job = JOBS[name](Path(folder))
        with watched(entered, frames):
            job()
    return sorted(entered), frames


def main() -> None:
    """Print the figures, or what one of them counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=JOBS, help="print the files and frames of one job")
    chosen = parser.parse_args().list
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in JOBS if chosen is None else (chosen,):
            entered, frames = pool.apply(entered_by, (name,))
            print(f"{name}: {len(entered)} files entered", *(entered if chosen else ()), sep="\n  ")
            if name == estimate.__name__ or chosen:
                print(f"{name}: {len(frames)} own frames before the first traced tensor", *frames, sep="\n  ")


if __name__ == "__main__":
    main()
