"""The dearest batch that a `Stepper` may meet, made out of any batch at hand."""

import torch

from vramfit.step.inputs import Batch
from vramfit.step.splitting import width_of
from vramfit.tasks.base import PER_TOKEN
from vramfit.techniques.packing import is_per_token


def dearest_like(batch: Batch, num_samples: int, seq: int, *, packs: bool = False) -> Batch:
    """A batch of `num_samples` sequences of `seq` tokens, its samples and tokens repeated.

    A mask hides one token of each sequence, so that it is not taken for a mask that hides nothing; but not where the
    sequences are packed, since there a token less is a token less.
    """
    width = width_of(batch)
    device = next(iter(batch.values())).device
    rows = torch.arange(num_samples, device=device)
    columns = torch.arange(seq, device=device) % width
    made = {}
    for name, value in batch.items():
        chosen = value.index_select(0, rows % value.shape[0])
        made[name] = chosen.index_select(1, columns) if is_per_token(name, chosen, width) else chosen
    if "attention_mask" in made and made["attention_mask"].dim() == PER_TOKEN:
        made["attention_mask"] = torch.ones_like(made["attention_mask"])
        if seq > PER_TOKEN and not packs:
            made["attention_mask"][:, 1] = 0
    return made
