"""Everything vramfit raises on purpose.

VramfitError                 .hint: what to do about it
├ WorkloadError              every problem at once
├ UnknownModel, UnknownGPU   with the nearest names
├ TraceError                 operator, module path
├ CheckpointError            file, tensor, what is wrong with it
├ DataError                  file, rows
├ NoPlanFits                 the best plan, shortfall_bytes
├ BudgetExceeded             predicted, observed, phase
├ RecoveryExhausted          attempts
├ RankFailed                 the rank, its reason
└ MissingExtra               the pip command

The message says what happened, with numbers; the hint says what to do. The command line prints both,
one line each, and exits with `exit_code`; a traceback has the hint as its last line.
"""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from inspect import get_annotations
from typing import Any, ClassVar


class VramfitError(Exception):
    """Base of all errors that a user can cause or mend.

    Args:
        message: what happened, with numbers.
        hint: what to do about it.
        details: values of the class's own attributes.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        known = {name for kind in type(self).__mro__ for name in get_annotations(kind)}
        for name, value in details.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no {name!r}")
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        self._hint: str | None = None
        self.hint = hint

    @property
    def hint(self) -> str | None:
        """What to do about it; a note of the error too, so that tracebacks show it."""
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        others = [note for note in getattr(self, "__notes__", []) if note != _note(self._hint)]
        self.__notes__ = others if hint is None else [*others, _note(hint)]
        self._hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[VramfitError], arguments: tuple[Any, ...]) -> VramfitError:
    """An error as it was sent: its `__init__` would take its message for something else."""
    return kind.__new__(kind, *arguments)


def _note(hint: str | None) -> str:
    return f"→ {hint}"


class WorkloadError(VramfitError, ValueError):
    """A workload that contradicts itself, its model or its GPU; carries every problem found."""

    exit_code = 2

    def __init__(self, problems: Sequence[str], *, hint: str | None = None) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems), hint=hint)


class UnknownModel(VramfitError, LookupError):
    """No model of that name, with the nearest names that exist."""

    exit_code = 2
    nearest: tuple[str, ...] = ()


class UnknownGPU(VramfitError, LookupError):
    """No GPU or instance of that name, with the nearest names that exist."""

    exit_code = 2
    nearest: tuple[str, ...] = ()


class TraceError(VramfitError):
    """A model that cannot be followed without real data; names the operator and the module."""

    operator: str = ""
    module_path: str = ""


class CheckpointError(VramfitError):
    """A checkpoint that is damaged or does not belong to its model."""

    file: str = ""
    tensor: str = ""


class DataError(VramfitError, ValueError):
    """Data that cannot be learned from or predicted on: a file, a column or single rows; carries file and rows."""

    file: str = ""
    rows: tuple[int, ...] = ()
    """Every row that is bad, as line numbers from 1; the message shows the first few."""


class NoPlanFits(VramfitError):
    """Nothing that is allowed fits the budget; carries the best that was found, what it lacks, and what would do."""

    exit_code = 3
    best: Any = None
    """The `Estimate` of the settings that take least."""
    shortfall_bytes: int = 0
    budget_bytes: int | None = None
    margin_bytes: int = 0
    allow: tuple[str, ...] = ()
    """What to allow for a plan to fit: the mildest change that does; empty where none does."""
    gpu: str | None = None
    """The smallest GPU of the catalogue on which the same request has a plan."""
    model: str | None = None
    """The largest model of the same family for which it has one."""
    host_bytes: int | None = None
    """Host memory with which it would have one, where less or none was allowed."""


class BudgetExceeded(VramfitError):
    """A run took more than was predicted for it."""

    exit_code = 3
    predicted_bytes: int
    observed_bytes: int
    phase: str


class RecoveryExhausted(VramfitError):
    """Out of memory, and every way to go on was tried; carries what was tried."""

    exit_code = 3
    attempts: tuple[str, ...] = ()


class RankFailed(VramfitError):
    """Another process of the same run has stopped or is gone, so that this one cannot go on; says which, and why."""

    rank: int | None = None
    reason: str = ""


class MissingExtra(VramfitError, ImportError):
    """A feature whose optional packages are not installed; the hint is the pip command."""

    def __init__(self, feature: str, *, extra: str, package: str) -> None:
        self.extra = extra
        self.package = package
        super().__init__(
            f"{feature} needs the package {package}, which is not installed",
            hint=f'pip install "vramfit[{extra}]"',
        )


NEAR = 0.45
"""How like a name must be to be taken for what was meant: `tinybert` is to bert-tiny, `gpt2` to no encoder."""


def nearest_names(name: str, known: Iterable[str], count: int = 3, *, least: float = 0.0) -> tuple[str, ...]:
    """The `count` known names most like `name`, best first; whole parts (`large`, `4090`) weigh most.

    Args:
        name: what was asked for.
        known: what there is.
        count: names wanted.
        least: likeness that a name must have to be given; `NEAR` leaves out what was not meant.

    >>> nearest_names("bert-bas-uncased", ["bert-base-uncased", "roberta-large", "bert-base-cased"], 2)
    ('bert-base-uncased', 'bert-base-cased')
    >>> nearest_names("gpt2", ["bert-base-uncased", "roberta-large"], least=NEAR)
    ()
    """
    wanted = name.lower()
    parts = set(_parts(wanted))

    def likeness(candidate: str) -> float:
        other = candidate.lower()
        shared = len(parts & set(_parts(other))) / max(len(parts), 1)
        short, long = sorted((wanted, other), key=len)
        inside = len(short) / len(long) if short and short in long else 0.0
        return SequenceMatcher(None, wanted, other).ratio() + shared + inside

    like = {candidate: likeness(candidate) for candidate in known}
    alike = (candidate for candidate in like if like[candidate] >= least)
    return tuple(sorted(alike, key=lambda candidate: (-like[candidate], candidate))[:count])


def _parts(name: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in name).split()
