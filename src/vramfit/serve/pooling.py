"""One vector a text, made of its tokens' vectors on the device, so that no more than that leaves it."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput


@dataclass
class Embeddings(ModelOutput):  # type: ignore[misc]
    """What an encoder gives once it is pooled."""

    embedding: torch.Tensor | None = None
    """A row for each text."""


def apply(model: torch.nn.Module, pooling: str) -> None:
    """Let an encoder give one vector a text, in place, for padded and for packed batches.

    Args:
        pooling: mean of all tokens, as sentence encoders are trained for, or the first one.
    """

    def pool(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Embeddings:
        hidden = output.last_hidden_state
        ends = kwargs.get("cu_seq_lens_q")
        made = _of_row(hidden[0], ends.long(), pooling) if ends is not None else _of_rows(hidden, kwargs, pooling)
        return Embeddings(embedding=made)

    model.register_forward_hook(pool, with_kwargs=True)


def _of_rows(hidden: torch.Tensor, kwargs: dict[str, Any], pooling: str) -> torch.Tensor:
    if pooling == "first":
        return hidden[:, 0].float()
    mask: torch.Tensor = kwargs["attention_mask"]
    sums: torch.Tensor = torch.bmm(mask[:, None].to(hidden.dtype), hidden)[:, 0].float()
    return sums / mask.sum(1)[:, None]


def _of_row(hidden: torch.Tensor, ends: torch.Tensor, pooling: str) -> torch.Tensor:
    if pooling == "first":
        return hidden[ends[:-1]].float()
    return torch.segment_reduce(hidden.float(), "mean", offsets=ends, axis=0, unsafe=True)
