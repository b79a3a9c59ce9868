"""`Workload`: the one description of a job that every room shares; frozen, and it checks itself.

Its fields are the settings of `vramfit.settings`. It sees only what it holds: whether a model supports a task or a GPU
a precision is a question for `estimator.resolve`. Everything that is wrong is reported at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vramfit.errors import WorkloadError, nearest_names
from vramfit.settings import SETTINGS
from vramfit.settings.graphs import OPTIMIZERS as IN_PLACE_OPTIMIZERS
from vramfit.settings.setting import record_of
from vramfit.settings.values import MAX_COUNT, Choice, Switch

CHOICES: Mapping[str, tuple[str, ...]] = {
    s.keyword: s.value.names for s in SETTINGS.values() if isinstance(s.value, Choice)
}
"""Every keyword with a fixed list of values: the same in Python, on the command line and in the API."""
HOST_STEPS = ("optimizer", "weights")
"""What is offloaded when the optimizer steps in host memory."""
SIZE_HINT = "--gpu t4 (`vramfit gpus` lists them), or --memory 8GiB for any size"

_Settings: Any = record_of(
    [(s.keyword, s.value.annotation, ... if s.keyword == "model" else s.default) for s in SETTINGS.values()], __name__
)


class Workload(_Settings):  # type: ignore[misc]
    """What is to run, on what, and how: a field for each setting.

    >>> Workload(model="bert-base-uncased", batch=32, accumulate=4, seq=128).micro_batch
    8
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        problems: list[str] = []
        for setting in SETTINGS.values():
            value = setting.value.normal(getattr(self, setting.keyword))
            object.__setattr__(self, setting.keyword, value)
            problems += setting.value.problems(setting.keyword, value)
        if not problems:
            problems += self._split_batch()
            problems += [text for s in SETTINGS.values() for text in s.contradictions(self)]
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
        return int(-(-self.batch // self.num_gpus))

    @property
    def trains(self) -> bool:
        """Whether the step has a backward pass and an optimizer."""
        return bool(self.mode == "train")

    @property
    def autocasts(self) -> bool:
        """Whether products are cast by autocast."""
        return bool(self.precision.startswith("amp"))

    @property
    def shards(self) -> bool:
        """Whether several GPUs have a part of the model each."""
        return bool(self.num_gpus > 1 and self.parallel == "fsdp")

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        return self.trains and self.offload in HOST_STEPS

    @property
    def steps_in_place(self) -> bool:
        """Whether the optimizer's step needs no temporaries (`step.commit.needs_temporaries` asks an optimizer)."""
        return self.optimizer in IN_PLACE_OPTIMIZERS

    @property
    def keeps_casts(self) -> bool:
        """Whether autocast keeps its casts of weights for a pass."""
        return keeps_copies(on_host=self.steps_on_host, in_shards=self.shards)


def keeps_copies(*, on_host: bool, in_shards: bool) -> bool:
    """Whether autocast keeps its casts: memory is too short where the optimizer is on the host or weights are in
    shards."""
    return not (on_host or in_shards)


def switched(name: str, value: Any) -> list[str]:
    """What is wrong with a keyword that is on or off."""
    return Switch().problems(name, value)


__all__ = ["CHOICES", "MAX_COUNT", "SIZE_HINT", "Workload", "switched"]
