"""`TrainRequest`: what a fine-tuning run is asked for; checked all at once, before anything heavy is imported.

Its fields are the options of a run, below, and those settings that `vramfit train` takes; the command line and
SageMaker's hyperparameters are read by the same descriptions.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.runtime.data.source import DataSource
from vramfit.settings import SETTINGS, Setting, completed, record_of
from vramfit.settings.distillation import AUTO, DISK, LOGITS, MEMORY, RELATIONS
from vramfit.settings.values import Choice, Count, Number, Switch, Text, Texts, Value, number_or_text
from vramfit.tasks import all_tasks, trained_tasks
from vramfit.tasks.parts.heads import SINGLE
from vramfit.workload import Workload

DEFAULT_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Numbers(Texts):
    """Several whole numbers with commas between them."""

    metavar: str | None = "N,…"

    def is_right(self, value: Any) -> bool:
        return isinstance(value, tuple) and all(isinstance(one, int) for one in value)

    def wanted(self, value: Any) -> str:
        return "a list of whole numbers"

    def parse(self, text: str) -> Any:
        return tuple(number_or_text(part) for part in super().parse(text))


@dataclass(frozen=True, kw_only=True)
class Seed(Count):
    """A whole number from 0."""

    def is_right(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63

    def wanted(self, value: Any) -> str:
        return "a whole number from 0"


class RunOption(Setting):
    """An option of a run that is no setting of a workload."""

    is_required: bool = False
    in_run = True

    def __init__(self, keyword: str, value: Value, default: Any, help: str, group: str, **flags: Any) -> None:
        described = {"keyword": keyword, "value": value, "default": default, "help": help, "group": group}
        vars(self).update(**described, is_basic=keyword in BASIC, **flags)


BASIC = frozenset(
    [
        "task",
        "eval_data",
        "text_columns",
        "label_column",
        "epochs",
        "max_steps",
        "lr",
        "exact",
        "allow",
        "plan",
        "device",
        "resume",
    ]
)
"""Options that people set most: `--help` shows these, and `--help-all` the others too."""
_ANEW = {"must_match_on_resume": False}
"""A resumed run may be given it anew: it changes nothing, or the fingerprint of the data speaks for it."""
_SHARE = "from 0 and below"
RUN_OPTIONS: tuple[RunOption, ...] = (
    RunOption(
        "data",
        Text(such="reviews.csv", optional=False, metavar="DATA"),
        ...,
        "CSV, TSV, JSON lines, or a folder that datasets saved.",
        "data",
        **_ANEW,
    ),
    RunOption(
        "output", Text(such="my-model", optional=False, metavar="DIR"), ..., "Folder to save in.", "data", **_ANEW
    ),
    RunOption("eval_data", Text(metavar="FILE"), None, "Evaluation data; the best model is saved.", "data", **_ANEW),
    RunOption(
        "text_columns",
        Texts(),
        (),
        "Column of the texts; two for pairs (a,b). Default: found by usual names.",
        "data",
        option="text_column",
        **_ANEW,
    ),
    RunOption("task", Choice(names=trained_tasks()), SETTINGS["task"].default, "What the model learns.", "data"),
    RunOption(
        "teacher",
        Text(metavar="MODEL"),
        None,
        "A trained model to distil from: the loss includes its answers (see vramfit distill).",
        "learning",
    ),
    RunOption(
        "teacher_answers",
        Choice(names=(AUTO, DISK, MEMORY)),
        AUTO,
        "Where the teacher's answers come from: computed once and kept on the disk, or a teacher in memory beside the "
        "student, asked by every pass; auto takes the faster.",
        "learning",
    ),
    RunOption("label_column", Text(), None, "Column of the labels.", "data", **_ANEW),
    RunOption("max_rows", Count(optional=True), None, "Read at most N rows.", "data", **_ANEW),
    RunOption("skip_bad_rows", Switch(), False, "Leave out rows that cannot be used.", "data", **_ANEW),
    RunOption(
        "epochs", Number(high=1e6, words="a number above 0 and below 1,000,000"), 3, "Epochs of training.", "learning"
    ),
    RunOption("max_steps", Count(optional=True), None, "Optimizer steps to take; overrides --epochs.", "learning"),
    RunOption("lr", Number(high=1e3, words="a number above 0 and below 1,000"), 5e-5, "Learning rate.", "learning"),
    RunOption(
        "weight_decay",
        Number(high=1e3, includes_low=True, words=f"a number {_SHARE} 1,000"),
        0.01,
        "Weight decay; biases and norm weights have none.",
        "learning",
    ),
    RunOption(
        "warmup",
        Number(includes_low=True, words="a share below 1 or a number of steps"),
        0.1,
        "Warm-up: a share of all steps (below 1) or a number of steps (1 or more).",
        "learning",
    ),
    RunOption(
        "schedule",
        Choice(names=("linear", "cosine", "constant")),
        "linear",
        "Learning-rate schedule after the warm-up.",
        "learning",
    ),
    RunOption(
        "label_smoothing",
        Number(high=1, includes_low=True, words=f"a number {_SHARE} 1"),
        0.0,
        "Share of a label that is spread over all classes.",
        "learning",
    ),
    RunOption("seed", Seed(), 0, "Seed of all random numbers: new weights, dropout, order of samples.", "learning"),
    RunOption(
        "exact", Switch(), False, "Plan with the same maths only: fp32, no 8-bit optimizer.", "learning", **_ANEW
    ),
    RunOption(
        "allow",
        Texts(),
        (),
        "Different training to use: freeze, lora, int8, nf4, bf16, adafactor, sgd.",
        "learning",
        **_ANEW,
    ),
    RunOption(
        "plan",
        Text(metavar="FILE"),
        None,
        "Use this saved plan instead of making one (vramfit plan --save).",
        "machine",
        **_ANEW,
    ),
    RunOption("device", Text(), None, "cuda, cuda:N, cpu or emulated. Default: a GPU if present.", "machine", **_ANEW),
    RunOption(
        "mend",
        Switch(),
        True,
        "Keep the planned settings. By default, the run plans again when memory turns out to be less.",
        "machine",
        **_ANEW,
    ),
    RunOption(
        "fail_at",
        Numbers(),
        (),
        "Rehearsal: allocations that fail on the emulated GPU, by number.",
        "machine",
        hidden=True,
        **_ANEW,
    ),
    RunOption(
        "eval_every", Count(optional=True), None, "Optimizer steps between evaluations. Default: one epoch.", "keeping"
    ),
    RunOption(
        "save_every",
        Count(optional=True),
        None,
        "Optimizer steps between checkpoints. Default: one epoch.",
        "keeping",
        **_ANEW,
    ),
    RunOption("keep", Count(), 2, "Number of newest checkpoints to keep, besides the best one.", "keeping", **_ANEW),
    RunOption("patience", Count(optional=True), None, "Stop after N evaluations without an improvement.", "keeping"),
    RunOption(
        "resume",
        Switch(),
        False,
        "Continue from the newest complete checkpoint in the --output folder.",
        "keeping",
        **_ANEW,
    ),
    RunOption("trust_remote_code", Switch(), False, "Run Python code from the model's repository.", "machine", **_ANEW),
)
"""What a run has besides the settings of its workload."""
IN_RUN: Mapping[str, Setting] = {name: s for name, s in SETTINGS.items() if s.is_in_run or name == "model"}
"""Settings that `vramfit train` takes; None leaves the choice to the plan."""
OPTIONS: Mapping[str, Setting] = {**IN_RUN, **{option.keyword: option for option in RUN_OPTIONS}}
DEFAULTS = {"max_grad_norm": 1.0}
"""Settings that no plan chooses."""


def _fields() -> list[tuple[str, Any, Any]]:
    needed = ("model", "data", "output")
    made: list[tuple[str, Any, Any]] = [(name, str, ...) for name in needed]
    for name, option in OPTIONS.items():
        default = option.default if isinstance(option, RunOption) else DEFAULTS.get(name)
        kind = option.value.annotation
        if name not in needed:
            made.append((name, kind | None if default is None else kind, default))
    return made


_Options: Any = record_of(_fields(), __name__)


class TrainRequest(_Options):  # type: ignore[misc]
    """One fine-tuning run, described: a field for each option."""

    __slots__ = ()

    def __post_init__(self) -> None:
        problems = [f"{name} is needed" for name in ("model", "data", "output") if not getattr(self, name)]
        for name, option in OPTIONS.items():
            given = getattr(self, name)
            is_left_open = given is None and not isinstance(option, RunOption)
            value = given if is_left_open else option.value.normal(given)
            object.__setattr__(self, name, value)
            if not is_left_open and name not in ("model", "data", "output"):
                problems += option.value.problems(name, value)
        if self.teacher is not None and self.distill is None:
            object.__setattr__(self, "distill", LOGITS)
        problems += _contradictions(self)
        problems += [] if problems else self._workload_problems()
        if problems:
            raise WorkloadError(problems)

    def _workload_problems(self) -> list[str]:
        """What the settings contradict among themselves, as a workload says it."""
        try:
            given = {name: value for name, value in self.settings().items() if not SETTINGS[name].if_possible}
            if self.distill == RELATIONS:
                given["held_teacher"] = self.teacher
            Workload.from_keywords(model=self.model, batch=self.batch or DEFAULT_BATCH, loop="stepper", **given)
        except WorkloadError as error:
            return list(error.problems)
        return []

    def settings(self) -> dict[str, Any]:
        """Keywords of `Workload` that were given: what a plan keeps."""
        apart = ("model", "batch", "memory", "gpu", "graphs")
        given = {name: getattr(self, name) for name in IN_RUN if name not in apart}
        return completed({name: value for name, value in given.items() if value is not None})

    def source(self, path: str) -> DataSource:
        """A file of the run's, to be read."""
        return DataSource(
            path=path,
            task=self.task,
            text_columns=self.text_columns,
            label_column=self.label_column,
            skip_bad_rows=self.skip_bad_rows,
            max_rows=self.max_rows,
            loss=self.loss if path == self.data else None,
            problem=self.problem,
        )

    def as_data(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """What differs from the request of a saved run in a way that makes it another training, in words."""
        own = self.as_data()
        names = [name for name, option in OPTIONS.items() if option.must_match_on_resume]
        return [
            f"{name} is {own[name]!r}, and was {saved.get(name)!r}" for name in names if own[name] != saved.get(name)
        ]


def _contradictions(r: TrainRequest) -> list[str]:
    is_cuda = str(r.device).split(":")[0] == "cuda"
    smoothed = [task.name for task in all_tasks() if task.can_smooth]
    smooths = isinstance(r.label_smoothing, int | float) and r.label_smoothing > 0
    rules = [
        (
            r.device not in (None, "cpu", "emulated") and not is_cuda,
            f"device {r.device!r} is not one of cuda, cuda:N, cpu, emulated",
        ),
        (bool(r.fail_at) and r.device != "emulated", "fail_at is for device emulated"),
        (
            r.device == "emulated" and r.memory is None and r.plan is None,
            "device emulated needs memory: how large the GPU is to be, such as 600MiB",
        ),
        (r.patience is not None and r.eval_data is None, "patience needs eval_data: nothing says what is better"),
        (r.eval_every is not None and r.eval_data is None, "eval_every needs eval_data"),
        (smooths and r.task not in smoothed, f"label_smoothing is for {', '.join(smoothed)}, not {r.task}"),
        (
            smooths and r.problem not in (None, SINGLE),
            f"label_smoothing is for one class a row, not problem {r.problem}",
        ),
        (
            r.distill is not None and r.teacher is None,
            f"distill {r.distill} needs a teacher: the model that is learned from",
        ),
        (r.teacher_answers != AUTO and r.teacher is None, f"teacher_answers {r.teacher_answers} needs a teacher"),
        (
            r.distill == RELATIONS and r.teacher_answers == DISK,
            "distill relations needs the teacher in memory: its queries, keys and values are not kept on the disk",
        ),
        (
            r.teacher is not None and smooths,
            "label_smoothing and a teacher do not go together: its answers are soft already",
        ),
        (r.captures_graphs and smooths, "graphs and label_smoothing do not go together yet"),
        (r.is_quantized and r.has_bf16_weights, "quantized weights need fp32 or amp for the trained weights, not bf16"),
    ]
    return [text for broken, text in rules if broken]
