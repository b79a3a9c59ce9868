"""Vectors of texts: those of a text's tokens pooled to one, then layers, then unit length.

An `EmbeddingHead` hangs on an encoder of transformers as a forward hook: the encoder's class, the names of its weights
and all that techniques look for in it stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers.utils import ModelOutput

from vramfit.errors import CheckpointError, WorkloadError
from vramfit.tasks.embedding import JOINED, HeadParts, LayerPart

NAME = "embedding_head"
"""The head's name among the modules of a model."""


@dataclass
class EmbeddingOutput(ModelOutput):  # type: ignore[misc]
    """What an encoder with a head gives."""

    embedding: torch.Tensor | None = None
    """A row for each text, in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """How vectors are compared in training."""

    loss: str = "in-batch"
    num_texts: int = 2
    """Texts of a sample."""
    temperature: float | None = None
    """What similarities are divided by; None takes the loss's usual one."""
    margin: float | None = None
    """None takes the loss's usual one."""
    mask_above: float | None = None
    """Candidates more similar than this are taken for positives that nobody marked, and left out."""
    dims: tuple[int, ...] = ()
    """Shorter vectors that are to be as good: losses of vectors cut to each of these lengths are added up."""

    @property
    def divisor(self) -> float:
        """The temperature, or the loss's usual one."""
        return self.temperature or (1.0 if self.loss == "listwise" else 0.05)


class EmbeddingHead(torch.nn.Module):
    """From the vectors of tokens to one for each text.

    Args:
        pooling: one of `POOLINGS`, or several with `JOINED` between: their vectors end to end.
        normalizes: whether vectors have unit length.
        layers: what vectors go through after pooling, in order.
        parts: what the head is made of, as its folder has it; None where no folder says.
    """

    def __init__(
        self,
        pooling: str = "mean",
        *,
        normalizes: bool = True,
        layers: Sequence[torch.nn.Module] = (),
        parts: HeadParts | None = None,
    ) -> None:
        super().__init__()
        self.pooling, self.normalizes, self.parts = pooling, normalizes, parts
        self.layers = torch.nn.Sequential(*layers)  # no ModuleList: those are an encoder's layers
        self.contrast = Contrast()
        """Set where a workload that trains is applied."""
        self.dims: int | None = None
        """Numbers that are kept of a vector, from its start; set where a folder's vectors are used."""

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None, ends: torch.Tensor | None) -> torch.Tensor:
        """The vector of each text.

        Args:
            hidden: of tokens: a row for each text, or one row for all of them, end to end.
            mask: the attention mask of rows; None where every token counts.
            ends: where texts begin and end in the one row; None for a row each.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            made = self._pool(hidden, mask, ends)
            for layer in self.layers:
                made = layer(made.to(next(layer.parameters(), made).dtype))
            made = made.float()
            made = F.normalize(made, dim=-1) if self.normalizes else made
            return made if self.dims is None else made[:, : self.dims]

    def _pool(self, hidden: torch.Tensor, mask: torch.Tensor | None, ends: torch.Tensor | None) -> torch.Tensor:
        names = self.pooling.split(JOINED)
        if ends is None:
            made = [POOLINGS[name](hidden, mask) for name in names]
        else:
            made = [PACKED[name](hidden[0], ends) for name in names]
        return made[0] if len(made) == 1 else torch.cat([one.float() for one in made], -1)

    def pool_by(self, pooling: str) -> None:
        """Pool otherwise than the folder says.

        Raises:
            WorkloadError: the layer after it learned vectors of another width.
        """
        num, num_before = len(pooling.split(JOINED)), len(self.pooling.split(JOINED))
        if num != num_before and any(True for _ in self.layers.parameters()):
            raise WorkloadError(
                [f"pooling {pooling} does not go with the model's dense layer, which learned from {self.pooling}"],
                hint="leave pooling out, or take a folder without a dense layer",
            )
        self.pooling = pooling


class Dense(torch.nn.Module):
    """A linear layer and its activation; names as sentence-transformers has them."""

    def __init__(self, part: LayerPart) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(part.in_features, part.out_features, bias=part.bias)
        self.activation = getattr(torch.nn, part.activation)()

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.activation(self.linear(vectors))
        return made


class Norm(torch.nn.Module):
    """A layer norm, under the name that sentence-transformers has for it."""

    def __init__(self, part: LayerPart) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(part.in_features)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(vectors)
        return made


class UnitLength(torch.nn.Module):
    """Unit length before further layers."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return F.normalize(vectors, dim=-1)


def make_layer(part: LayerPart) -> torch.nn.Module:
    """The module that a part of a folder stands for."""
    kinds = {"Dense": Dense, "LayerNorm": Norm}
    return kinds[part.kind](part) if part.kind in kinds else UnitLength()


def make_head(parts: HeadParts, hidden_size: int | None) -> EmbeddingHead:
    """The modules, with weights as torch draws them: none on the meta device.

    Args:
        hidden_size: of the encoder's vectors; None where it is not known.

    Raises:
        CheckpointError: a layer that is not as wide as what goes into it.
    """
    if hidden_size is not None:
        _check_widths(parts, hidden_size)
    layers = parts.layers
    normalizes = bool(layers) and layers[-1].kind == "Normalize"
    inner = layers[:-1] if normalizes else layers
    return EmbeddingHead(
        parts.pooling, normalizes=normalizes, layers=[make_layer(layer) for layer in inner], parts=parts
    )


def _check_widths(parts: HeadParts, hidden_size: int) -> None:
    width = hidden_size * len(parts.pooling.split(JOINED))
    for layer in parts.layers:
        if not layer.has_weights:
            continue
        if layer.in_features != width:
            file = str(layer.folder / "config.json") if layer.folder is not None else ""
            raise CheckpointError(
                f"{file}: the {layer.kind} takes vectors of {layer.in_features:,} numbers, and what comes before it "
                f"gives {width:,}",
                file=file,
                hint="use the parts of one model: config.json, modules.json and the folders that it names",
            )
        width = layer.out_features


def attach(model: Any, head: EmbeddingHead) -> Any:
    """Have an encoder give vectors of texts, in place of those of tokens, until the hook that it gives is removed."""
    model.add_module(NAME, head)
    return model.register_forward_hook(_give_vectors, with_kwargs=True)


def head_of(model: torch.nn.Module) -> EmbeddingHead | None:
    """The head of a model; None where it has none."""
    found = getattr(model, NAME, None)
    return found if isinstance(found, EmbeddingHead) else None


def _give_vectors(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> EmbeddingOutput:
    hidden = output[0]
    ends = kwargs.get("cu_seq_lens_q")
    mask = kwargs.get("attention_mask")
    return EmbeddingOutput(embedding=getattr(model, NAME)(hidden, mask, None if ends is None else ends.long()))


def _weights(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return hidden.new_ones(hidden.shape[:2])
    return mask.to(hidden.dtype)


def _mean(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return _weighted(hidden, _weights(hidden, mask))


def _weighted(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """By a product: no copy of all tokens is made, and none is kept for backward."""
    sums = torch.bmm(weights[:, None], hidden)[:, 0].float()
    return sums / weights.float().sum(1).clamp(min=1e-9)[:, None]


def _first(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return hidden[:, 0]


def _last(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return hidden[:, -1]
    places = torch.arange(hidden.shape[1], device=hidden.device) * (mask != 0)
    return hidden[torch.arange(len(hidden), device=hidden.device), places.argmax(1)]


def _max(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return hidden.amax(1)
    return hidden.masked_fill((mask == 0)[:, :, None], torch.finfo(hidden.dtype).min).amax(1)


def _weighted_mean(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Later tokens count more: the first once, the second twice, and so on."""
    weights = _weights(hidden, mask)
    return _weighted(hidden, weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device).to(weights.dtype))


def _packed_weighted_mean(hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    lengths = ends.diff()
    begins = torch.repeat_interleave(ends[:-1], lengths, output_size=len(hidden))
    weights = (torch.arange(1, len(hidden) + 1, device=hidden.device) - begins)[:, None]
    sums = torch.segment_reduce(hidden.float() * weights, "sum", offsets=ends, axis=0, unsafe=True)
    return sums / (lengths * (lengths + 1) / 2)[:, None]


def _packed(reduction: str, hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.segment_reduce(hidden.float(), reduction, offsets=ends, axis=0, unsafe=True)


POOLINGS: dict[str, Any] = {"mean": _mean, "cls": _first, "last": _last, "max": _max, "weighted-mean": _weighted_mean}
"""Name → what it does to rows that are padded."""
PACKED: dict[str, Any] = {
    "mean": partial(_packed, "mean"),
    "cls": lambda hidden, ends: hidden[ends[:-1]],
    "last": lambda hidden, ends: hidden[ends[1:] - 1],
    "max": partial(_packed, "max"),
    "weighted-mean": _packed_weighted_mean,
}
"""Name → what it does to texts that lie end to end."""
