"""Workloads cut down to few of their layers: traced in a tenth of the time, they take part of what all layers take."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vramfit.errors import VramfitError
from vramfit.estimator.traced import TracedWorkload
from vramfit.estimator.weighing import peaks_of_parts
from vramfit.models.resolve import ResolvedModel
from vramfit.records.stream import Phase
from vramfit.trace.template import StreamTemplate
from vramfit.trace.work import StretchTemplate, WorkTemplate

WORTHWHILE_LAYERS = 10
"""With fewer, one trace of the whole model is as quick as two of shallow ones."""
PASSES = ("steady.micro0", "steady.micro1")
Calls = list[tuple[WorkTemplate, Phase, int]]
Passes = dict[str, list[StretchTemplate]]


class WorkByLength:
    """What the passes of a workload do at any length.

    Args:
        traced: the workload at its full length, of two passes or more.
        batch: one that its trace serves.
    """

    def __init__(self, traced: TracedWorkload, batch: int) -> None:
        self._traced = traced
        self._batch = batch
        self._first: Passes | None = None
        """Of one layer, at the full length; None where layers do not add up."""
        self._is_checked = False
        self._made: dict[int, StreamTemplate] = {}

    def template(self, seq: int) -> StreamTemplate:
        """A template with the work of a step at a length; what it asks of memory may be left out."""
        if seq not in self._made:
            traced = replace(self._traced, workload=replace(self._traced.workload, seq=seq))
            self._made[seq] = self._from_shallow(seq) or traced.template(self._batch)
        return self._made[seq]

    def _from_shallow(self, seq: int) -> StreamTemplate | None:
        """None where it takes a trace of the whole model."""
        full = self._traced.workload.seq
        if seq == full:
            return None
        whole = self._traced.template(self._batch)
        if not self._is_checked:
            self._first, self._is_checked = self._check(full, whole), True
        work = None if self._first is None else self._make(seq, self._first, whole)
        return None if work is None else replace(whole, segments={}, origins=[], work={**whole.work, **work})

    def _check(self, full: int, whole: StreamTemplate) -> Passes | None:
        """The work of one layer, where the whole model's follows from it and from that of two."""
        one = self._shallow(full, 1) if self._is_worthwhile(whole) else None
        made = None if one is None else self._deepened(full, one)
        adds_up = made is not None and all(_same(made[name], whole.work[name]) for name in PASSES)
        return one if adds_up else None

    def _is_worthwhile(self, whole: StreamTemplate) -> bool:
        workload, resolved = self._traced.workload, self._traced.resolved
        if resolved.module is not None or workload.num_gpus > 1 or workload.offloads:
            return False
        some_layers = not workload.has_same_layers
        kinds = set(getattr(resolved.config, "layer_types", None) or ())
        if some_layers or len(kinds) > 1 or not all(name in whole.work for name in PASSES):
            return False
        return num_layers_of(resolved) >= WORTHWHILE_LAYERS

    def _make(self, seq: int, first: Passes, whole: StreamTemplate) -> Passes | None:
        one = self._shallow(seq, 1)
        if one is None:
            return None
        if all(_called_alike(one[name], first[name]) for name in PASSES):
            return {name: _as_often(one[name], whole.work[name]) for name in PASSES}
        return self._deepened(seq, one)

    def _deepened(self, seq: int, one: Passes) -> Passes | None:
        """The work of the whole model, from that of one layer and of two."""
        two = self._shallow(seq, 2)
        if two is None:
            return None
        num_more = num_layers_of(self._traced.resolved) - 2
        made = {name: _deepen(one[name], two[name], num_more) for name in PASSES}
        return None if None in made.values() else made  # type: ignore[return-value]

    def _shallow(self, seq: int, num_layers: int) -> Passes | None:
        try:
            traced = replace(self._traced, workload=replace(self._traced.workload, seq=seq))
            return with_few_layers(traced, num_layers).trace(None).work
        except (VramfitError, AttributeError):
            return None


def _calls(stretch: StretchTemplate) -> Calls:
    return [(work, phase, num) for (work, phase), num in stretch.calls.items()]


def _figures(work: WorkTemplate) -> tuple[Any, ...]:
    return tuple(getattr(work, name) for name in WorkTemplate.__slots__)


def _pairs(left: Calls, right: Calls) -> Iterator[tuple[bool, int, int]]:
    """Of calls in order: whether they do the same, and how often each comes."""
    for (a, a_phase, a_num), (b, b_phase, b_num) in zip(left, right, strict=True):
        yield (a_phase, _figures(a)) == (b_phase, _figures(b)), a_num, b_num


def _deepen(one: list[StretchTemplate], two: list[StretchTemplate], num_more: int) -> list[StretchTemplate] | None:
    """Stretches with so many more layers than two; None where the second does something that the first does not."""
    if len(one) != len(two) or any(len(a.calls) != len(b.calls) for a, b in zip(one, two, strict=True)):
        return None
    made = []
    for a, b in zip(one, two, strict=True):
        left, right = _calls(a), _calls(b)
        if not all(alike for alike, _, _ in _pairs(left, right)):
            return None
        deep = StretchTemplate()
        deep.waits = b.waits
        nums = (b_num + num_more * (b_num - a_num) for _, a_num, b_num in _pairs(left, right))
        deep.calls = {(work, phase): num for (work, phase, _), num in zip(right, nums, strict=True)}
        made.append(deep)
    return made


def _called_alike(left: list[StretchTemplate], right: list[StretchTemplate]) -> bool:
    """Whether stretches call the same operators as often and in the same order, on tensors of whatever size."""
    return [(s.waits, _kinds(s)) for s in left] == [(s.waits, _kinds(s)) for s in right]


def _kinds(stretch: StretchTemplate) -> list[tuple[Any, ...]]:
    """Calls by all but sizes; views by no name, since a part may happen to be the whole."""
    return [
        ("" if work.kind == "none" else work.operator, work.kind, work.dtype, work.num_launches, phase, num)
        for work, phase, num in _calls(stretch)
    ]


def _as_often(stretches: list[StretchTemplate], whole: list[StretchTemplate]) -> list[StretchTemplate]:
    """Calls of one layer, as often as the whole model makes them."""
    made = []
    for one, all_of_them in zip(stretches, whole, strict=True):
        deep = StretchTemplate()
        deep.waits = one.waits
        deep.calls = dict(zip(one.calls, all_of_them.calls.values(), strict=True))
        made.append(deep)
    return made


def _same(left: list[StretchTemplate], right: list[StretchTemplate]) -> bool:
    """Whether stretches do the same, call by call and in the same order."""
    if [(len(s.calls), s.waits) for s in left] != [(len(s.calls), s.waits) for s in right]:
        return False
    pairs = (_pairs(_calls(a), _calls(b)) for a, b in zip(left, right, strict=True))
    return all(alike and a_num == b_num for found in pairs for alike, a_num, b_num in found)


LEAST_LAYERS = 2
"""Layers that wait in host memory come to two slots: from two on, more of them take no more of the device."""


def num_layers_of(resolved: ResolvedModel) -> int:
    """Layers by the configuration; 0 where it does not say."""
    return getattr(resolved.config, "num_hidden_layers", None) or 0


def with_few_layers(traced: TracedWorkload, num_layers: int) -> TracedWorkload:
    """The same workload of a model with so many layers."""
    config = copy.deepcopy(traced.resolved.config)
    config.num_hidden_layers = num_layers
    return replace(traced, resolved=replace(traced.resolved, config=config))


def least_peaks(traced: TracedWorkload, micro_batch: int, traced_at: int) -> dict[str, int]:
    """Part of the run → what live requests add up to at least; empty where only a trace of all layers would say.

    Every layer adds weights, gradients, state and what is kept for backward, and none takes anything away: two layers
    ask for no more than all of them.

    Args:
        micro_batch: samples of a pass.
        traced_at: a micro-batch whose trace serves it.
    """
    workload, resolved = traced.workload, traced.resolved
    if resolved.module is not None or workload.num_gpus > 1 or num_layers_of(resolved) < WORTHWHILE_LAYERS:
        return {}
    if workload.num_checkpointed is not None or isinstance(workload.freeze, tuple):
        return {}
    if workload.num_frozen is not None:  # one that learns, above one that does not
        traced = replace(traced, workload=replace(workload, freeze=1))
    try:
        few = with_few_layers(traced, LEAST_LAYERS)
        template = few.trace(None if traced_at > 1 else 1)
    except (VramfitError, AttributeError):
        return {}
    return peaks_of_parts(template.instantiate(micro_batch, few.order(1, micro_batch)))
