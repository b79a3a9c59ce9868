"""Workloads whose stream is known: one trace serves every batch, and a process makes it once.

A workload of two layers (`with_few_layers`) is traced in a tenth of the time and gives a lower bound.
"""

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock
from typing import Any

from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.replay import Mark, replay
from vramfit.cuda.kernels.script import CudaProfile
from vramfit.errors import TraceError, VramfitError
from vramfit.estimator.peaks import peak_requested, peaks_of_parts
from vramfit.models.resolve import ResolvedModel
from vramfit.records.stream import Stream
from vramfit.settings import SETTINGS, seen_in_trace
from vramfit.trace.comparison import compared_stream, is_of_comparison, trace_comparison, vectors_bytes
from vramfit.trace.run import Conditions, passes_are_alike, trace
from vramfit.trace.template import FEWEST_SAMPLES, StreamTemplate, Turn, num_traced, order_of
from vramfit.workload import Workload


def depends_on_headroom(workload: Workload) -> bool:
    """Whether the optimizer splits its step by the memory that is free below the peak."""
    return workload.trains and workload.num_gpus > 1 and not workload.steps_in_place


def headrooms_of(stream: Stream, options: AllocatorOptions) -> tuple[int, int]:
    """Bytes below the peak that the optimizer finds free in the first step and in the one after it."""
    begins = [index for (_, before), (index, part) in pairwise(stream.parts) if before == part == "optimizer"][:2]
    marks = [Mark(index=0, kind="phase", name="window 0")]
    for number, index in enumerate(begins):
        names = (f"now {number}", f"window {number + 1}")
        marks += [Mark(index=index, kind="phase", name=name) for name in names]
    marks += [Mark(index=m.index, kind="driver", name=m.name) for m in stream.marks if m.kind == "driver"]
    found = replay(stream.events, marks, streams=stream.request_streams, options=options)
    peaks = {phase.name: phase.peak_allocated_bytes for phase in found.phases}
    before = max(peaks["window 0"], peaks["now 0"])
    first = before - peaks["now 0"]
    return first, max(before, peaks["window 1"]) - peaks["now 1"]


_lock = Lock()
_num_inside = 0
_was_enabled = True


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection inside; when the last one is out, in whatever thread, it is as before the first."""
    global _num_inside, _was_enabled
    with _lock:
        if not _num_inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside and _was_enabled:
                gc.enable()


NUM_STEADY_STEPS = 2
"""Steps replayed after the first: fragmentation may still move a little in the second of them."""
MAX_KEPT = 24

_kept: OrderedDict[Any, StreamTemplate] = OrderedDict()
_compared: OrderedDict[Any, tuple[StreamTemplate, StreamTemplate]] = OrderedDict()
"""A template, by its identity, and texts of a step → the template, and the one with their comparison."""


@dataclass(frozen=True, slots=True)
class TracedWorkload:
    """A workload whose stream is known for any batch."""

    workload: Workload
    resolved: ResolvedModel
    profile: CudaProfile
    num_resident: int = 0
    """Layers that stay on the device where weights are offloaded."""
    num_sequences: int | None = None
    """At most, in a packed row; None: the batch size of the step."""
    num_texts: int | None = None
    """Texts whose vectors are compared in a step; None: as many as the workload has."""
    headrooms: tuple[int, int] = (0, 0)
    """Headroom of the optimizer in bytes, in the first and in later steps."""

    @property
    def options(self) -> AllocatorOptions:
        """How the allocator is set up for this workload."""
        return AllocatorOptions(expandable_segments=self.workload.has_expandable_segments)

    def stream(self, micro_batch: int, num_steady: int = NUM_STEADY_STEPS) -> Stream:
        """The stream of a cold process at a micro-batch."""
        return self.template(micro_batch).instantiate(micro_batch, self.order(num_steady, micro_batch))

    def order(self, num_steady: int = NUM_STEADY_STEPS, micro_batch: int | None = None) -> list[Turn]:
        """The segments of a run in order, with the phases they begin."""
        return order_of(self.workload, num_steady, micro_batch)

    def template(self, micro_batch: int) -> StreamTemplate:
        """The trace for every batch; for one sample its own, since dimensions of 1 behave differently; and for a pass
        that compares all vectors, whose work grows with their square."""
        w = self.workload
        if w.lengths is not None:
            return self.trace(micro_batch)
        if micro_batch == 1 or (w.is_joint and not w.runs_twice):
            found = self._kept_trace(micro_batch)
        else:
            try:
                found = self._kept_trace(None)
            except TraceError:
                # sizes beyond 63 bits, or a model that looks at its batch: a trace at the real batch decides
                found = self._kept_trace(micro_batch)
        return self._with_comparison(found, micro_batch) if w.runs_twice else found

    def _with_comparison(self, template: StreamTemplate, micro_batch: int) -> StreamTemplate:
        """The template with the comparison of all vectors of a step in micro-batches of this size."""
        w = self.workload
        own = w if micro_batch == w.micro_batch else w.with_batch(micro_batch * w.num_passes * w.num_gpus)
        num_texts = self.num_texts or own.step_texts
        key = (id(template.segments), num_texts, template.profile)
        if key not in _compared:
            _compared[key] = (template, trace_comparison(self.resolved, w, template, num_texts))
            while len(_compared) > MAX_KEPT:
                _compared.popitem(last=False)
        return _compared[key][1]

    def vectors_bytes(self) -> int:
        """What the vectors that a step compares and their gradients take."""
        return vectors_bytes(self.resolved, self.workload)

    def compared_bytes(self) -> int:
        """What a step asks for at once to compare its texts, beside the weights."""
        return peak_requested(compared_stream(self.resolved, self.workload, self.profile))

    def _kept_trace(self, batch: int | None) -> StreamTemplate:
        if self.resolved.module is not None:  # a module may change between two calls
            return self.trace(batch)
        alike = (num_traced(self.workload), *seen_in_trace(self.workload, "layers", "step"))
        traced_for = (*self._dialect(), batch, alike, self.num_resident, self.headrooms)
        key: tuple[Any, ...] = (self.resolved.config.to_json_string(), repr(self.resolved.parts), *traced_for)
        packed = (self.num_sequences, self.workload.num_passes) if self.workload.is_packed else ()
        if self.workload.holds_teacher:
            key = (*key, self.workload.teacher_written_ns)
        template = _kept.pop((*key, *packed), None)
        if template is None:
            template = self.trace(batch)
        _kept[(*key, *packed)] = template
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)
        return template if template.profile == self.profile else replace(template, profile=self.profile)

    def _dialect(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What of a GPU and a torch release decides which operators run; how many multiprocessors there are only
        decides what single kernels ask for, which is filled in with the batch."""
        return self.profile.compute_capability, self.profile.torch_version

    def work_by_length(self, seq: int, micro_batch: int, passes: Callable[[], StreamTemplate]) -> StreamTemplate:
        """A template with the work of a step whose passes have another length; what it asks of memory is left out where
        the passes alone were traced.

        Args:
            passes: gives the trace of passes of that length.
        """
        if seq == self.workload.seq or micro_batch < FEWEST_SAMPLES or not passes_are_alike(self.workload):
            return replace(self, workload=replace(self.workload, seq=seq)).template(micro_batch)
        whole, traced = self.template(micro_batch), passes().work
        if self.workload.is_joint:
            traced = {name: work for name, work in traced.items() if not is_of_comparison(name)}
        return replace(whole, segments={}, origins=[], work={**whole.work, **traced})

    def trace(self, batch: int | None, *, passes_at: int | None = None) -> StreamTemplate:
        """A trace of its own: for every micro-batch from 2 on, or for the one given; of whole steps, or of the passes
        alone at another length."""
        conditions = Conditions(
            num_resident=self.num_resident,
            num_sequences=self.num_sequences,
            headrooms=self.headrooms,
            passes_only=passes_at is not None,
        )
        workload = self.workload if passes_at is None else replace(self.workload, seq=passes_at)
        return trace(self.resolved, workload, self.profile, batch=batch, conditions=conditions)


WORTHWHILE_LAYERS = 10
"""With fewer, a trace of the whole model is as quick."""
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
    try:
        workload = replace(workload, **{s.keyword: s.in_few_layers(workload) for s in SETTINGS.values()})
        few = with_few_layers(replace(traced, workload=workload), LEAST_LAYERS)
        template = few.trace(None if traced_at > 1 else 1)
    except (VramfitError, AttributeError, LookupError):
        return {}
    return peaks_of_parts(template.instantiate(micro_batch, few.order(1, micro_batch)))
