"""Forward passes over a data set: batches by tokens, the longest first, halved and done again where memory runs out."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from vramfit.errors import RecoveryExhausted
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.distributed.ranks import Unanimous, Votes
from vramfit.runtime.random_state import RandomState
from vramfit.runtime.training.place import Place
from vramfit.step.heads import model_inputs
from vramfit.step.inputs import Batch, each_tensor
from vramfit.step.out_of_memory import free_memory, is_out_of_memory
from vramfit.techniques import packing
from vramfit.techniques import precision as precisions
from vramfit.workload import Precision

MAX_SAMPLES = 1024
"""Of one batch, however short they are."""
MAX_HOST_BYTES = 64 * 2**20
"""Outputs up to this size are looked at on the host; larger ones, a logit for every word of the vocabulary, stay on
the device."""

OnOutput = Callable[[Any, Batch, list[int]], None]
"""Takes the output for a batch, the batch beside it, and the numbers of its samples."""
OnProgress = Callable[[int, int], None]


class Inference:
    """Runs a model over samples, learning nothing.

    Args:
        model: on its device; it is put into evaluation mode for the time, and its generators are left as they were.
        place: where it runs.
        max_tokens: tokens of a batch at most, padding included; one sample at the least.
        precision: as in training: `amp-*` runs under autocast.
        votes: of the processes that each have a part of the model, and pass every batch together; None for one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        place: Place,
        *,
        max_tokens: int,
        precision: Precision = "fp32",
        votes: Votes | None = None,
    ) -> None:
        self._votes: Votes = Unanimous() if votes is None else votes
        self._is_shared = votes is not None
        self.model = model
        self.max_tokens = max_tokens
        self.num_recoveries = 0
        """How often a batch ran out of memory and was halved."""
        self._place = place
        self._dtype = precisions.autocast_dtype(precision)
        words = getattr(model, "get_output_embeddings", lambda: None)()
        self._packs = packing.is_applied(model) and words is None  # a logit for every word is not laid out twice

    def run(self, samples: Samples, on_output: OnOutput, on_progress: OnProgress = lambda done, total: None) -> None:
        """Pass all samples through the model, longest first.

        Args:
            on_output: called once for each batch that went through.
            on_progress: called with samples done and samples to do.

        Raises:
            RecoveryExhausted: a single sample does not fit.
        """
        was_training, generators = self.model.training, RandomState.now()
        self.model.eval()
        try:
            self._run(samples, on_output, on_progress)
        finally:
            self.model.train(was_training)
            generators.restore()

    def _run(self, samples: Samples, on_output: OnOutput, on_progress: OnProgress) -> None:
        waiting = deque(self._groups(samples))
        done, failure = 0, ""
        while waiting:
            group = waiting.popleft()
            failure = self._try(samples, group, on_output)
            if not failure:
                done += len(group)
                on_progress(done, len(samples))
                continue
            free_memory()
            self.num_recoveries += 1
            if len(group) == 1:
                raise RecoveryExhausted(
                    f"one sample of {samples.lengths[group[0]]} tokens does not fit: {failure}",
                    attempts=[failure],
                    hint="free the GPU, give more memory, or cut the sequences: --seq",
                )
            self.max_tokens = max(self.max_tokens // 2, 1)
            left = [*group, *(i for other in waiting for i in other)]
            waiting = deque(self._groups(samples, left))

    def _bring(self, batch: Batch) -> Batch:
        packed = packing.pack(batch, self.model) if self._packs else batch
        return each_tensor(packed, lambda value: value.to(self._place.device))

    def _groups(self, samples: Samples, chosen: Sequence[int] | None = None) -> list[list[int]]:
        lengths = samples.lengths if self._packs else samples.widths
        return group_by_length(lengths, self.max_tokens, chosen=chosen, packs=self._packs)

    def _try(self, samples: Samples, group: list[int], on_output: OnOutput) -> str:
        """One batch; gives what was said where memory ran out, and nothing where it did not."""
        on_host = samples.collate(group)
        autocast = torch.autocast(self._place.device.type, dtype=self._dtype) if self._dtype else nullcontext()
        try:
            with self._place.active(), torch.no_grad():
                batch = self._bring(on_host)
                with autocast:
                    output = self.model(**model_inputs(batch))
                output = packing.unpack(output, batch) if self._packs else output
                small = self._is_shared or _num_bytes(output) <= MAX_HOST_BYTES
                if small:
                    output = type(output)(**{k: v.cpu() for k, v in output.items() if isinstance(v, torch.Tensor)})
                else:
                    on_output(output, each_tensor(on_host, lambda value: value.to(self._place.device)), group)
            self._votes.agree()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._votes.report(error)
            return str(error).splitlines()[0]
        if small:  # on the host nothing runs out half-way
            on_output(output, on_host, group)
        return ""


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
