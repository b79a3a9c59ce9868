"""Rows of a few sizes: a packed row filled up with sequences that no loss counts, so that passes are alike."""

from typing import Any

import numpy as np
import torch

from vramfit.tasks.base import IGNORED
from vramfit.techniques.packing import first_position

ROW_TOKENS, NUM_SIZES = 512, 32
"""Rows have a multiple of so many tokens, or of such a part of the longest: one is filled up by a percent or two."""
ROW_SEQUENCES = 32
"""And a multiple of so many sequences, as far as there are tokens for them."""
FILLED = frozenset({"input_ids", "attention_mask", "token_type_ids", "labels"})
"""What a batch may have beside for its rows to be filled up."""


def row_tokens(num_tokens: int, max_tokens: int, least: int = 0) -> int:
    """Tokens of the row that so many real ones go into.

    >>> row_tokens(18_350, 20_480), row_tokens(20_400, 20_400), row_tokens(300, 20_480, least=10_240)
    (18560, 20400, 10240)
    """
    each = max(ROW_TOKENS, -(-max_tokens // NUM_SIZES))
    return min(max(-(-num_tokens // each) * each, least), max_tokens)


def row_sequences(num_sequences: int, num_more: int, longest: int) -> int:
    """Sequences of a row that is filled up with so many tokens, in sequences of one token at the least.

    >>> row_sequences(64, 82, 512), row_sequences(64, 3, 512), row_sequences(64, 0, 512)
    (96, 67, 64)
    """
    fewest = num_sequences + -(-num_more // longest)
    return min(-(-fewest // ROW_SEQUENCES) * ROW_SEQUENCES, num_sequences + num_more)


def row_size(num_tokens: int, num_sequences: int, max_tokens: int, longest: int, least: int = 0) -> int:
    """Tokens of the row that so many sequences go into: of the next size where this one has no room for as many as are
    wanted, since every other number of them would be a graph of its own.

    >>> row_size(18_350, 64, 20_480, 512), row_size(18_557, 64, 20_480, 512), row_size(20_479, 64, 20_480, 512)
    (18560, 19200, 20480)
    """
    size = row_tokens(num_tokens, max_tokens, least)
    if row_sequences(num_sequences, size - num_tokens, longest) % ROW_SEQUENCES:
        size = row_tokens(size + 1, max_tokens, least)
    return size


def fill_up(packed: dict[str, Any], model: torch.nn.Module, num_tokens: int, longest: int) -> dict[str, Any]:
    """What `packing.pack` gave, with as many tokens as asked for: more sequences, whose labels are ignored.

    Args:
        longest: tokens that any sequence may have; the row says that its longest one does.
    """
    ends = packed["cu_seq_lens_q"].numpy()
    num_real, num_sequences = int(ends[-1]), len(ends) - 1
    more = num_tokens - num_real
    num_filling = row_sequences(num_sequences, more, longest) - num_sequences
    lengths = np.full(num_filling, more // max(num_filling, 1))
    lengths[: more - int(lengths.sum())] += 1
    begins = np.cumsum(lengths) - lengths
    first = first_position(model)
    places = torch.from_numpy(np.arange(more) - np.repeat(begins, lengths) + first)
    filling: dict[str, Any] = {"labels": IGNORED, "position_ids": places}
    made: dict[str, Any] = {}
    for name, value in packed.items():
        if name == "cu_seq_lens_q":
            made[name] = torch.from_numpy(np.concatenate([ends, num_real + np.cumsum(lengths)]).astype(np.int32))
        elif isinstance(value, torch.Tensor):
            num = num_filling if value.dim() == 1 else more
            end = value.new_empty((*value.shape[:-1], num))
            end[...] = filling.get(name, 0)
            made[name] = torch.cat([value, end], dim=-1)
    return made | {"max_length_q": longest}
