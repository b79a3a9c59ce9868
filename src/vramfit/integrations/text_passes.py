"""Passes over texts that a model of sentence-transformers tokenizes: rows, the tokens of a batch, what is packed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

from vramfit.errors import NoPlanFits
from vramfit.estimator.predict import estimate
from vramfit.integrations.trainer.models import TOKENS, giving_vectors
from vramfit.loader.budget import free_bytes
from vramfit.planner.choose import margin_of, max_batch
from vramfit.records.estimate import Estimate
from vramfit.runtime.data import one_ahead
from vramfit.runtime.device import RunDevice
from vramfit.runtime.inference import Inference
from vramfit.runtime.trained import MAX_PACKED_TOKENS
from vramfit.serve.engine import Ceiling
from vramfit.serve.settings import CPU_TOKENS
from vramfit.step.plain import Batch
from vramfit.tasks.parts.pooling import EmbeddingHead, EmbeddingOutput
from vramfit.techniques import packing
from vramfit.units import parse_bytes

PART_ROWS, PART_CHARACTERS = 1024, 300_000
"""Texts that are tokenized at once: about the largest batch, so that neither the GPU nor the tokenizer waits long."""
TOKEN_CHARACTERS = 6
"""Of a token at most, nearly always: what is beyond in a text is cut, and counts for nothing."""
BESIDE = ("modality", "prompt_length")
"""Features that no pass reads, unless pooling leaves a prompt out."""


class Wishes(TypedDict, total=False):
    """What calls are planned for."""

    memory: str | int | None
    gpu: str | None
    max_tokens: int | None
    packs: bool | None
    device: str | None


class Unfit(Exception):
    """Features that are no plain rows of tokens: the model's own code knows what to do with them."""


class TextRows:
    """Texts of one part.

    Args:
        features: what `preprocess` of sentence-transformers gave.
        numbers: which texts of the call they are.

    Raises:
        Unfit: something else than tokens padded on the right.
    """

    def __init__(self, features: dict[str, Any], numbers: Sequence[int]) -> None:
        mask = features.get("attention_mask")
        if not features.keys() <= {*TOKENS, *BESIDE} or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            raise Unfit
        attended = mask.numpy() != 0
        if features.get("modality", "text") != "text" or len(mask) != len(numbers) or not _is_right_padded(attended):
            raise Unfit
        self.numbers = torch.as_tensor(numbers)
        self.lengths: list[int] = attended.sum(1).tolist()
        self.widths = [packing.padded_width(length, mask.shape[1]) for length in self.lengths]
        self._features = {name: features[name] for name in TOKENS if name in features}

    def __len__(self) -> int:
        return len(self.lengths)

    def collate(self, indices: Sequence[int]) -> Batch:
        """A batch as wide as its longest text, or a little wider."""
        width = max(self.widths[i] for i in indices)
        chosen = torch.as_tensor(indices)
        return {name: value[:, :width].index_select(0, chosen) for name, value in self._features.items()}


def _is_right_padded(attended: "np.ndarray[Any, np.dtype[np.bool_]]") -> bool:
    return bool(attended[:, 0].all() and (attended[:, :-1] >= attended[:, 1:]).all())


def split_by_size(sizes: Sequence[int], max_length: int) -> list[list[int]]:
    """Numbers of texts in parts that are tokenized at once, the longest first.

    Args:
        sizes: characters of each text.
        max_length: tokens at which texts are cut.

    >>> split_by_size([3, 200_000, 150_000, 9], 10**6)
    [[1], [2, 3, 0]]
    """
    parts: list[list[int]] = []
    total = 0
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        size = min(sizes[number], TOKEN_CHARACTERS * max_length)
        total += size
        if not parts or len(parts[-1]) == PART_ROWS or total > PART_CHARACTERS:
            parts.append([])
            total = size
        parts[-1].append(number)
    return parts


def read_ahead(
    inputs: Sequence[Any], parts: Sequence[list[int]], preprocess: Callable[[list[Any]], dict[str, Any]]
) -> Iterator[TextRows]:
    """The texts of a call in parts, each tokenized while the one before it is in use.

    Args:
        inputs: texts, or pairs of them.
        parts: their numbers.
        preprocess: gives the features of some of them.

    Raises:
        Unfit: features that are no plain rows of tokens.
    """

    def read(numbers: list[int]) -> TextRows:
        return TextRows(preprocess([inputs[n] for n in numbers]), numbers)

    return one_ahead(read, parts) if len(parts) > 1 else map(read, parts)


class Vectors(torch.nn.Module):
    """An encoder and what makes vectors of texts; the encoder itself stays as it is."""

    def __init__(self, encoder: torch.nn.Module, head: EmbeddingHead) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, **batch: Any) -> EmbeddingOutput:
        ends = batch.get("cu_seq_lens_q")
        hidden = self.encoder(**batch)[0]
        made = self.head(hidden, batch.get("attention_mask"), None if ends is None else ends.long())
        return EmbeddingOutput(embedding=made)


class Key(NamedTuple):
    """What passes were planned for: where a call finds something else, they are planned anew."""

    task: str
    device: torch.device
    settings: tuple[tuple[str, str], ...]
    max_length: int
    parts: tuple[Any, ...]
    """The modules of the model, and how it pools."""

    @property
    def packs(self) -> bool:
        """Whether texts lie end to end."""
        return "packed" in dict(self.settings).values()


@dataclass(frozen=True, slots=True)
class Passes:
    """How batches go through a model."""

    key: Key
    module: Any
    """The model of transformers."""
    head: EmbeddingHead | None
    job: dict[str, Any]
    """Keywords of an estimate; none where there is nothing to fit into."""
    inference: Inference
    ceiling: Ceiling

    def estimate(self) -> Estimate | None:
        """What the largest batch takes, beside the weights; None where there is nothing to fit into."""
        if not self.job:
            return None
        with _whole(self.module, self.head):
            return estimate(self.module, batch=max(self.ceiling.num_tokens // self.key.max_length, 1), **self.job)

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Inside, the model takes texts end to end, where that was planned; it is as it was afterwards."""
        with _packed(self.module, self.key):
            yield


def plan_passes(key: Key, module: Any, head: EmbeddingHead | None, run_device: RunDevice, wishes: Wishes) -> Passes:
    """Batches of as many tokens as fit.

    Args:
        module: the model of transformers.
        head: what makes vectors of its outputs; None where they are scores already.

    Raises:
        NoPlanFits: not even one text of full length fits.
    """
    most = min(MAX_PACKED_TOKENS, wishes.get("max_tokens") or MAX_PACKED_TOKENS)
    job = _job(key, module, run_device, wishes)
    max_tokens = _fitting(module, head, job, most) if job else min(CPU_TOKENS, most)
    wrapped = module if head is None else Vectors(module, head)
    with _packed(module, key):
        inference = Inference(wrapped, run_device, max_tokens=max_tokens)
    return Passes(key, module, head, job, inference, Ceiling(max_tokens))


@contextmanager
def _packed(model: Any, key: Key) -> Iterator[None]:
    if not key.packs:
        yield
        return
    packing.apply(model, key.task)
    try:
        yield
    finally:
        packing.undo(model)


def _whole(module: Any, head: EmbeddingHead | None) -> AbstractContextManager[None]:
    """Inside, a model gives what passes give, for an estimate to see."""
    return nullcontext() if head is None else giving_vectors(module, head)


def _job(key: Key, module: Any, run_device: RunDevice, wishes: Wishes) -> dict[str, Any]:
    """Keywords of an estimate; none on a CPU that nothing is said of."""
    memory, gpu = wishes.get("memory"), wishes.get("gpu") or run_device.gpu
    if run_device.device.type == "cuda":
        own = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        if memory is not None:  # what else the process holds there is no part of the prediction
            beside = max(torch.cuda.memory_allocated(run_device.device) - own, 0)
            memory = max(parse_bytes(memory, name="memory") - beside, 1)
        elif wishes.get("gpu") is None:
            memory = (free_bytes(run_device.device) or 0) + own
    if memory is None and gpu is None:
        return {}
    asked = {"task": key.task, "mode": "infer", "seq": key.max_length, "memory": memory, "gpu": gpu}
    return asked | dict(key.settings)


def _fitting(module: Any, head: EmbeddingHead | None, job: dict[str, Any], most: int) -> int:
    """Tokens of a batch, `most` at most, that any texts may have, so that it fits as predicted.

    With a margin for batches of varied lengths, where there is room for one.
    """
    longest = job["seq"]
    with _whole(module, head):
        if _leaves_margin(estimate(module, batch=max(most // longest, 1), **job)):
            return most
        found = max_batch(module, **job)
    if not found.batch:
        raise NoPlanFits(
            f"not even one text of {longest} tokens fits: {found.limited_by}",
            best=found.estimate,
            budget_bytes=found.estimate.capacity_bytes,
            hint="give more memory, set the model's max_seq_length lower, or load it in bfloat16",
        )
    return int(min((found.margin_batch or found.batch) * longest, most))


def _leaves_margin(found: Estimate) -> bool:
    if found.capacity_bytes is None or not found.fits:
        return False
    margin = margin_of(found.capacity_bytes, found.basis, found.workload, varied=True)
    return found.safe_reserved_bytes + margin.num_bytes <= found.capacity_bytes
