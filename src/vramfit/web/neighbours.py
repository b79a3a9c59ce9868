"""What a reader is likely to ask next: the places on the sliders beside the one they are at."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from vramfit.models.catalogue import find_entry
from vramfit.web.limits import BATCH_STOPS, SEQ_STOPS
from vramfit.web.queries import EstimateQuery

NUM_BATCHES = 8
NUM_SEQS = 15


def neighbours(query: EstimateQuery) -> list[EstimateQuery]:
    """Queries that differ by a move of one slider, the nearest first."""
    entry = find_entry(query.model)
    longest = entry.max_positions if entry is not None else 512
    batches = _nearest(BATCH_STOPS, query.batch, NUM_BATCHES)
    seqs = _nearest([n for n in SEQ_STOPS if n <= longest], query.seq, NUM_SEQS)
    return list(_changed(query, batches, seqs))


def _changed(query: EstimateQuery, batches: Sequence[int], seqs: Sequence[int]) -> Iterator[EstimateQuery]:
    for batch, seq in zip_longest(batches, seqs):
        if batch is not None:
            yield query.model_copy(update={"batch": batch})
        if seq is not None:
            yield query.model_copy(update={"seq": seq})


def _nearest(stops: Sequence[int], here: int, count: int) -> list[int]:
    """The stops around a place, those beside it first; the place itself left out."""
    below = [n for n in stops if n < here][::-1]
    above = [n for n in stops if n > here]
    mixed = [n for pair in zip_longest(above, below) for n in pair if n is not None]
    return mixed[:count]
