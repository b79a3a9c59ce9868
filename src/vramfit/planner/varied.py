"""Time on real lengths: effective batches are drawn, split as the `Stepper` splits them, and timed pass by pass."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from statistics import mean

from vramfit.planner.bench import ANY_BATCH, PROBED_PASSES, Bench
from vramfit.planner.lengths import Lengths
from vramfit.planner.search import Choice, Search
from vramfit.planner.space import Recipe
from vramfit.techniques.padding import padded_width
from vramfit.workload import Workload

NUM_BATCHES = 64
SEED = 0
MAX_COMPARED = 3
"""Choices that are timed on the lengths: the fastest at full length are near the fastest on any."""
SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the full length: where passes are traced; between them, time goes in straight lines."""
MIN_TRACED = 8
TIMED_PASSES = 4


def group(lengths: Sequence[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """(samples, tokens each) of the passes of one effective batch, as `runtime.splitting` makes them.

    >>> list(group([10, 512, 500, 20], 1024))
    [(2, 512), (2, 24)]
    """
    num, longest, widest = 0, 0, max(lengths, default=0)
    for length in sorted((padded_width(length, widest) for length in lengths), reverse=True):
        if num and (num + 1) * longest > max_tokens:
            yield num, longest
            num = 0
        longest = longest if num else length
        num += 1
    if num:
        yield num, longest


class PassTimes:
    """Seconds of one pass of a recipe, by samples and tokens."""

    def __init__(self, bench: Bench, recipe: Recipe) -> None:
        self._bench = bench
        self._recipe = recipe
        full = bench.base.seq
        self._seqs = sorted({min(max(int(share * full), MIN_TRACED), full) for share in SHARES})
        self._timed = cache(self._time)

    def seconds(self, num: int, tokens: int) -> float:
        """Of one more pass in a step."""
        high = min(bisect_left(self._seqs, tokens), len(self._seqs) - 1)
        low = max(high - 1, 0) if self._seqs[high] > tokens else high
        below, above = self._timed(num, self._seqs[low])[0], self._timed(num, self._seqs[high])[0]
        if low == high:
            return below
        share = (tokens - self._seqs[low]) / (self._seqs[high] - self._seqs[low])
        return below + max(share, 0.0) * (above - below)

    def rest(self, num: int) -> float:
        """Of a step beside its passes: the optimizer."""
        return self._timed(num, self._seqs[-1])[1]

    def _time(self, num: int, seq: int) -> tuple[float, float]:
        """Seconds of a pass, and of the rest of a step."""
        traced = self._bench.traced(self._recipe, PROBED_PASSES)
        traced = replace(traced, workload=replace(traced.workload, seq=seq))
        template = traced.template(ANY_BATCH)
        one, several = (
            self._bench.seconds(template, self._passes(traced.workload, n, num), num) for n in (1, 1 + TIMED_PASSES)
        )
        each = (several - one) / TIMED_PASSES
        return each, max(one - each, 0.0)

    @staticmethod
    def _passes(workload: Workload, num_passes: int, num: int) -> Workload:
        """So many passes of so many samples on each GPU."""
        return replace(workload, batch=num_passes * num * workload.num_gpus, accumulate=num_passes, micro_batch=None)


def time_on_lengths(bench: Bench, choice: Choice, lengths: Lengths) -> float:
    """Mean seconds of a step over batches drawn from the lengths; the same batches for every choice."""
    times = PassTimes(bench, choice.recipe)
    draw = Random(SEED)
    found = []
    for _ in range(NUM_BATCHES):
        batch = draw.choices(lengths.values, k=bench.share)
        if bench.base.task == "question-answering":  # its softmax runs over padding too: nothing is cut
            batch = [max(batch)] * len(batch)
        passes = group(batch, choice.micro_batch * bench.base.seq)
        found.append(times.rest(choice.micro_batch) + sum(times.seconds(num, tokens) for num, tokens in passes))
    return mean(found)


def quicker(bench: Bench, search: Search, choice: Choice, lengths: Lengths) -> Choice:
    """The choice that is fastest on the lengths, among those that are fast at full length."""
    others = sorted(search.largest(), key=lambda c: c.step_time_s * c.recipe.price)
    compared = [choice, *(c for c in others if c.recipe != choice.recipe)][:MAX_COMPARED]
    best = min(compared, key=lambda c: time_on_lengths(bench, c, lengths) * c.recipe.price)
    return _grown(bench, search, best)


def _grown(bench: Bench, search: Search, choice: Choice) -> Choice:
    """The largest micro-batch with as many passes at full length: short samples then need fewer."""
    if {"micro_batch", "accumulate"} & bench.request.asked:
        return choice
    size = choice.micro_batch
    while size < bench.share and bench.passes(size + 1) == bench.passes(choice.micro_batch):
        size += 1
    for grown in range(size, choice.micro_batch, -1):
        if bench.peek(choice.recipe, grown).requested_bytes > search.limit_bytes:
            continue
        found = search.predict(choice.recipe, grown)
        if found.safe_reserved_bytes <= search.limit_bytes:
            return found
    return choice
