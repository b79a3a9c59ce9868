"""The passes of one rank: its share of an effective batch, in as many passes as all others make."""

import zlib
from typing import Any

import torch

from vramfit.runtime.distributed.ranks import Ranks
from vramfit.runtime.distributed.shards import share_out
from vramfit.runtime.splitting import lengths_of, split, take_rows, width_of
from vramfit.step.inputs import Batch


def own_passes(ranks: Ranks, batch: Batch, max_tokens: int, *, packs: bool) -> tuple[list[Batch], int]:
    """This rank's micro-batches, and how many of them count: passes that only keep others company come last."""
    lengths = lengths_of(batch, packs=packs)
    ranks.accord.agree_on(_fingerprint(batch), "batch")
    rows = share_out(lengths, ranks.size)[ranks.rank]
    own = take_rows(batch, rows, width_of(batch)) if rows else None
    num_passes = ranks.num_passes(0 if own is None else len(split(own, max_tokens, packs=packs)))
    parts = [] if own is None else split(own, max_tokens, packs=packs, num_at_least=num_passes)
    company = [take_rows(batch, [0], lengths[0])] * (num_passes - len(parts))
    return [*parts, *company], len(parts)


def _fingerprint(batch: Batch) -> int:
    """A number by which ranks see that they have the same batch."""
    seen = 0
    for value in batch.values():
        content: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        seen = zlib.crc32(content, seen)
    return seen
