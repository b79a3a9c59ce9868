"""Forward passes over a data set: batches by tokens, the longest first, halved and done again where memory runs out.

On a GPU the host never waits for the batch it has just sent: it reads what came of the one before, and makes the next.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from vramfit.errors import RecoveryExhausted
from vramfit.runtime.device import RunDevice
from vramfit.runtime.model_state import Failed, ModelState
from vramfit.step.plain import Batch, bring, each_tensor
from vramfit.step.recovery import RandomState
from vramfit.step.splitting import Unanimous, Votes
from vramfit.tasks.parts.losses import model_inputs
from vramfit.techniques import packing
from vramfit.workload import Workload

MAX_SAMPLES = 1024
"""Of one batch, however short they are."""
NUM_FLYING = 1
"""Batches whose output is not looked at yet when the next one is sent."""
MAX_HOST_BYTES = 64 * 2**20
"""Outputs up to this size are looked at on the host; larger ones, a logit for every word of the vocabulary, stay on
the device."""


class Rows(Protocol):
    """Tokenized texts: `Samples`, or what another package has tokenized."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each."""

    @property
    def widths(self) -> Sequence[int]:
        """Columns of a batch in which it is the longest."""

    def __len__(self) -> int: ...

    def collate(self, indices: Sequence[int]) -> Batch:
        """A batch on the host, padded on the right; or one row, as `packing.pack` makes it, for a model that packs."""


OnOutput = Callable[[Any, Batch, list[int]], None]
"""Takes the output for a batch, the batch beside it, and the numbers of its samples."""
OnPartOutput = Callable[[Any, Any, Batch, list[int]], None]
"""The same with the part that the samples are of."""
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Passed:
    """A batch that went through the model; its output may still be on the way to the host."""

    samples: Rows
    rows: list[int]
    batch: Batch
    output: Any = None
    """None where it was looked at on the device."""
    is_packed: bool = False
    """Whether its output has one row for all sequences, which are to have one each."""
    arrival: torch.cuda.Event | None = None


class Inference:
    """Runs a model over samples, learning nothing.

    Args:
        model: on its device; it is put into evaluation mode for the time, and its generators are left as they were.
        run_device: where it runs.
        max_tokens: tokens of a batch at most, padding included; one sample at the least. Of a model that takes packed
            batches, real tokens.
        workload: whose precision is taken: `amp-*` runs under autocast; None is fp32.
        votes: of the processes that each have a part of the model, and pass every batch together; None for one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        run_device: RunDevice,
        *,
        max_tokens: int,
        workload: Workload | None = None,
        votes: Votes | None = None,
    ) -> None:
        self._votes: Votes = Unanimous() if votes is None else votes
        self._is_shared = votes is not None
        self.model = model
        self.max_tokens = max_tokens
        self.num_recoveries = 0
        """How often a batch ran out of memory and was halved."""
        self._alone: tuple[int, int] | None = None
        """The sample that failed last in a batch of its own; memory that was freed since may be enough for it."""
        self._run_device = run_device
        self._state = ModelState(model)
        self._dtype = None if workload is None else workload.autocast_dtype
        words = getattr(model, "get_output_embeddings", lambda: None)()
        self.packs = packing.is_applied(model) and words is None  # unpacking would copy logits of every word
        """Whether sequences lie end to end, so that padding takes nothing."""

    def run(
        self,
        samples: Rows,
        on_output: OnOutput,
        on_progress: OnProgress = lambda done, total: None,
        *,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Pass samples through the model, longest first.

        Args:
            on_output: called once for each batch that went through.
            on_progress: called with samples done and samples to do.
            rows: which, by number; None takes all.

        Raises:
            RecoveryExhausted: a single sample does not fit.
        """
        self.run_parts(
            [samples],
            lambda _, output, batch, rows: on_output(output, batch, rows),
            lambda done: on_progress(done, len(samples) if rows is None else len(rows)),
            rows=rows,
        )

    def run_parts(
        self,
        parts: Iterable[Rows],
        on_output: OnPartOutput,
        on_progress: Callable[[int], None] = lambda done: None,
        *,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Pass samples through the model that come part by part, such as those that are still being tokenized.

        Args:
            on_output: called with the part too.
            on_progress: called with samples done.
            rows: of every part, which samples, by number; None takes all.

        Raises:
            RecoveryExhausted: a single sample does not fit.
        """
        was_training, generators = self.model.training, RandomState.now()
        self._alone = None
        if any(module.training for module in self.model.modules()):  # setting a mode takes ten times as long
            self.model.eval()
        done = 0
        try:
            for passed in self._passes(parts, on_output, rows):
                _land(passed, on_output)
                done += len(passed.rows)
                on_progress(done)
        finally:
            if was_training:
                self.model.train()
            generators.restore()

    def _passes(self, parts: Iterable[Rows], on_output: OnPartOutput, rows: Sequence[int] | None) -> Iterator[_Passed]:
        """Batches that went through, each given only when the next one is on its way."""
        flying: deque[_Passed] = deque()
        for samples in parts:
            waiting = deque(self._groups(samples, rows))
            while waiting:
                group = waiting.popleft()
                passed = self._try(samples, group, on_output)
                if isinstance(passed, Failed):
                    left = [*group, *(i for other in waiting for i in other)]
                    waiting = deque(self._smaller_groups(samples, group, left, passed.message))
                    continue
                flying.append(passed)
                if len(flying) > NUM_FLYING:
                    yield flying.popleft()
        yield from flying

    def _smaller_groups(self, samples: Rows, group: list[int], left: list[int], failure: str) -> list[list[int]]:
        """What is left to do, in half the tokens a batch; one sample is tried again by itself, once."""
        self.num_recoveries += 1
        if len(group) == 1 and self._alone == (id(samples), group[0]):
            raise RecoveryExhausted(
                f"one sample of {samples.lengths[group[0]]} tokens does not fit: {failure}",
                attempts=[failure],
                hint="free the GPU, give more memory, or cut the sequences: --seq",
            )
        self._alone = (id(samples), group[0]) if len(group) == 1 else None
        self.max_tokens = max(self.max_tokens // 2, 1)
        return self._groups(samples, left)

    def _groups(self, samples: Rows, chosen: Sequence[int] | None = None) -> list[list[int]]:
        if not self.packs:
            return group_by_length(samples.widths, self.max_tokens, chosen=chosen)
        rows = range(len(samples)) if chosen is None else chosen
        most = even_tokens([samples.lengths[i] for i in rows], self.max_tokens)
        return group_by_length(samples.lengths, most, chosen=rows, packs=True)

    def _try(self, samples: Rows, group: list[int], on_output: OnPartOutput) -> _Passed | Failed:
        """One batch."""
        self._state.keep()
        return self._state.attempt(lambda: self._pass(samples, group, on_output), see=self._votes.report)

    def _pass(self, samples: Rows, group: list[int], on_output: OnPartOutput) -> _Passed:
        on_host = samples.collate(group)
        packs = self.packs and "cu_seq_lens_q" not in on_host
        inputs = model_inputs(packing.pack(on_host, self.model) if packs else on_host)
        autocast = torch.autocast(self._run_device.device.type, dtype=self._dtype) if self._dtype else nullcontext()
        passed = _Passed(samples, group, on_host)
        with self._run_device.active(), torch.no_grad():
            batch = each_tensor(inputs, self._bring)
            with autocast:
                output = self.model(**batch)
            if self._is_shared or _num_bytes(output) <= MAX_HOST_BYTES:
                passed = self._send(output, replace(passed, is_packed=packs))
            else:
                padded = each_tensor(on_host, self._bring)
                output = output if not packs else packing.unpack(output, padded["attention_mask"])
                on_output(samples, output, padded, group)
        self._votes.agree()
        return passed

    def _bring(self, value: torch.Tensor) -> torch.Tensor:
        return bring(value, self._run_device.device)

    def _send(self, output: Any, passed: _Passed) -> _Passed:
        """The output on its way to the host, where nothing runs out half-way."""
        tensors = {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
        if self._run_device.device.type != "cuda":
            return replace(passed, output=type(output)(**{name: value.cpu() for name, value in tensors.items()}))
        made = {name: torch.empty_like(value, device="cpu", pin_memory=True) for name, value in tensors.items()}
        for name, value in tensors.items():
            made[name].copy_(value, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(self._run_device.device))
        return replace(passed, output=type(output)(**made), arrival=arrival)


def _land(passed: _Passed, on_output: OnPartOutput) -> None:
    """Hand an output over once it is there."""
    if passed.output is None:
        return
    if passed.arrival is not None:
        passed.arrival.synchronize()
    output = packing.unpack(passed.output, passed.batch["attention_mask"]) if passed.is_packed else passed.output
    on_output(passed.samples, output, passed.batch, passed.rows)


def _num_bytes(output: Any) -> int:
    return sum(value.nbytes for value in output.values() if isinstance(value, torch.Tensor))


def group_by_length(
    lengths: Sequence[int], max_tokens: int, *, chosen: Sequence[int] | None = None, packs: bool = False
) -> list[list[int]]:
    """Samples in batches of at most `max_tokens` tokens, like lengths together, the longest first.

    Args:
        packs: only a sample's own tokens count, and no padding.

    >>> group_by_length([3, 9, 4, 8], 18)
    [[1, 3], [2, 0]]
    """
    order = sorted(range(len(lengths)) if chosen is None else chosen, key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    num_tokens = 0
    for i in order:
        group = groups[-1] if groups else []
        longest = lengths[group[0]] if group else 0
        num_tokens = num_tokens + lengths[i] if packs else (len(group) + 1) * longest
        if not group or len(group) >= MAX_SAMPLES or num_tokens > max_tokens:
            groups.append([i])
            num_tokens = lengths[i]
        else:
            group.append(i)
    return groups


def even_tokens(lengths: Sequence[int], max_tokens: int) -> int:
    """Tokens of a packed row at which all rows are about as full: a last one with a few tokens takes as long as many.

    >>> even_tokens([10] * 11, 100)
    65
    """
    total = sum(lengths)
    num_rows = max(-(-total // max_tokens), 1)
    return min(max_tokens, total // num_rows + max(lengths))
