"""What a reader is likely to ask next: the places on the sliders beside the one they are at."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from vramfit.models.catalogue import find_entry
from vramfit.web.limits import BATCH_STOPS, SEQ_STOPS
from vramfit.web.queries import EstimateQuery

NUM_BATCHES = 8
NUM_SEQS = 15


def neighbours(query: EstimateQuery, before: EstimateQuery | None = None) -> list[EstimateQuery]:
    """Queries that differ by a move of one slider, the likeliest first.

    Args:
        before: what was asked before it: whoever moves a slider goes on in the same direction.
    """
    entry = find_entry(query.model)
    longest = entry.max_positions if entry is not None else 512
    before = before or query
    batches = _nearest(BATCH_STOPS, query.batch, NUM_BATCHES, query.batch - before.batch)
    seqs = _nearest([n for n in SEQ_STOPS if n <= longest], query.seq, NUM_SEQS, query.seq - before.seq)
    return list(_changed(query, batches, seqs))


def _changed(query: EstimateQuery, batches: Sequence[int], seqs: Sequence[int]) -> Iterator[EstimateQuery]:
    for batch, seq in zip_longest(batches, seqs):
        if batch is not None:
            yield query.model_copy(update={"batch": batch, "micro_batch": None})
        if seq is not None:
            yield query.model_copy(update={"seq": seq})


def _nearest(stops: Sequence[int], here: int, count: int, direction: int) -> list[int]:
    """The stops around a place, the next two in the direction first, then those beside it; the place itself left out.

    >>> _nearest([1, 2, 3, 4, 5, 6], 3, 4, 1), _nearest([1, 2, 3, 4, 5, 6], 3, 4, -1)
    ([4, 5, 2, 6], [2, 1, 4, 5])
    """
    below = [n for n in stops if n < here][::-1]
    above = [n for n in stops if n > here]
    ahead, behind = (below, above) if direction < 0 else (above, below)
    mixed = [n for pair in zip_longest(behind, ahead[2:]) for n in pair if n is not None]
    return [*ahead[:2], *mixed][:count]
