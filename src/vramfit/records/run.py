"""`RunRecord`: what a fine-tuning run did, what it took beside what was predicted, and how one of its steps went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vramfit.records.finding import Displayed
from vramfit.settings.sizes import passes_of

RECORD = "run.json"
"""The file of the record, in the folder of the saved model."""
Status = Literal["completed", "stopped early"]
COURSE_FILE = "step.json"
"""In the folder of a run."""
MAX_POINTS = 192


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """One evaluation on the way."""

    step: int
    """Batches learned from before it."""
    epoch: float
    metrics: Mapping[str, Any]
    """As `vramfit evaluate` names them."""
    time_s: float
    is_best: bool = False
    """Whether nothing before it was better."""


Cause = Literal["less memory", "more memory", "retries", "recoveries", "slower"]
"""Why a run changed its settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsChange:
    """Settings that a run changed between two steps, since memory was not what it had been planned for."""

    step: int
    """Batches learned from before it."""
    cause: Cause
    said: str
    """What happened, in one sentence, as it was said when it happened."""
    available_bytes: int
    """What the run held and could still take."""
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    step_time_s: float
    """Predicted seconds of a step from now on."""
    plan_s: float
    """Seconds that planning took; 0 where the settings had been planned before."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunRecord(Displayed):
    """One fine-tuning run, finished."""

    model: str
    """What was fine-tuned."""
    model_class: str
    task: str
    data: str
    eval_data: str | None = None
    teacher: str | None = None
    """The model whose answers it learned from too."""
    output: str
    """The folder of the saved model."""
    device: str
    """cuda:0, cpu, or emulated."""
    status: Status
    num_samples: int
    num_truncated: int = 0
    """Samples that were longer than the sequences allowed, and cut."""
    longest_before_truncation: int = 0
    num_bad_rows: int = 0
    """Rows that could not be used and were left out, as was asked."""
    num_texts: int = 1
    """Texts of a sample: 2 where they come in pairs."""
    label_names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it ran: batch, micro_batch, seq, precision, optimizer and whatever else was not left as it is."""
    num_epochs: float
    """Passes over the data, the last one maybe in part."""
    num_steps: int
    """Optimizer steps taken."""
    num_skipped: int = 0
    """Batches whose fp16 gradients overflowed: no step was taken."""
    loss_scale: float | None = None
    """The last scale of fp16 losses; None in other precisions."""
    num_recoveries: int = 0
    """How often a batch ran out of memory and was done again."""
    final_micro_batch: int
    """Samples of full length in a forward pass at the end: smaller than planned after memory ran out."""
    changes: tuple[SettingsChange, ...] = ()
    """What it changed on the way, since memory was not what it had been planned for."""
    train_loss: float | None = None
    """Mean loss of the last batches, of one epoch at most."""
    num_loss_batches: int = 0
    """How many of them."""
    evaluations: tuple[EvaluationResult, ...] = ()
    best_metric: str | None = None
    """The metric that decides which model is kept."""
    best_value: float | None = None
    best_step: int | None = None
    """The step whose weights were saved; None for the last ones."""
    budget_bytes: int | None = None
    """What could be reserved; None without a budget."""
    predicted_reserved_bytes: int | None = None
    """Of batches of full length, and of evaluations where there are any."""
    most_reserved_bytes: int | None = None
    """The upper bound that the allocator was held to; what batches of other lengths leave in its cache is in it."""
    measured_reserved_bytes: int | None = None
    """The reserved peak of training and evaluation; None where there is no allocator to ask."""
    measured_allocated_bytes: int | None = None
    num_retries: int | None = None
    """How often PyTorch gave back all that it had cached, to make room; None where there is no allocator to ask."""
    predicted_step_time_s: float | None = None
    step_time_s: float | None = None
    """Mean seconds of an optimizer step."""
    compile_s: float = 0.0
    """Seconds of compiling before the first step."""
    time_s: float
    """Seconds of compiling, training and evaluation, of all sessions together where it was resumed."""
    num_tokens: int
    """Tokens learned from, padding left out."""
    tokens_per_s: float
    num_sessions: int = 1
    """Times it was started; more than 1 where it was resumed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What it ran with: python, torch, transformers, vramfit, the GPU."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCourse:
    """What live tensors asked for over one step that was run."""

    step: int
    """Its number in the run."""
    device: str
    batch: int
    micro_batch: int
    """Samples of its length in a forward pass."""
    seq: int
    """Tokens a sequence, padding included."""
    num_events: int
    """Requests and frees."""
    requested_bytes: tuple[int, ...] = field(repr=False)
    """The most in each of equal stretches of events."""
    lengths: tuple[int, ...] = field(default=(), repr=False)
    """Tokens of each sequence where nothing was padded; `micro_batch` times `seq` is then what a pass may hold."""
    texts: int = field(default=1, repr=False)
    """Sequences of a sample."""

    @property
    def size(self) -> dict[str, Any]:
        """The fields of a workload that has this step's size: to the token, or to less than a sequence of `seq`."""
        num_tokens, of_sample = sum(self.lengths), self.seq * self.texts
        size: dict[str, Any] = {"seq": self.seq} if self.texts == 1 else {"seq": self.seq, "texts": self.texts}
        if not self.lengths:
            return size | passes_of(self.micro_batch, self.batch)
        if num_tokens <= self.micro_batch * of_sample:
            return size | passes_of(None, self.batch) | {"lengths": self.lengths}
        return size | passes_of(self.micro_batch, -(-num_tokens // of_sample))


def sample(course: Sequence[int], num_points: int = MAX_POINTS) -> tuple[int, ...]:
    """A course in equal stretches, the highest point of each.

    >>> sample([1, 5, 2, 2, 9, 3], 3)
    (5, 2, 9)
    """
    num = min(num_points, len(course))
    return tuple(max(course[i * len(course) // num : (i + 1) * len(course) // num]) for i in range(num))
