"""`ServeSettings`: what a server is asked for; checked all at once, before anything heavy is imported."""

from dataclasses import dataclass

from vramfit.errors import WorkloadError, nearest_names
from vramfit.serve.limits import MAX_WAITING, TIMEOUT_S
from vramfit.tasks import all_tasks
from vramfit.units import SizeError, parse_bytes
from vramfit.workload import CHOICES

POOLINGS = ("mean", "first")
MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """One server, described.

    Raises:
        WorkloadError: every problem at once.
    """

    model: str
    """A folder, a hub id or a catalogue name."""
    task: str | None = None
    """None takes the model's own head; an encoder without one gives vectors (features)."""
    precision: str = "fp32"
    quantize: str | None = None
    offload: str | None = None
    """`weights`: layers that do not fit wait in host memory."""
    memory: str | int | None = None
    """What PyTorch may reserve on a device, all workers together; None takes what is free."""
    gpu: str | None = None
    """Choose batches for this GPU; None takes the one that is there."""
    devices: tuple[str, ...] = ()
    """cuda, cuda:N, cpu or emulated; workers are dealt round several. Empty takes the GPU where there is one."""
    seq: int | None = None
    """Cut sequences at so many tokens."""
    pooling: str = "mean"
    """What features gives of a text: the mean of its tokens' vectors, or the first one."""
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
        problems = [*_wrong_choices(self), *_wrong_numbers(self)]
        if "emulated" in self.devices and self.memory is None:
            problems.append("device emulated needs memory: how large the GPU is to be, such as 600MiB")
        if self.memory is not None:
            try:
                parse_bytes(self.memory, name="memory")
            except SizeError as error:
                problems.append(str(error))
        if problems:
            raise WorkloadError(problems)

    def device_of(self, worker: int) -> str | None:
        """Where a worker runs, counted from 0."""
        return self.devices[worker % len(self.devices)] if self.devices else None

    def sharers(self, worker: int) -> int:
        """Workers on the device of a worker, itself included."""
        here = self.device_of(worker)
        return sum(self.device_of(n) == here for n in range(self.num_workers))

    def share_bytes(self, worker: int) -> int | None:
        """A worker's part of the memory of its device; None where nothing was said."""
        return None if self.memory is None else parse_bytes(self.memory, name="memory") // self.sharers(worker)


def _wrong_choices(s: ServeSettings) -> list[str]:
    allowed = {
        "task": (s.task, tuple(task.name for task in all_tasks() if task.is_served), True),
        "precision": (s.precision, CHOICES["precision"], False),
        "quantize": (s.quantize, CHOICES["quantize"], True),
        "offload": (s.offload, ("weights",), True),
        "pooling": (s.pooling, POOLINGS, False),
    }
    problems = [
        f"{name} {value!r} is not one of {', '.join(known)} (nearest: {nearest_names(str(value), known, 1)[0]})"
        for name, (value, known, optional) in allowed.items()
        if value not in known and not (value is None and optional)
    ]
    wrong = [d for d in s.devices if d not in ("cpu", "emulated") and d.split(":")[0] != "cuda"]
    problems += [f"device {d!r} is not one of cuda, cuda:N, cpu, emulated" for d in wrong]
    return problems if s.model else [*problems, "model is needed"]


def _wrong_numbers(s: ServeSettings) -> list[str]:
    problems = []
    for name in ("seq", "top_k", "max_tokens", "num_workers", "max_waiting", "fail_every"):
        value = getattr(s, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f"{name} {value!r} is not a whole number from 1")
    if not problems and s.num_workers > MAX_WORKERS:
        problems.append(f"num_workers {s.num_workers} is more than {MAX_WORKERS}")
    if not isinstance(s.timeout_s, int | float) or not 0 < s.timeout_s <= 86_400:
        problems.append(f"timeout_s {s.timeout_s!r} is not a number of seconds up to a day")
    return problems
