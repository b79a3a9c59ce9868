"""`Workload`: the one description of a job that every room shares; frozen, and it checks itself.

Its fields are the settings of `vramfit.settings`, and its properties what is `asked` of each; `settings/fields.pyi`
lists both for type checkers (`scripts/make_fields.py` writes it). It sees only what it holds: whether a model supports
a task or a GPU a precision is a question for `estimator.resolve`. Everything that is wrong is reported at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vramfit.errors import WorkloadError, nearest_names
from vramfit.settings import SETTINGS, given_in, record_of
from vramfit.settings.values import MAX_COUNT, Choice, Switch

CHOICES: Mapping[str, tuple[str, ...]] = {
    s.keyword: s.value.names for s in SETTINGS.values() if isinstance(s.value, Choice)
}
"""Every keyword with a fixed list of values: the same in Python, on the command line and in the API."""
SIZE_HINT = "--gpu t4 (`vramfit gpus` lists them), or --memory 8GiB for any size"

if TYPE_CHECKING:
    from vramfit.settings.fields import Fields
else:
    Fields = record_of(
        [(s.keyword, s.value.annotation, ... if s.keyword == "model" else s.default) for s in SETTINGS.values()],
        __name__,
    )


class Workload(Fields):
    """What is to run, on what, and how: a field for each setting.

    >>> Workload(model="bert-base-uncased", batch=32, accumulate=4, seq=128).micro_batch
    8
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        problems: list[str] = []
        for setting in SETTINGS.values():
            given = getattr(self, setting.keyword)
            if given is setting.default and setting.keyword != "model":  # defaults are right
                continue
            value = setting.value.normal(given)
            object.__setattr__(self, setting.keyword, value)
            problems += setting.value.problems(setting.keyword, value)
        if not problems:
            problems += self._split_batch()
            problems += [text for s in given_in(self) for text in s.contradictions(self)]
        if problems:
            raise WorkloadError(problems)

    def _split_batch(self) -> list[str]:
        """Work out accumulate and micro_batch from each other; what does not divide is a problem."""
        given, accumulate, share = self.micro_batch, self.accumulate, self.share
        of_each = f", of which each of {self.num_gpus} GPUs has {share}" if self.num_gpus > 1 else ""
        if given is not None and given > share:
            return [f"micro_batch {given} is larger than batch {self.batch}{of_each}"]
        if accumulate is not None and accumulate > share:
            return [f"accumulate {accumulate} is more than the {self.batch} samples of a batch{of_each}"]
        accumulate = accumulate or (-(-share // given) if given else 1)
        micro_batch = given or -(-share // accumulate)
        if -(-share // micro_batch) != accumulate:
            return [f"micro_batch {micro_batch} × accumulate {accumulate} is not batch {self.batch}{of_each}"]
        if self.loop == "plain" and micro_batch * accumulate != self.batch:
            return [
                f"batch {self.batch} does not divide into {accumulate} equal micro-batches "
                "(loop='stepper' splits unevenly)"
            ]
        object.__setattr__(self, "accumulate", accumulate)
        object.__setattr__(self, "micro_batch", micro_batch)
        return []

    @classmethod
    def from_keywords(cls, **keywords: Any) -> "Workload":
        """A workload from keywords; an unknown keyword is a `WorkloadError` with the nearest name."""
        problems = [
            f"unknown keyword {name!r} (nearest: {', '.join(nearest_names(name, list(SETTINGS)))})"
            for name in keywords
            if name not in SETTINGS
        ]
        if problems:
            raise WorkloadError(problems)
        return cls(**keywords)

    def with_batch(self, batch: int) -> "Workload":
        """The same job at another effective batch, with the same number of micro-batches."""
        return replace(self, batch=batch, accumulate=self.accumulate, micro_batch=None)

    @property
    def share(self) -> int:
        """Samples of a batch that one GPU passes; of the GPU that has most."""
        return -(-self.batch // self.num_gpus)

    @property
    def trains(self) -> bool:
        """Whether the step has a backward pass and an optimizer."""
        return self.mode == "train"


def switched(name: str, value: Any) -> list[str]:
    """What is wrong with a keyword that is on or off."""
    return Switch().problems(name, value)


def settings_of(plan: Any) -> Workload:
    """The settings of a `Plan`; a `Workload` is its own.

    Raises:
        WorkloadError: neither of them.
    """
    found: Any = getattr(plan, "workload", plan)
    if not isinstance(found, Workload):
        hint = "vramfit.plan makes a plan, and vramfit.Plan.load reads one"
        raise WorkloadError([f"a plan is a Plan or a Workload, not {type(found).__name__}"], hint=hint)
    return found


__all__ = ["CHOICES", "MAX_COUNT", "SIZE_HINT", "Workload", "settings_of", "switched"]
