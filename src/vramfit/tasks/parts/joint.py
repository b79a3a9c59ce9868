"""`JointLoss`: a loss that looks at the vectors of all texts of a batch at once, so that no part has one of its own.

Scores that a cross-encoder gives the candidates of a query are compared in the same way: a query's gradient is the same
however its candidates are split among passes, since the comparison sees all scores of the step (`step/joint.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.tasks.embedding import JOINED
from vramfit.tasks.parts.contrastive import check_contrast, contrast_loss
from vramfit.tasks.parts.losses import Batch, HeadLoss, logits_of
from vramfit.tasks.parts.pooling import Contrast, EmbeddingHead
from vramfit.units import counted

PLACES = "text_rows"
"""The input that says which row of the whole batch a text is."""
PER_TEXT = ("text_ids", "labels")
"""Inputs that the loss reads, a row for each text."""


@dataclass(frozen=True, slots=True)
class JointLoss:
    """The loss of the vectors of all texts of a batch."""

    num_texts: int
    """Of the whole batch."""
    width: int
    """Numbers of a vector."""
    labels: Batch
    """What the loss reads beside the vectors, of the whole batch."""
    of_vectors: Callable[[torch.Tensor, Batch], torch.Tensor]
    """A row for each text, in the order of the batch, and the labels on the same device → the mean loss."""
    vectors_of: Callable[[Any], torch.Tensor] = lambda output: output.embedding
    """What a model gives → a row for each text, in fp32."""

    def room(self, device: torch.device) -> torch.Tensor:
        """Where the vectors of all texts come together; zeros, so that ranks can add up theirs."""
        return torch.zeros(self.num_texts, self.width, device=device)


def num_places(batch: Batch) -> int:
    """Texts of a whole batch; on the host, their places are looked at: two texts in one would overwrite each other.

    Raises:
        WorkloadError: places that are not those of the batch's rows, each once.
    """
    places = batch[PLACES]
    num = int(places.shape[0])
    if places.device.type != "cpu":
        return num
    is_whole = places.dtype == torch.long and places.dim() == 1
    if not is_whole or not np.array_equal(np.sort(places.numpy()), np.arange(num)):
        problem = f"{PLACES} of a batch of {counted(num, 'text')} are not the numbers from 0 to {num - 1}, each once"
        raise WorkloadError([problem], hint=f"give {PLACES} as torch.arange({num}), in a batch that is not split")
    return num


def loss_of_texts(head: EmbeddingHead, model: Any, batch: Batch) -> HeadLoss:
    """The loss of a batch of texts.

    Raises:
        WorkloadError: texts that make no whole samples, or samples without what the loss needs.
    """
    how, num_texts = head.contrast, num_places(batch)
    if num_texts % how.num_texts:
        problem = f"a batch of {counted(num_texts, 'text')} has no whole samples of {how.num_texts}"
        raise WorkloadError([problem], hint="give every sample as many texts as the workload says (texts)")
    labels = {name: batch[name] for name in PER_TEXT if name in batch}
    width = width_of(head, model)
    num_given = labels["labels"].shape[1:].numel() if "labels" in labels else 0
    problems = check_contrast(how, num_given=num_given, width=width)
    if problems:
        is_long, instead = any(dim > width for dim in how.dims), f"take lengths from 1 to {width}"
        other = "give samples what the loss compares, or take another loss"
        raise WorkloadError(problems, hint=instead if is_long else other)

    def of_vectors(vectors: torch.Tensor, here: Batch) -> torch.Tensor:
        shape = (len(vectors) // how.num_texts, how.num_texts)
        by_sample = {name: value.reshape(*shape, *value.shape[1:]) for name, value in here.items()}
        return contrast_loss(vectors.reshape(*shape, -1), by_sample, how)

    return HeadLoss(
        sums=lambda output, part: [output.embedding.sum()],
        counts=lambda part: [int(part[PLACES].shape[0])],
        joint=JointLoss(num_texts, width, labels, of_vectors),
    )


def width_of(head: EmbeddingHead, model: Any) -> int:
    """Numbers of a vector that a model gives."""
    sizes = [layer.out_features for layer in head.modules() if isinstance(layer, torch.nn.Linear)]
    width = sizes[-1] if sizes else int(model.config.hidden_size) * len(head.pooling.split(JOINED))
    return min(width, head.dims or width)


def comparison_of(model: Any) -> Contrast:
    """How candidates are compared, as the task's `learn_by` has kept it."""
    found: Contrast = getattr(model, "_comparison", Contrast(loss="bce", num_texts=1))
    return found


def num_scores(how: Contrast) -> int:
    """Numbers that the loss reads of each candidate."""
    return max(how.num_texts - 1, 1) if how.loss == "margin-mse" else 1


def loss_of_candidates(model: Any, batch: Batch) -> HeadLoss:
    """The loss of a batch of candidates: a mean over candidates, or over queries where those of one are compared."""
    how, num = comparison_of(model), num_places(batch)
    if how.loss == "bce":
        return HeadLoss(
            lambda output, part: [
                F.binary_cross_entropy_with_logits(_scores(output)[:, 0], part["labels"].float(), reduction="sum")
            ],
            lambda part: [int(part[PLACES].shape[0])],
        )

    def of_scores(scores: torch.Tensor, here: Batch) -> torch.Tensor:
        by_query = scores.reshape(-1, how.num_texts)
        if how.loss == "listwise":  # the positive is the first
            return -F.log_softmax(by_query / how.divisor, dim=1)[:, 0].mean()
        margins = here["labels"].reshape(len(by_query), how.num_texts, -1)[:, 0]
        return F.mse_loss(by_query[:, :1] - by_query[:, 1:], margins)

    return HeadLoss(
        lambda output, part: [_scores(output).sum()],
        lambda part: [int(part[PLACES].shape[0])],
        joint=JointLoss(num, 1, {"labels": batch["labels"]}, of_scores, _scores),
    )


def _scores(output: Any) -> torch.Tensor:
    return logits_of(output).float()
