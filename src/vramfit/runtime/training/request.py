"""`TrainRequest`: what a fine-tuning run is asked for; checked all at once, before anything heavy is imported."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from vramfit.errors import WorkloadError, nearest_names
from vramfit.runtime.data.source import DataSource
from vramfit.tasks import DEFAULT, all_tasks, trained_tasks
from vramfit.units import SizeError, parse_memory
from vramfit.workload import Workload

ScheduleName = Literal["linear", "cosine", "constant"]
DEFAULT_BATCH = 32
NEED_NOT_MATCH = frozenset(
    [
        *("data", "eval_data", "output", "resume", "keep", "save_every", "device", "gpu", "memory", "plan"),
        *("offload", "host_memory", "parallel", "fused", "graphs"),
        *("micro_batch", "checkpointing", "fail_at", "allow", "exact", "skip_bad_rows", "trust_remote_code"),
        *("text_columns", "label_column", "max_rows"),
    ]
)
"""What a resumed run may be given anew: it changes nothing, the data's fingerprint speaks for it, or the plan does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """One fine-tuning run, described."""

    model: str
    """A folder, a hub id or a catalogue name."""
    data: str
    """A CSV, TSV or JSONL file, or a folder of `datasets`."""
    output: str
    """The folder to save in; checkpoints lie there too."""
    eval_data: str | None = None
    """Evaluated on the way; the best model is kept."""
    task: str = DEFAULT
    text_columns: tuple[str, ...] = ()
    """Columns of text; empty finds them by their usual names."""
    label_column: str | None = None
    max_rows: int | None = None
    """Read no more rows than this."""
    skip_bad_rows: bool = False
    """Leave rows out that cannot be used; otherwise they are an error."""
    epochs: float = 3
    """Passes over the data."""
    max_steps: int | None = None
    """Batches to learn from, whatever the epochs say."""
    batch: int | None = None
    """Samples that one optimizer step sees; None takes the plan's, or 32."""
    seq: int | None = None
    """Longest sequence in tokens; longer ones are cut. None takes what the model allows."""
    lr: float = 5e-5
    weight_decay: float = 0.01
    """Of weight matrices; biases and norms are left alone."""
    warmup: float = 0.1
    """Below 1 a share of all steps, from 1 on a number of steps."""
    schedule: ScheduleName = "linear"
    """How the learning rate falls after the warm-up."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient of a batch to this norm."""
    label_smoothing: float = 0.0
    seed: int = 0
    precision: str | None = None
    """None lets the plan choose; fp32 without one."""
    optimizer: str | None = None
    checkpointing: str | int | None = None
    micro_batch: int | None = None
    freeze: str | int | tuple[str, ...] | None = None
    lora: int | None = None
    quantize: str | None = None
    offload: str | None = None
    """`optimizer` or `weights` wait in host memory; None lets the plan choose."""
    host_memory: str | int | None = None
    """What may wait there; None takes what is available."""
    attention: str | None = None
    """`packed` lays sequences end to end; None lets the plan choose."""
    compile: bool | None = None
    """Compile the layers; None does so where a plan says that it pays."""
    fused: bool | None = None
    """Fused layers in packed passes; None has them where they can be."""
    graphs: bool | None = None
    """Record packed passes as CUDA graphs, where the plan can; None does so where a plan says that it pays."""
    parallel: str | None = None
    """With several processes: `ddp`, each has the whole model, or `fsdp`, a part of it. None lets the plan choose."""
    exact: bool = False
    """Plan without fewer bits: fp32, and no 8-bit optimizer."""
    allow: tuple[str, ...] = ()
    """What the plan may use besides: freeze, lora, int8, bf16, adafactor, sgd."""
    memory: str | int | None = None
    """The budget: what PyTorch may reserve."""
    gpu: str | None = None
    """Plan for this GPU of the catalogue; None takes the one that is there."""
    plan: str | None = None
    """A plan that was saved; it is not made anew."""
    device: str | None = None
    """cuda, cuda:N, cpu or emulated; None takes the GPU where there is one."""
    fail_at: tuple[int, ...] = ()
    """Numbers of allocations that fail on the emulated GPU."""
    eval_every: int | None = None
    """Batches between evaluations; None evaluates after each epoch."""
    save_every: int | None = None
    """Batches between checkpoints; None saves after each evaluation or epoch."""
    keep: int = 2
    """Newest checkpoints that are kept, beside the best one."""
    patience: int | None = None
    """Stop after so many evaluations without a better one."""
    resume: bool = False
    """Go on from the newest whole checkpoint in `output`; from the start where there is none."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("text_columns", "allow", "fail_at", "freeze"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = [*_wrong_choices(self), *_wrong_numbers(self), *_contradictions(self)]
        if not problems:
            problems += self._workload_problems()
        if problems:
            raise WorkloadError(problems)

    def _workload_problems(self) -> list[str]:
        """What the settings contradict among themselves, as a workload says it."""
        try:
            given = {name: value for name, value in self.settings().items() if name != "fused"}  # where it can be
            Workload.from_keywords(model=self.model, batch=self.batch or DEFAULT_BATCH, loop="stepper", **given)
        except WorkloadError as error:
            return list(error.problems)
        return []

    def settings(self) -> dict[str, Any]:
        """Keywords of `Workload` that were given: what a plan keeps."""
        names = ("task", "seq", "precision", "optimizer", "checkpointing", "micro_batch", "freeze", "lora")
        more = ("quantize", "offload", "host_memory", "attention", "compile", "fused", "max_grad_norm", "parallel")
        given = {name: getattr(self, name) for name in (*names, *more)}
        if self.offload == "weights" and self.checkpointing is None:
            given["checkpointing"] = "full"  # its layers come again for backward
        return {name: value for name, value in given.items() if value is not None}

    def source(self, path: str) -> DataSource:
        """A file of the run's, to be read."""
        return DataSource(
            path=path,
            task=self.task,
            text_columns=self.text_columns,
            label_column=self.label_column,
            skip_bad_rows=self.skip_bad_rows,
            max_rows=self.max_rows,
        )

    def as_data(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """What differs from the request of a saved run in a way that makes it another training, in words."""
        own = self.as_data()
        names = [f.name for f in fields(self) if f.name not in NEED_NOT_MATCH]
        return [
            f"{name} is {own[name]!r}, and was {saved.get(name)!r}" for name in names if own[name] != saved.get(name)
        ]


def _wrong_choices(r: TrainRequest) -> list[str]:
    choices = {"task": trained_tasks(), "schedule": get_args(ScheduleName)}
    problems = [
        f"{name} {getattr(r, name)!r} is not one of {', '.join(allowed)} "
        f"(nearest: {nearest_names(str(getattr(r, name)), allowed, 1)[0]})"
        for name, allowed in choices.items()
        if getattr(r, name) not in allowed
    ]
    problems += [f"{name} is needed" for name in ("model", "data", "output") if not getattr(r, name)]
    if r.device is not None and r.device not in ("cpu", "emulated") and r.device.split(":")[0] != "cuda":
        problems.append(f"device {r.device!r} is not one of cuda, cuda:N, cpu, emulated")
    if r.memory is not None:
        try:
            parse_memory(r.memory)
        except SizeError as error:
            problems.append(f"{error} ({error.hint})")
    return problems


def _wrong_numbers(r: TrainRequest) -> list[str]:
    problems = []
    for name in ("batch", "seq", "max_steps", "max_rows", "eval_every", "save_every", "keep", "patience"):
        value = getattr(r, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f"{name} {value!r} is not a whole number from 1")
    bounds = {"epochs": (0, 1e6), "lr": (0, 1e3), "weight_decay": (-1e-12, 1e3), "label_smoothing": (-1e-12, 1)}
    for name, (low, high) in bounds.items():
        value = getattr(r, name)
        if not isinstance(value, int | float) or not low < value < high:
            wanted = f"above 0 and below {high:,.0f}" if low == 0 else f"from 0 and below {high:,.0f}"
            problems.append(f"{name} {value!r} is not a number {wanted}")
    if not isinstance(r.warmup, int | float) or not 0 <= r.warmup < math.inf:
        problems.append(f"warmup {r.warmup!r} is neither a share below 1 nor a number of steps")
    if not isinstance(r.seed, int) or not 0 <= r.seed < 2**63:
        problems.append(f"seed {r.seed!r} is not a whole number from 0")
    return problems


def _contradictions(r: TrainRequest) -> list[str]:
    smoothed = [task.name for task in all_tasks() if task.can_smooth]
    rules = [
        (bool(r.fail_at) and r.device != "emulated", "fail_at is for device emulated"),
        (
            r.device == "emulated" and r.memory is None and r.plan is None,
            "device emulated needs memory: how large the GPU is to be, such as 600MiB",
        ),
        (r.patience is not None and r.eval_data is None, "patience needs eval_data: nothing says what is better"),
        (r.eval_every is not None and r.eval_data is None, "eval_every needs eval_data"),
        (
            r.label_smoothing > 0 and r.task not in smoothed,
            f"label_smoothing is for {', '.join(smoothed)}, not {r.task}",
        ),
        (bool(r.graphs) and r.label_smoothing > 0, "graphs and label_smoothing do not go together yet"),
        (r.quantize is not None and r.precision == "bf16", "quantize int8 is trained beside fp32 or amp weights"),
    ]
    return [text for broken, text in rules if broken]
