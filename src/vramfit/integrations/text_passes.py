"""Passes over texts that a model of sentence-transformers tokenizes: rows, the tokens of a batch, what is packed."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from vramfit.errors import NoPlanFits
from vramfit.estimator.predict import estimate
from vramfit.integrations.trainer.models import PACKAGE, TOKENS, giving_vectors
from vramfit.loader.budget import free_bytes
from vramfit.planner.choose import margin_of, max_batch
from vramfit.records.estimate import Estimate
from vramfit.runtime.data import ahead
from vramfit.runtime.device import RunDevice
from vramfit.runtime.inference import Inference
from vramfit.runtime.trained import MAX_PACKED_TOKENS
from vramfit.serve.engine import Ceiling
from vramfit.serve.settings import CPU_TOKENS
from vramfit.step.plain import Batch
from vramfit.tasks.parts.pooling import EmbeddingHead, EmbeddingOutput
from vramfit.tasks.parts.reading import in_rust
from vramfit.techniques import packing
from vramfit.units import parse_bytes

Array = npt.NDArray[Any]
Tokens = dict[str, Array]
PART_ROWS, PART_CHARACTERS, FIRST_CHARACTERS = 1024, 240_000, 60_000
"""Texts that are tokenized at once: about the largest batch; the first are fewer, so that the GPU soon has work."""
NUM_THREADS = max(min((os.cpu_count() or 1) // 2, 8), 1)
"""That tokenize, each another part."""
MANY_TEXTS = 16
"""From so many it pays to see whether the tokenizer can be called directly."""
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
    """Texts of one part, whose tokens lie end to end.

    Args:
        tokens: by the name of a model's input.
        lengths: tokens of each text.
        numbers: which texts of the call they are.
        model: that takes them end to end; None pads them.
        fills: what padding has, by name; zeros otherwise.
    """

    def __init__(
        self, tokens: Tokens, lengths: Array, numbers: Array, model: torch.nn.Module | None, fills: dict[str, int]
    ) -> None:
        self.numbers = torch.as_tensor(numbers)
        self.lengths: list[int] = lengths.tolist()
        widest = max(self.lengths)
        self.widths = [packing.padded_width(length, widest) for length in self.lengths]
        self._tokens, self._lengths, self._begins = tokens, lengths, np.cumsum(lengths) - lengths
        self._model, self._fills = model, fills

    def __len__(self) -> int:
        return len(self.lengths)

    def collate(self, indices: Sequence[int]) -> Batch:
        """A batch as wide as its longest text, or a little wider; one row where texts lie end to end."""
        lengths = self._lengths[indices]
        places = np.arange(lengths.sum()) + np.repeat(self._begins[indices] - np.cumsum(lengths) + lengths, lengths)
        chosen = {name: values[places] for name, values in self._tokens.items()}
        if self._model is not None:
            row: dict[str, Any] = {name: torch.from_numpy(values)[None] for name, values in chosen.items()}
            return packing.with_places(row, lengths, self._model)
        inside = np.arange(max(self.widths[i] for i in indices)) < lengths[:, None]
        batch = {"attention_mask": inside.astype(np.int64)}
        for name, values in chosen.items():
            batch[name] = np.full(inside.shape, self._fills.get(name, 0))
            batch[name][inside] = values
        return {name: torch.from_numpy(batch[name]) for name in TOKENS if name in batch}


class Reader:
    """Makes tokens of texts as `preprocess` of sentence-transformers does.

    Its lists and padded tensors take as long as the tokenizer in Rust below it. Where that gives the same for two texts
    of a call, with the settings that `preprocess` has left there, it is called for the others directly.

    Args:
        model: of sentence-transformers.
        key: what passes were planned for.
        module: the model of transformers.
        asked: arguments of `preprocess`.
    """

    def __init__(self, model: Any, key: "Key", module: torch.nn.Module, asked: dict[str, Any]) -> None:
        self._model, self._asked, self._prompt = model, asked, asked.get("prompt") or ""
        self._packed = module if key.packs else None
        self._max_length = key.max_length
        self._tokenizer = getattr(model, "tokenizer", None)
        named = {"input_ids": "pad_token_id", "token_type_ids": "pad_token_type_id"}
        self._fills = {name: getattr(self._tokenizer, of, None) or 0 for name, of in named.items()}
        self._backend: Any = None
        self._has_types = False

    def parts(self, inputs: Sequence[Any]) -> Iterator[TextRows]:
        """The texts of a call, the longest first, each part tokenized while those before it are in use.

        Raises:
            Unfit: features that are no plain rows of tokens.
        """
        kind = _kind_of(inputs)
        of_each: Callable[[Any], int] = self._model._input_length if kind is None else len
        sizes = (sum(map(len, one)) for one in inputs) if kind is tuple else map(of_each, inputs)
        parts = split_by_size(np.fromiter(sizes, np.int64, len(inputs)), self._max_length)
        if len(inputs) >= MANY_TEXTS and kind is not None and _is_of_package(self._model):
            self._look_below([inputs[parts[0][0]], inputs[parts[-1][-1]]])

        def read(numbers: Array) -> TextRows:
            some = [inputs[n] for n in numbers]
            tokens, lengths = self._features(some) if self._backend is None else self._directly(some)
            return TextRows(tokens, lengths, numbers, self._packed, self._fills)

        # code of others may not be made for several threads, and sets the tokenizer at every call
        num_threads = 1 if self._backend is None else NUM_THREADS
        return ahead(read, parts, num_threads) if len(parts) > 1 else map(read, parts)

    def _look_below(self, texts: list[Any]) -> None:
        wanted, lengths = self._features(texts)
        backend, self._has_types = in_rust(self._tokenizer), "token_type_ids" in wanted
        if backend is None or (backend.padding or {}).get("direction") != "right":
            return
        backend.no_padding()
        self._backend = backend
        found, found_lengths = self._directly(texts)
        if list(lengths) != list(found_lengths) or any((found[name] != wanted[name]).any() for name in wanted):
            self._backend = None

    def _directly(self, texts: list[Any]) -> tuple[Tokens, Array]:
        if self._prompt:
            texts = [self._prompt + t if isinstance(t, str) else (self._prompt + t[0], t[1]) for t in texts]
        made = self._backend.encode_batch_fast(texts)
        lengths = np.fromiter(map(len, made), np.int64, len(made))
        if not lengths.all():
            raise Unfit
        total = int(lengths.sum())
        tokens = {"input_ids": np.fromiter(chain.from_iterable(one.ids for one in made), np.int64, total)}
        if self._has_types:
            types = chain.from_iterable(one.type_ids for one in made)
            tokens["token_type_ids"] = np.fromiter(types, np.int64, total)
        return tokens, lengths

    def _features(self, texts: list[Any]) -> tuple[Tokens, Array]:
        """As sentence-transformers itself has them; nothing but tokens padded on the right is taken."""
        features = self._model.preprocess(texts, **self._asked)
        mask = features.get("attention_mask")
        if not features.keys() <= {*TOKENS, *BESIDE} or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            raise Unfit
        attended = mask.numpy() != 0
        is_right_padded = attended[:, 0].all() and (attended[:, :-1] >= attended[:, 1:]).all()
        if features.get("modality", "text") != "text" or len(mask) != len(texts) or not is_right_padded:
            raise Unfit
        names = [name for name in TOKENS if name in features and name != "attention_mask"]
        return {name: features[name].numpy()[attended] for name in names}, attended.sum(1)


def _kind_of(inputs: Sequence[Any]) -> type | None:
    """`str` for texts, `tuple` for pairs of them, None for anything else."""
    kinds = set(map(type, inputs))
    if kinds <= {list, tuple}:
        return tuple if all(len(one) == 2 and type(one[0]) is type(one[1]) is str for one in inputs) else None
    return str if kinds == {str} else None


def _is_of_package(model: Any) -> bool:
    """Whether the texts of a model go straight to its tokenizer."""
    theirs = [getattr(type(one), "preprocess", None) for one in (model, model[0])]
    is_theirs = all(getattr(method, "__module__", "").partition(".")[0] == PACKAGE for method in theirs)
    return is_theirs and "preprocess" not in {**vars(model), **vars(model[0])}


def split_by_size(sizes: Array, max_length: int) -> list[Array]:
    """Numbers of texts in parts that are tokenized at once, the longest first; the first parts are small.

    Args:
        sizes: characters of each text.
        max_length: tokens at which texts are cut.

    >>> [part.tolist() for part in split_by_size(np.array([3, 200_000, 150_000, 9]), 10**6)]
    [[1], [2], [3, 0]]
    """
    order = np.argsort(-sizes, kind="stable")
    ends = np.cumsum(np.minimum(sizes, TOKEN_CHARACTERS * max_length)[order])
    parts: list[Array] = []
    begin, before, room = 0, 0, FIRST_CHARACTERS
    while begin < len(order):
        end = int(np.searchsorted(ends, before + room, "right"))
        end = min(max(end, begin + 1), begin + PART_ROWS)
        parts.append(order[begin:end])
        begin, before, room = end, int(ends[end - 1]), min(2 * room, PART_CHARACTERS)
    return parts


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


@contextmanager
def progress(num_texts: int, shows: bool) -> Iterator[Callable[[int], None]]:
    """A bar, where one is asked for, and what tells it how many texts are done."""
    from tqdm.autonotebook import tqdm  # type: ignore[import-untyped]

    with tqdm(total=num_texts, desc="Texts", disable=not shows) as bar:
        yield lambda done: bar.update(done - bar.n)
