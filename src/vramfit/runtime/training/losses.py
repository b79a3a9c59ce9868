"""Label smoothing: a share of the target spread over all classes; a sum, as every loss here."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.step.inputs import Batch
from vramfit.techniques.packing import IGNORED


def smoothed_loss(smoothing: float) -> Callable[[Any, Batch], torch.Tensor]:
    """The loss of a classification head, of sequences or tokens, with smoothed labels."""

    def loss(output: Any, batch: Batch) -> torch.Tensor:
        logits, labels = output.logits, batch["labels"]
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            reduction="sum",
            ignore_index=IGNORED,
            label_smoothing=smoothing,
        )

    return loss


def num_labelled(batch: Batch) -> int:
    """How many labels of a batch count."""
    return int((batch["labels"] != IGNORED).sum())
