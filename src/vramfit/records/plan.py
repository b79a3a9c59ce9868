"""`Plan`: the settings chosen for a job, why, and what else was possible; `Fitting`: a Trainer changed by one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.errors import VramfitError
from vramfit.records.codec import from_json, replace_file, to_json
from vramfit.records.estimate import Estimate
from vramfit.records.finding import Displayed
from vramfit.settings import SETTINGS, Kind
from vramfit.units import MIB
from vramfit.workload import Workload

FRAGMENT_SHARE = 0.25
"""Of what full windows reserve: room for the pieces that batches of other lengths leave in PyTorch's cache. With 64 GiB
to spare, runs on an H200 reserved up to 21 % more than full windows do (`benchmarks/results/remedies_h200_*`)."""
FRAGMENT_BYTES = 64 * MIB
"""Added to that share: segments grow by pages of 20 MiB, in a small pool and a large one."""
PAGE_BYTES = 20 * MIB
"""PyTorch passes its limit by less than this where segments grow (`ExpandableSegment`, kLargeBuffer)."""
TRAINER_BYTES = 22 * MIB
"""The next batch, running sums and what callbacks keep: one more page of small blocks, and one of large ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One setting of a plan that is not the plainest one, and why it is there."""

    setting: str
    """Keyword and value, as on the command line."""
    kind: Kind
    why: str
    cost: str = ""
    """What it costs in quality, in words; empty for same maths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Other settings that were predicted."""

    settings: str
    """What differs from the plainest run, in words."""
    kind: Kind
    """Of the strongest change in it."""
    micro_batch: int
    accumulate: int
    step_time_s: float
    safe_reserved_bytes: int
    fits: bool
    allowed: bool = True
    """Whether the request allows it; others show what allowing more would bring."""
    why_not: str = ""
    """Why it was not taken, where it fits and is faster at full length than the plan."""

    @property
    def split(self) -> str:
        """Samples of a pass × passes of a step."""
        return f"{self.micro_batch} × {self.accumulate}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSummary:
    """The real lengths a plan was made for."""

    num_samples: int
    mean: float
    median: int
    longest: int
    num_truncated: int
    """Samples longer than the model or the request allows: they are cut."""
    source: str
    """Where the lengths come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceFit:
    """A cloud instance, and the plan for one of its GPUs."""

    instance: str
    gpu: str
    num_gpus: int
    budget_bytes: int
    fits: bool
    settings: str
    """In short; why not, where nothing fits."""
    micro_batch: int | None = None
    accumulate: int | None = None
    step_time_s: float | None = None
    safe_reserved_bytes: int | None = None

    @property
    def split(self) -> str:
        """Samples of a pass × passes of a step."""
        return f"{self.micro_batch} × {self.accumulate}"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan(Displayed):
    """The fastest settings found that fit, certified by prediction."""

    workload: Workload
    """The training step: settings, effective batch, micro-batch, GPU and budget."""
    estimate: Estimate
    """Of that step."""
    evaluation: Estimate
    """Of an evaluation batch beside the training state; its workload has the batch."""
    step_time_s: float
    """Predicted seconds of an optimizer step at full length, or on the real lengths where they were given."""
    budget_bytes: int
    """What the allocator may reserve."""
    margin_bytes: int
    """Left free of the budget on purpose."""
    margin_reason: str
    reasons: tuple[Reason, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    """Fastest first."""
    num_predicted: int = 0
    """Settings whose memory was predicted on the way."""
    lengths: LengthSummary | None = None
    notes: tuple[str, ...] = ()

    @property
    def micro_batch(self) -> int:
        """Samples of full length that one forward pass sees."""
        return self.workload.micro_batch

    @property
    def accumulate(self) -> int:
        """Micro-batches a step."""
        return self.workload.num_passes

    @property
    def predicted_reserved_bytes(self) -> int:
        """What windows of full length reserve, and evaluations beside them."""
        return max(self.estimate.safe_reserved_bytes, self.evaluation.safe_reserved_bytes)

    @property
    def most_reserved_bytes(self) -> int:
        """What a run reserves at most, whatever lengths its batches have: its allocator is held to `limit_bytes`."""
        predicted_bytes = self.predicted_reserved_bytes
        return min(self.budget_bytes, predicted_bytes + int(FRAGMENT_SHARE * predicted_bytes) + FRAGMENT_BYTES)

    @property
    def limit_bytes(self) -> int:
        """The limit that a run sets for PyTorch's allocator: the budget, or less where the plan needs much less."""
        most_bytes = self.most_reserved_bytes
        return most_bytes if most_bytes == self.budget_bytes else most_bytes - PAGE_BYTES

    @property
    def evaluation_batch(self) -> int:
        """Samples of an evaluation batch."""
        return self.evaluation.workload.batch

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Raises:
            VramfitError: the path cannot be written.
        """
        replace_file(Path(path), (to_json(self) + "\n").encode())

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """A plan that was saved.

        Raises:
            VramfitError: the file is not there, or is not a plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise VramfitError(f"cannot read {path}: {why}", hint="give the file that plan.save wrote") from None
        return from_json(Plan, text)

    def training_arguments(self) -> dict[str, Any]:
        """Keywords for `transformers.TrainingArguments` with these settings.

        What is done to the model has no keyword there: `vramfit.prepare(model, plan)` freezes, adds adapters,
        quantizes, checkpoints some layers and has them cast their weights together before the Trainer sees it; without
        it, checkpointed layers take more. Trainer splits evenly only: the last micro-batch is as large as the others
        where the batch does not divide, and the effective batch then a little larger; a plan with `accumulate` given
        that divides it keeps it. `adamw-8bit` needs torchao. Expandable segments are set by the environment
        (`PYTORCH_ALLOC_CONF=expandable_segments:True`).

        Raises:
            VramfitError: a plan that uses host memory or packed sequences, which the Trainer has no keyword for.
        """
        made: dict[str, Any] = {}
        for setting in SETTINGS.values():
            made |= setting.trainer_arguments(self.workload)
        made |= {"per_device_eval_batch_size": self.evaluation_batch, "eval_accumulation_steps": 1}
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One setting that is not what it was."""

    name: str
    """As in `TrainingArguments`, or what was changed in words."""
    before: str
    after: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Fitting(Displayed):
    """A Trainer that was fitted into a budget."""

    trainer: str
    """Its class."""
    model: str
    """The class of its model."""
    plan: Plan
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    """What is good to know beside."""

    @property
    def most_bytes(self) -> int:
        """What training reserves at most, with what the Trainer itself keeps."""
        return min(self.plan.most_reserved_bytes + TRAINER_BYTES, self.plan.budget_bytes)

    def diff(self) -> str:
        """The changed arguments as a diff.

        A line with a minus for what was, one with a plus for what is.
        """
        return "".join(f"-{c.name}={c.before}\n+{c.name}={c.after}\n" for c in self.changes)
