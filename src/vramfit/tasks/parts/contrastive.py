"""Losses of the vectors of a batch's texts; each is a function of all of them at once.

`vectors` has a row for each sample, its texts in order, and their numbers: samples × texts × width, in fp32.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from vramfit.tasks.parts.pooling import Contrast

Labels = Mapping[str, torch.Tensor]


def contrast_loss(vectors: torch.Tensor, labels: Labels, how: Contrast) -> torch.Tensor:
    """The mean loss over the samples.

    Args:
        labels: `text_ids`, a number for each text that equal texts share (samples × texts); where samples are scored,
            `labels` (a row for each sample).
    """
    units = F.normalize(vectors, dim=-1)
    candidates = units[:, 1:].transpose(0, 1).flatten(0, 1)
    scores = units[:, 0] @ candidates.T / how.temperature
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
