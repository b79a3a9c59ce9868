"""How an effective batch is split: among ranks, and into micro-batches by tokens, longest samples first.

Runs split batches of tensors; the planner asks for the same passes by lengths alone. `Ranks` is
what a step asks of the processes that share it; `Alone` stands for a single process.
"""

import heapq
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from vramfit.step.plain import Batch
from vramfit.tasks.base import IGNORED, PER_TOKEN
from vramfit.tasks.parts.joint import PLACES as PLACES_OF_TEXTS
from vramfit.tasks.parts.losses import PLACES, HeadLoss, attended
from vramfit.techniques.packing import is_per_token, padded_width


class Votes(Protocol):
    """The part of an `RankVotes` that a step uses."""

    def agree(self, *values: int) -> tuple[int, ...]: ...
    def agree_on(self, value: int, what: str) -> None: ...
    def report(self, error: BaseException) -> None: ...
    def give_up(self, error: BaseException) -> None: ...
    def sum(self, value: float) -> float: ...


class Ranks(Protocol):
    """Processes that share every effective batch; each sees all of it and takes its own part."""

    rank: int
    size: int
    is_sharded: bool
    """Whether each process has a part of the model: passes are meetings then, and autocast keeps no casts."""

    @property
    def votes(self) -> Votes:
        """Their votes."""

    def begin(self) -> None:
        """A window begins: gradients are none, or zero."""

    def forget(self) -> None:
        """A window was given up: as if it had not begun."""

    def rest(self) -> None:
        """Passes without a backward are through: whatever they gathered is given back."""

    def num_passes(self, own: int) -> int:
        """Forward passes of this window, where this rank has micro-batches for so many."""

    def before_pass(self, index: int, num_passes: int) -> None:
        """A forward pass is about to begin."""

    def synchronise(self) -> None:
        """Gradients become those of all ranks; all have agreed that they are well."""

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Take the scale out of the gradients; what overflowed on one rank has overflowed on all."""

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float | None) -> None:
        """Clip the gradient of all ranks together."""

    def size_of(self, parameter: torch.nn.Parameter) -> int:
        """Bytes that a parameter counts for in a portion of the optimizer's step; of a shard, its whole parameter."""

    def total(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks: the sum of each one's part."""

    def bring_together(self, vectors: torch.Tensor) -> None:
        """Rows that each rank has a part of, and zeros elsewhere, become all rows on every rank."""


class Unanimous:
    """The votes of one."""

    def agree(self, *values: int) -> tuple[int, ...]:
        return values

    def agree_on(self, value: int, what: str) -> None:
        return

    def report(self, error: BaseException) -> None:
        return

    def give_up(self, error: BaseException) -> None:
        return

    def sum(self, value: float) -> float:
        return value


class Alone:
    """One process: nothing to share, nothing to wait for. Ranks of several override what they do otherwise."""

    rank, size = 0, 1
    is_sharded = False
    votes: Votes = Unanimous()

    def begin(self) -> None:
        return

    def forget(self) -> None:
        return

    def rest(self) -> None:
        return

    def num_passes(self, own: int) -> int:
        return own

    def before_pass(self, index: int, num_passes: int) -> None:
        return

    def synchronise(self) -> None:
        return

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scaler.unscale_(optimizer)

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float | None) -> None:
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)

    def size_of(self, parameter: torch.nn.Parameter) -> int:
        return parameter.nbytes

    def bring_together(self, vectors: torch.Tensor) -> None:
        return

    def total(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.size == 1 else loss.new_tensor(self.votes.sum(float(loss)))


LEAST_SHARE = 1e-9
"""Of a batch: a row with less is none."""


@dataclass(frozen=True, slots=True)
class Rows:
    """How sequences are packed that lie end to end in a row."""

    evenly: bool = False
    """Rows about as long as each other, not full but for the last; where texts are compared, they are full."""
    max_texts: int | None = None
    """Of a row of texts that are compared with those of all others; None for any number."""


def split(batch: Batch, max_tokens: int, *, rows: Rows | None = None, num_at_least: int = 1) -> list[Batch]:
    """Micro-batches of at most `max_tokens` tokens, padding included; one sample at the least.

    Samples of like length go together, and each micro-batch is cut to its longest one. Which samples go where depends
    only on the lengths and the limit.

    Args:
        rows: the sequences will lie end to end, so that only their own tokens count.
        num_at_least: micro-batches wanted, as far as there are samples: the fullest ones are halved.
    """
    lengths = lengths_of(batch, packs=rows is not None)
    if rows is not None:
        if PLACES_OF_TEXTS in batch:
            filled = fill(lengths, max_tokens, rows.max_texts or len(lengths))
        else:
            filled = _fill(lengths, max_tokens)
            filled = _level(lengths, max_tokens, filled) if rows.evenly else filled
        filled = _halved(filled, num_at_least)
        return [batch] if len(filled) == 1 else [take_rows(batch, each, width_of(batch)) for each in filled]
    if num_at_least <= 1 and len(lengths) * max(lengths) <= max_tokens and max(lengths) == width_of(batch):
        return [batch]  # fits as it is: no copy
    grouped = _halved(_group(lengths, max_tokens), num_at_least)
    return [take_rows(batch, each, lengths[each[0]]) for each in grouped]


def passes_of(
    batch: Batch, loss: HeadLoss, max_tokens: int, ranks: Ranks, rows: Rows | None
) -> tuple[list[Batch], int]:
    """This rank's micro-batches of an effective batch, and how many of them count; dummy passes come last."""
    whole = loss.keeps_width and rows is None
    if rows is not None and ranks.size > 1:
        rows = replace(rows, evenly=False)
    cut = split_as_wide if whole else partial(split, rows=rows)
    if ranks.size == 1:
        parts = [part for part in cut(batch, max_tokens) if any(loss.counts(part))]
        return parts, len(parts)
    lengths = lengths_of(batch, packs=rows is not None)
    ranks.votes.agree_on(_fingerprint(batch), "batch")
    share = share_out(lengths, ranks.size)[ranks.rank]
    own = take_rows(batch, share, width_of(batch)) if share else None
    num_passes = ranks.num_passes(0 if own is None else len(cut(own, max_tokens)))
    parts = [] if own is None else cut(own, max_tokens, num_at_least=num_passes)
    dummies = [take_rows(batch, [0], lengths[0])] * (num_passes - len(parts))
    return [*parts, *dummies], len(parts)


def split_as_wide(batch: Batch, max_tokens: int, *, num_at_least: int = 1) -> list[Batch]:
    """Micro-batches that are as wide as the whole batch: for models that look at padding too."""
    width = width_of(batch)
    widths = [width] * int(next(iter(batch.values())).shape[0])
    return [take_rows(batch, rows, width) for rows in _halved(_group(widths, max_tokens), num_at_least)]


def fill(lengths: Sequence[int], max_tokens: int, max_texts: int) -> list[list[int]]:
    """Rows that are full but for the last, each with texts of all lengths; made for very many texts.

    >>> fill([10, 30, 20, 25], 50, 4)
    [[1, 2], [3, 0]]
    """
    shares = _shares(lengths, max_tokens, max_texts)
    filled, room = [list[int]() for _ in shares], [max_tokens for _ in shares]
    rows = [(0.0, row) for row in range(len(shares))]
    aside: list[tuple[int, int]] = []  # rows with too little room, the most first: shorter texts may find a place there
    for i in _longest_first(lengths):
        while aside and -aside[0][0] >= lengths[i]:
            row = heapq.heappop(aside)[1]
            heapq.heappush(rows, ((max_tokens - room[row]) / shares[row], row))
        while rows and filled[row := rows[0][1]] and lengths[i] > room[row]:
            heapq.heappop(rows)
            heapq.heappush(aside, (-room[row], row))
        if not rows:
            rows.append((0.0, len(filled)))
            filled.append([])
            room.append(max_tokens)
            shares.append(LEAST_SHARE)
        row = rows[0][1]
        filled[row].append(i)
        room[row] -= lengths[i]
        heapq.heappop(rows)
        if len(filled[row]) < max_texts:
            heapq.heappush(rows, ((max_tokens - room[row]) / shares[row], row))
    return [row for row in filled if row]


def full_rows(lengths: Sequence[int], max_tokens: int, max_texts: int) -> list[int]:
    """Tokens of the rows that `fill` makes, about.

    >>> full_rows([10, 30, 20, 25], 50, 4)
    [50, 35]
    """
    total = sum(lengths)
    return [round(share * total) for share in _shares(lengths, max_tokens, max_texts)]


def _shares(lengths: Sequence[int], max_tokens: int, max_texts: int) -> list[float]:
    """Of all texts, what each row takes."""
    whole = min(max_tokens / sum(lengths), max_texts / len(lengths), 1.0)
    num_whole = int(1 / whole + LEAST_SHARE)
    rest = 1 - num_whole * whole
    return [whole] * num_whole + [rest] * (rest > LEAST_SHARE)


def padded_passes(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """(samples, tokens each) of the passes into which `split` cuts samples of these lengths.

    >>> padded_passes([10, 512, 500, 20], 1024)
    [(2, 512), (2, 24)]
    """
    widest = max(lengths, default=0)
    widths = Counter[int]()
    for length, num in Counter(lengths).items():
        widths[padded_width(length, widest)] += num
    passes: list[list[int]] = []
    room = 0  # for samples in the last pass
    for width, num in sorted(widths.items(), reverse=True):
        while num:
            if not room:
                passes.append([0, width])
                room = max(max_tokens // width, 1)
            taken = min(num, room)
            passes[-1][0], room, num = passes[-1][0] + taken, room - taken, num - taken
    return [(num, width) for num, width in passes]


def packed_rows(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Tokens of the rows into which `split` packs samples of these lengths.

    >>> packed_rows([10, 512, 500, 20], 1024)
    [1022, 20]
    """
    return [sum(lengths[i] for i in rows) for rows in _fill(lengths, max_tokens)]


def share_out(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Samples of every rank, by number, in order; the longest are dealt first, each to whoever has fewest tokens.

    No rank has more tokens than the mean and one longest sample. With fewer samples than ranks, some get none.

    >>> share_out([9, 1, 8, 2, 3, 7], 2)
    [[0, 1, 3, 4], [2, 5]]
    """
    ranks = [(0, 0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for i in _longest_first(lengths):
        num_tokens, num_samples, rank = heapq.heappop(ranks)
        shares[rank].append(i)
        heapq.heappush(ranks, (num_tokens + lengths[i], num_samples + 1, rank))
    return [sorted(share) for share in shares]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # of equal ones, the first first


def _group(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Samples of like length together, each as long as the longest of its group."""
    groups: list[list[int]] = []
    for i in _longest_first(lengths):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _fill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each sample, longest first, into the first row that has room for it."""
    filled: list[list[int]] = []
    room: list[int] = []
    for i in _longest_first(lengths):
        place = next((n for n, left in enumerate(room) if lengths[i] <= left), None)
        if place is None:
            filled.append([])
            room.append(max_tokens)
            place = len(room) - 1
        filled[place].append(i)
        room[place] -= lengths[i]
    return filled


def _level(lengths: Sequence[int], max_tokens: int, filled: list[list[int]]) -> list[list[int]]:
    """Each sample, longest first, into the shortest of as many rows; as they were where that is too much."""
    levelled: list[list[int]] = [[] for _ in filled]
    tokens = [0] * len(filled)
    for i in _longest_first(lengths):
        place = min(range(len(tokens)), key=tokens.__getitem__)
        levelled[place].append(i)
        tokens[place] += lengths[i]
    return levelled if max(tokens) <= max_tokens else filled


def _halved(groups: list[list[int]], num_at_least: int) -> list[list[int]]:
    """At least so many groups, as far as there are samples."""
    while len(groups) < num_at_least and max(map(len, groups)) > 1:
        fullest = max(range(len(groups)), key=lambda n: len(groups[n]))
        rows = groups[fullest]
        groups[fullest : fullest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return groups


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


def _fingerprint(batch: Batch) -> int:
    """A number by which ranks see that they have the same batch."""
    seen = 0
    for value in batch.values():
        content: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        seen = zlib.crc32(content, seen)
    return seen
