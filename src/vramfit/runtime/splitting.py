"""An effective batch split into micro-batches: by tokens, longest first, without the padding nobody needs."""

from collections.abc import Iterator

import torch

from vramfit.step.inputs import Batch
from vramfit.tasks.base import IGNORED, PER_TOKEN
from vramfit.tasks.parts.losses import PLACES, attended
from vramfit.techniques.packing import is_per_token
from vramfit.techniques.padding import padded_width


def split(
    batch: Batch, max_tokens: int, *, packs: bool = False, evenly: bool = False, num_at_least: int = 1
) -> list[Batch]:
    """Micro-batches of at most `max_tokens` tokens, padding included; one sample at the least.

    Samples of like length go together, and each micro-batch is cut to its longest one. Which samples go where depends
    only on the lengths and the limit.

    Args:
        packs: the sequences will lie end to end, so that only their own tokens count.
        evenly: rows that lie end to end are to be about as long as each other, not full but for the last.
        num_at_least: micro-batches wanted, as far as there are samples: the fullest ones are halved.
    """
    lengths = lengths_of(batch, packs=packs)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if packs:
        filled = _fill(order, lengths, max_tokens)
        filled = _halved(_level(order, lengths, max_tokens, filled) if evenly else filled, num_at_least)
        return [batch] if len(filled) == 1 else [take_rows(batch, rows, width_of(batch)) for rows in filled]
    if num_at_least <= 1 and len(order) * max(lengths) <= max_tokens and max(lengths) == width_of(batch):
        return [batch]  # fits as it is: no copy
    grouped = _halved(list(_group(order, lengths, max_tokens)), num_at_least)
    return [take_rows(batch, rows, lengths[rows[0]]) for rows in grouped]


def _halved(groups: list[list[int]], num_at_least: int) -> list[list[int]]:
    """At least so many groups, as far as there are samples."""
    while len(groups) < num_at_least and max(map(len, groups)) > 1:
        fullest = max(range(len(groups)), key=lambda n: len(groups[n]))
        rows = groups[fullest]
        groups[fullest : fullest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return groups


def _group(order: list[int], lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    rows: list[int] = []
    for i in order:
        if rows and (len(rows) + 1) * lengths[rows[0]] > max_tokens:
            yield rows
            rows = []
        rows.append(i)
    if rows:
        yield rows


def _fill(order: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Each sample, longest first, into the first micro-batch that has room for it."""
    filled: list[list[int]] = []
    room: list[int] = []
    for i in order:
        place = next((n for n, left in enumerate(room) if lengths[i] <= left), None)
        if place is None:
            filled.append([])
            room.append(max_tokens)
            place = len(room) - 1
        filled[place].append(i)
        room[place] -= lengths[i]
    return filled


def _level(order: list[int], lengths: list[int], max_tokens: int, filled: list[list[int]]) -> list[list[int]]:
    """Each sample, longest first, into the shortest of as many micro-batches; as they were where that is too much."""
    levelled: list[list[int]] = [[] for _ in filled]
    tokens = [0] * len(filled)
    for i in order:
        place = min(range(len(tokens)), key=tokens.__getitem__)
        levelled[place].append(i)
        tokens[place] += lengths[i]
    return levelled if max(tokens) <= max_tokens else filled


def take_rows(batch: Batch, rows: list[int], length: int) -> Batch:
    """Some samples of a batch, cut to a length."""
    width = width_of(batch)
    index = torch.tensor(rows, device=next(iter(batch.values())).device)
    taken = {}
    for name, value in batch.items():
        chosen = value.index_select(0, index)
        cut = length < width and is_per_token(name, chosen, width)
        taken[name] = chosen[:, :length].contiguous() if cut else chosen
    return taken


def width_of(batch: Batch) -> int:
    """Tokens a sequence, padding included."""
    return int(batch["input_ids"].shape[1]) if "input_ids" in batch else 1


def lengths_of(batch: Batch, *, packs: bool = False) -> list[int]:
    """Columns a sample gets: up to the last token that is attended to or has a label, and a few for a common width.

    All of them where nothing is masked, and for question answering, whose softmax runs over padding too unless there
    is none.
    """
    first = next(iter(batch.values()))
    mask = batch.get("attention_mask")
    width = width_of(batch)
    if mask is None or mask.dim() != PER_TOKEN or (not PLACES.isdisjoint(batch) and not packs):
        return [width] * int(first.shape[0])
    if packs:
        return [max(int(n), 1) for n in attended(mask).sum(axis=1)]
    needed = mask.bool()
    labels = batch.get("labels")
    if labels is not None and labels.shape == mask.shape:
        needed = needed | (labels != IGNORED)
    positions = torch.arange(1, width + 1, device=mask.device)
    return [padded_width(max(int(n), 1), width) for n in (needed * positions).amax(dim=1).tolist()]
