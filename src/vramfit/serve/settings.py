"""`ServeSettings`: what a server is asked for, checked before anything heavy is imported; and its limits."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.settings import SETTINGS, having
from vramfit.settings.fused import Fused
from vramfit.settings.values import Choice, Count, Number, Value
from vramfit.tasks import all_tasks
from vramfit.units import parse_bytes

POOLINGS = {"mean": "mean", "first": "cls"}
"""As requests for vectors have always named them → the names of the task's own setting."""
MAX_WORKERS = 64
MAX_BODY_BYTES = 8 * 2**20
"""Of one request; SageMaker passes 6 MB on to a real-time endpoint."""
MAX_REQUEST_TOKENS = 65_536
"""Of all texts of one request, as cut; a long context counts every window."""
MAX_REQUEST_CHARACTERS = 16 * MAX_REQUEST_TOKENS
"""Of its texts, each as far as it is tokenized."""
MAX_WAITING = 1024
"""Requests that wait for a worker; the next one is told to come again."""
MAX_WAITING_BYTES = 256 * 2**20
"""What their bodies may take together."""
MAX_COMING_BYTES = 256 * 2**20
"""The same of requests that have not come whole yet."""
TIMEOUT_S = 55.0
"""Until an answer; SageMaker gives up after 60."""
BODY_S = 20.0
"""Until a request has been sent whole."""
STOP_S = 20.0
"""After SIGTERM, what still waits is told to come again; SageMaker kills after 30."""
CONTEXT_BYTES = 700 * 2**20
"""What CUDA takes for each further worker on a GPU, where the budget is what is free: 701 MiB on an H200 after
attention."""
MAX_SAMPLES_A_BATCH = 256
"""Of full length: beyond, nothing is gained."""
CPU_TOKENS = 1_024
"""Of a batch on a CPU: more are no faster, and everybody waits for them."""
OFFLOADED_BATCHES = (8, 4, 2, 1)
"""Samples of full length that are tried where layers wait in host memory: the fewer, the more layers stay."""
BYTES_A_TOKEN = 4
"""Of a request's body, roughly: how it is guessed what a request weighs before it is read."""
CHECKED: dict[str, Value] = {
    "task": Choice(names=tuple(task.name for task in all_tasks() if task.is_served), optional=True),
    **{name: SETTINGS[name].value for name in (*having(of_weights=True), "memory")},
    "offload": Choice(names=("weights",), optional=True),
    "pooling": Choice(names=tuple(POOLINGS), optional=True),
    **dict.fromkeys(("seq", "top_k", "max_tokens", "fail_every"), Count(optional=True)),
    **dict.fromkeys(("num_workers", "max_waiting"), Count()),
    "timeout_s": Number(high=86_401, words="a number of seconds up to a day"),
}
"""What each field may be."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes, as predicted, in the bytes that PyTorch reserves."""

    least_bytes: int
    """Weights and one text of full length, with the margin for what predictions may be off."""
    token_bytes: float
    """For each further token of a batch."""

    def times(self, num_workers: int) -> "Need":
        """What several workers on one device take."""
        return Need(self.least_bytes * num_workers, self.token_bytes * num_workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """One server, described.

    Raises:
        WorkloadError: every problem at once.
    """

    model: str
    """A folder, a hub id or a catalogue name."""
    task: str | None = None
    """None takes the model's own head; a folder of sentence-transformers gives vectors as it says (embedding), and an
    encoder without a head those of its tokens, pooled (features)."""
    precision: str = "fp32"
    quantize: str | None = None
    offload: str | None = None
    """`weights`: layers that do not fit wait in host memory."""
    fused: bool = False
    """Each layer as one function, in packed batches on a GPU."""
    memory: str | int | None = None
    """What PyTorch may reserve on a device, all workers together; None takes what is free."""
    gpu: str | None = None
    """Choose batches for this GPU; None takes the one that is there."""
    devices: tuple[str, ...] = ()
    """cuda, cuda:N, cpu or emulated; workers are dealt round several. Empty takes the GPU where there is one."""
    seq: int | None = None
    """Truncate sequences to N tokens."""
    pooling: str | None = None
    """What is given of a text: the mean of its tokens' vectors, or the first one; None takes what the folder says,
    else the mean."""
    top_k: int | None = None
    """Scores that are given where a request does not say; None gives the best alone."""
    max_tokens: int | None = None
    """Of a batch, padding included; None takes what the prediction allows."""
    num_workers: int = 1
    max_waiting: int = MAX_WAITING
    """Requests that may wait."""
    timeout_s: float = TIMEOUT_S
    """Until an answer."""
    fail_every: int | None = None
    """A rehearsal: every so many batches, memory runs out."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problems = [p for name, value in CHECKED.items() for p in value.problems(name, getattr(self, name))]
        wrong = [d for d in self.devices if d not in ("cpu", "emulated") and d.split(":")[0] != "cuda"]
        problems += [f"device {d!r} is not one of cuda, cuda:N, cpu, emulated" for d in wrong]
        if "emulated" in self.devices and self.memory is None:
            problems.append("device emulated needs memory: how large the GPU is to be, such as 600MiB")
        if not problems and self.num_workers > MAX_WORKERS:
            problems.append(f"num_workers {self.num_workers} is more than {MAX_WORKERS}")
        if not self.model:
            problems.append("model is needed")
        if problems:
            raise WorkloadError(problems)

    def device_of(self, worker: int) -> str | None:
        """Where a worker runs, counted from 0."""
        return self.devices[worker % len(self.devices)] if self.devices else None

    @property
    def pools_by(self) -> str | None:
        """How vectors are pooled, as workloads name it; None where nothing was said."""
        return None if self.pooling is None else POOLINGS[self.pooling]

    @property
    def of_weights(self) -> dict[str, Any]:
        """How the weights lie, as keywords of a workload."""
        return {name: getattr(self, name) for name in having(of_weights=True)}

    @property
    def of_layers(self) -> dict[str, Any]:
        """How layers run, as keywords of a workload."""
        return {Fused.keyword: getattr(self, Fused.keyword)}

    def sharers(self, worker: int) -> int:
        """Workers on the device of a worker, itself included."""
        here = self.device_of(worker)
        return sum(self.device_of(n) == here for n in range(self.num_workers))

    @property
    def most_sharers(self) -> int:
        """Workers on the device that has most of them."""
        return max(map(self.sharers, range(self.num_workers)))

    def share_bytes(self, worker: int) -> int | None:
        """A worker's part of the memory of its device; None where nothing was said."""
        return None if self.memory is None else parse_bytes(self.memory, name="memory") // self.sharers(worker)


def names_of(models: Sequence[str]) -> dict[str, str]:
    """Name → model, of what is given as a model or as NAME=MODEL; a folder has its own name, without those above it.

    Raises:
        WorkloadError: two of one name, or a name that is no part of an address.

    >>> names_of(["runs/small/", "rank=models/x", "org/large"])
    {'small': 'runs/small/', 'rank': 'models/x', 'org/large': 'org/large'}
    """
    made: dict[str, str] = {}
    for given in models:
        before, mark, after = given.partition("=")
        is_named = bool(mark) and not Path(given).expanduser().exists()
        model = after if is_named else given
        is_folder = Path(model).expanduser().is_dir() or model.count("/") != 1 or model.endswith("/")
        own = os.path.basename(os.path.abspath(Path(model).expanduser())) if is_folder else model
        name = before if is_named else re.sub(r"[^\w.\-/]+", "-", own, flags=re.ASCII)
        if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", name, re.ASCII):
            raise WorkloadError(
                [f"{name!r} is no name for a model"], hint="give it one of letters and digits: NAME=FOLDER"
            )
        if name in made:
            raise WorkloadError([f"two models are called {name}"], hint="give one of them another name: NAME=FOLDER")
        made[name] = model
    return made
