"""`Fitting`: what was changed in somebody else's training script so that it fits, and the plan behind it."""

from dataclasses import dataclass

from vramfit.records.display import Displayed
from vramfit.records.plan import Plan
from vramfit.units import MIB

TRAINER_BYTES = 22 * MIB
"""The next batch, running sums and what callbacks keep: one more page of small blocks, and one of large ones."""


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
