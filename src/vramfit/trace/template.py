"""`StreamTemplate`: a traced run whose sizes are functions of the batch; `instantiate`, which fixes one; and
`order_of`, the order in which a run goes through what was traced."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vramfit.cuda.kernels.script import CudaProfile, Kernel, KernelCall, Script, TensorSpec
from vramfit.records.stream import MarkKind, Origin, Phase, Stream, StreamMark, Work, WorkSegment
from vramfit.step.joint import END, FIRST, LOSS, ROOM
from vramfit.techniques.offloading.gradient_slots import pinned_bytes
from vramfit.trace.work import Affine, Polynomial, StretchTemplate, WorkTemplate, at, evaluate
from vramfit.workload import Workload

STEPS = ("first", "steady")
TRACED_MICRO_BATCHES = 2
"""The first makes the gradients, the second adds to them; any further one repeats the second."""
MAX_REPEATED = 16
"""Micro-batches after the first that are replayed: they are all alike, and soon change nothing any more."""
FEWEST_SAMPLES = 2
"""A trace for every batch serves from two samples on; a last micro-batch of one is taken for two."""
GRAPH_STREAM = 7
"""Stands for the memory of recorded passes: no other stream's blocks are in it."""
RECORDING_STREAM = 8
"""Passes are captured on a stream of their own."""
NUM_THREADS = 2
"""Of a pass: forward runs in one, backward in another, each with workspaces of its own."""


@dataclass(frozen=True, slots=True)
class SpecTemplate:
    """A `TensorSpec` before the batch is known."""

    shape: tuple[Affine, ...]
    stride: tuple[Affine, ...]
    dtype: str
    itemsize: int

    def at(self, batch: int) -> TensorSpec:
        return TensorSpec(
            tuple(at(n, batch) for n in self.shape),
            tuple(at(n, batch) for n in self.stride),
            self.dtype,
            self.itemsize,
        )


@dataclass(frozen=True, slots=True, eq=False)
class CallTemplate:
    """A kernel call before the batch is known; compared by identity, since equal calls share one."""

    operator: str
    kernel: Kernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[SpecTemplate | None, ...]
    sizes: tuple[Polynomial, ...]

    def script(self, batch: int, profile: CudaProfile) -> list[tuple[str, int, int]]:
        """The kernel's requests at this batch, with output sizes filled in."""
        call = KernelCall(
            self.operator,
            _fix(self.args, batch),
            _fix(self.kwargs, batch),
            tuple(None if o is None else o.at(batch) for o in self.outputs),
            profile,
        )
        script = Script()
        self.kernel(call, script)
        return [(k, i, evaluate(self.sizes[i], batch)) if k == "out" else (k, i, n) for k, i, n in script.steps]


@dataclass(slots=True)
class Request:
    """A tensor's storage comes to be."""

    id: int
    size: Polynomial
    origin: int
    cuda_stream: int = 0


@dataclass(slots=True)
class Release:
    """A tensor's storage goes."""

    id: int


@dataclass(slots=True)
class Launch:
    """A kernel with requests of its own; `outputs[i]` is the id of its i-th output, 0 for none."""

    call: CallTemplate
    outputs: tuple[int, ...]
    origin: int


@dataclass(slots=True)
class Notice:
    """Something the driver notices: a library is loaded, or what is cached is given back."""

    kind: MarkKind
    name: str


@dataclass(slots=True)
class Part:
    """The run goes on to another part."""

    name: str


@dataclass(slots=True)
class Did:
    """Work that was done between two requests; only while a pass is being unrolled."""

    work: WorkTemplate
    phase: Phase
    num_calls: int


@dataclass(slots=True)
class Waited:
    """The program waited for the device; only while a pass is being unrolled."""


# entries are made by the ten thousand, and a frozen one takes three times as long to make; nothing writes to them
Entry = Request | Release | Launch | Notice | Part | Did | Waited
Turn = tuple[str, str | None] | tuple[str, str | None, int]
"""A segment's turn in a run: its name, the phase that begins there or None, and samples where they are other ones."""


@dataclass(slots=True)
class StreamTemplate:
    """What a run asks of memory, for any batch: named segments, each of which can be repeated."""

    profile: CudaProfile
    probe: int | None
    """The batch it was traced at, when sizes are functions of it; None when traced at a real batch."""
    segments: dict[str, list[Entry]] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)
    work: dict[str, list[StretchTemplate]] = field(default_factory=dict)
    """What the steady step's segments do on the device, stretch by stretch."""
    host_bytes: int = 0
    """What offloading holds in host memory, whatever the batch."""
    host_inputs: tuple[int, ...] = ()
    """Bytes of each layer's input that waits there, at the batch of the trace."""
    gradient_bytes: int = 0
    """What several GPUs add up in a step."""
    gathered_bytes: int = 0
    """What each of several GPUs gathers for a pass, where each has a part of the model."""
    num_gathers: int = 0
    """Groups that are gathered for a pass, one after another."""
    gathered_peak_bytes: int = 0
    """The most of it that is there at once, in a forward pass."""
    num_host_weights: int = 0
    """Weights whose masters and moments wait there."""
    streams_step: bool = False
    """Whether these come to the device to be stepped."""
    next_id: int = 1
    """A number that no block has."""
    recorded: str | None = None
    """How segments begin whose passes are recorded: graphs have memory of their own, which they share."""

    def repeat_second_pass(self) -> None:
        """Take the second micro-batch of the first step for that of every step: it leaves nothing behind."""
        first, steady = (f"{step}.micro1" for step in STEPS)
        if first in self.segments:
            self.segments[steady] = self.segments[first]
            self.work[steady] = self.work.pop(first)

    def host_bytes_at(self, batch: int) -> int:
        """What offloading holds in host memory at a real batch."""
        sizes = self.host_inputs if self.probe is None else [size * batch // self.probe for size in self.host_inputs]
        return self.host_bytes + sum(map(pinned_bytes, sizes))

    def work_at(self, batch: int, order: Iterable[tuple[str, int]], *, tf32: bool = False) -> Work:
        """The work of a step at a real batch.

        Args:
            batch: samples a forward pass sees.
            order: segments in the order they run, each with how often.
            tf32: whether products of float32 may run on TF32 tensor cores.
        """
        return Work(
            segments=tuple(
                WorkSegment(stretches=tuple(s.at(batch) for s in self.work[name]), num_repeats=num_repeats)
                for name, num_repeats in order
                if num_repeats
            ),
            tf32=tf32,
        )

    def instantiate(self, batch: int, order: Iterable[Turn]) -> Stream:
        """The stream at a real batch.

        Args:
            batch: samples a forward pass sees.
            order: segments in the order they run, each with the name of the phase that begins there, or
                None to go on in the phase before; and with samples of its own, where it sees another number.
        """
        writer = _Writer(self)
        for name, phase, *own in order:
            if phase is not None:
                writer.marks.append(StreamMark(len(writer.events), "phase", phase))
            recorded = self.recorded is not None and name.startswith(self.recorded)
            writer.cuda_stream = GRAPH_STREAM if recorded else 0
            writer.write(self.segments[name], own[0] if own else batch)
        return Stream(
            events=writer.events,
            request_origins=writer.request_origins,
            origins=self.origins,
            marks=writer.marks,
            parts=writer.parts,
            request_streams=writer.request_streams,
        )


class _Writer:
    """Writes entries as numbered requests; an id that comes again is a new request."""

    def __init__(self, template: StreamTemplate) -> None:
        self._profile = template.profile
        self._scripts: dict[tuple[CallTemplate, int], list[tuple[str, int, int]]] = {}
        self._sizes: dict[int, dict[Polynomial, int]] = {}
        self._request_of: dict[int, int] = {}
        self.events: list[int] = []
        self.request_origins: list[int] = []
        self.marks: list[StreamMark] = []
        self.parts: list[tuple[int, str]] = []
        self.request_streams: dict[int, int] = {}
        self.cuda_stream = 0
        """Of requests that name none."""

    def write(self, entries: list[Entry], batch: int) -> None:
        events, origins, request_of = self.events, self.request_origins, self._request_of
        sizes = self._sizes.setdefault(batch, {})
        for entry in entries:
            kind = type(entry)
            if kind is Request:
                size = sizes.get(entry.size)  # type: ignore[union-attr]
                if size is None:
                    size = sizes[entry.size] = evaluate(entry.size, batch)  # type: ignore[union-attr]
                request_of[entry.id] = len(origins)  # type: ignore[union-attr]
                cuda_stream = entry.cuda_stream or self.cuda_stream  # type: ignore[union-attr]
                if cuda_stream:
                    self.request_streams[len(origins)] = cuda_stream
                origins.append(entry.origin)  # type: ignore[union-attr]
                events.append(size)
            elif kind is Release:
                events.append(-request_of.pop(entry.id))  # type: ignore[union-attr]
            elif kind is Launch:
                self._launch(entry, batch)  # type: ignore[arg-type]
            elif kind is Part:
                self.parts.append((len(events), entry.name))  # type: ignore[union-attr]
            else:
                self.marks.append(StreamMark(len(events), entry.kind, entry.name))  # type: ignore[union-attr]

    def _launch(self, launch: Launch, batch: int) -> None:
        script = self._scripts.get((launch.call, batch))
        if script is None:
            script = self._scripts[launch.call, batch] = launch.call.script(batch, self._profile)
        temporaries: dict[int, int] = {}
        for kind, index, size in script:
            if kind == "free":
                self.events.append(-temporaries.pop(index))
                continue
            if kind == "out":
                if not launch.outputs[index]:
                    continue
                self._request_of[launch.outputs[index]] = len(self.request_origins)
            else:
                temporaries[index] = len(self.request_origins)
            if self.cuda_stream:
                self.request_streams[len(self.request_origins)] = self.cuda_stream
            self.request_origins.append(launch.origin)
            self.events.append(size)


def _fix(value: Any, batch: int) -> Any:
    if isinstance(value, SpecTemplate):
        return value.at(batch)
    if isinstance(value, tuple):
        return tuple(_fix(v, batch) for v in value)
    if isinstance(value, dict):
        return {k: _fix(v, batch) for k, v in value.items()}
    return value


def recording_workspaces(profile: CudaProfile) -> tuple[int, ...]:
    """What cuBLAS keeps for the stream that passes are recorded on, whether or not any is recorded at the moment."""
    return (profile.cublas_workspace_bytes, profile.cublaslt_workspace_bytes) * NUM_THREADS


def num_traced(workload: Workload) -> int:
    """Micro-batches of a step that are unlike each other: with shards, the last one scatters the gradients."""
    return min(workload.num_passes, TRACED_MICRO_BATCHES + workload.shards)


def order_of(workload: Workload, num_steady: int = 1, micro_batch: int | None = None) -> list[Turn]:
    """The segments of a run in order, with the phases they begin.

    Args:
        num_steady: steps after the first.
        micro_batch: what a forward pass sees; where it is the workload's own and the batch does not divide, the last
            micro-batch of a step is smaller.
    """
    order: list[Turn] = [("load", "load"), ("inputs", None)]
    for index in range(1 + num_steady):
        step = STEPS[min(index, 1)]
        phase = "first_step" if index == 0 else "steady_step" if index == 1 else f"steady_step_{index}"
        turns: list[Turn] = []
        for kind, before, after in rounds_of(workload):
            turns += [(f"{step}.{name}", None) for name in before]
            turns += _passes(f"{step}.{kind}", workload, micro_batch)
            turns += [(f"{step}.{name}", None) for name in after]
        order += [(turns[0][0], phase, *turns[0][2:]), *turns[1:]]
        if workload.trains:
            order.append((f"{step}.optimizer", None))
            order += [("graphs", None)] * (workload.captures_graphs and index == 0)
    return order


def rounds_of(workload: Workload) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """The kinds of passes that a step makes, one after another, and what it does before and after each kind."""
    if not workload.runs_twice:
        return [("micro", (), ())]
    return [(FIRST, (ROOM,), (LOSS,)), ("micro", (), (END,))]


def _passes(kind: str, workload: Workload, micro_batch: int | None) -> list[Turn]:
    """The passes of a step, of one kind."""
    first: Turn = (f"{kind}0", None)
    return [first, *_further(kind, workload, micro_batch)] if workload.trains else [first]


def _further(kind: str, workload: Workload, micro_batch: int | None) -> list[Turn]:
    """The micro-batches of a step after its first."""
    num_further = workload.num_passes - 1
    turns: list[Turn] = [(f"{kind}1", None)] * min(num_further, MAX_REPEATED)
    if turns and workload.shards:
        turns[-1] = (f"{kind}{num_traced(workload) - 1}", None)
    if num_further and micro_batch is not None and micro_batch == workload.micro_batch:
        last = max(workload.share - num_further * micro_batch, FEWEST_SAMPLES)
        if workload.is_packed:  # each row before it may have been left with room for less than a sample
            last += num_further
        if last < micro_batch:
            turns[-1] = (turns[-1][0], None, last)
    return turns
