"""Time on real lengths: effective batches are drawn, split as the `Stepper` splits them, and timed pass by pass."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from statistics import mean

from vramfit.planner.bench import PROBED_PASSES, Bench
from vramfit.planner.lengths import Lengths
from vramfit.planner.search import Choice, Search
from vramfit.planner.space import Recipe
from vramfit.step.splitting import packed_rows, padded_passes
from vramfit.tasks import find_task
from vramfit.techniques.padding import WINDOW_BATCHES
from vramfit.techniques.rows import row_tokens
from vramfit.workload import Workload

WORTH_PACKING = 0.04
"""Of the tokens of padded passes, how many have to be padding for sequences to be laid end to end: at full length,
packed passes are predicted to take up to 4 % longer."""
NUM_BATCHES = 64
SEED = 0
MAX_COMPARED = 3
"""Choices that are timed on the lengths: the fastest at full length are near the fastest on any."""
SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the full length: where passes are traced; between them, time goes in straight lines."""
MIN_TRACED = 8
MOST = 0.95
"""Of the batches: so many are to need no more passes than they are timed with."""
TIMED_PASSES = 4


class PassTimes:
    """Seconds of one pass of a recipe, by samples and tokens."""

    def __init__(self, bench: Bench, recipe: Recipe) -> None:
        self._bench = bench
        self._recipe = recipe
        full = bench.base.seq
        self._seqs = sorted({min(max(int(share * full), MIN_TRACED), full) for share in SHARES})
        self._timed = cache(self._time)

    def row_seconds(self, num_tokens: int, length: int) -> float:
        """Of one more packed row of sequences of this length, on average over tokens."""
        num = max(num_tokens / length, 1.0)
        below, above = (self._timed(n, length)[0] for n in (int(num), int(num) + 1))
        return below + (num - int(num)) * (above - below)

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
        workload = replace(self._bench.traced(self._recipe, PROBED_PASSES).workload, seq=seq)
        template = self._bench.work_by_length(self._recipe).template(seq)
        one, several = (
            self._bench.seconds(template, self._passes(workload, n, num), num) for n in (1, 1 + TIMED_PASSES)
        )
        each = (several - one) / TIMED_PASSES
        return each, max(one - each, 0.0)

    @staticmethod
    def _passes(workload: Workload, num_passes: int, num: int) -> Workload:
        """So many passes of so many samples on each GPU."""
        return replace(workload, batch=num_passes * num * workload.num_gpus, accumulate=num_passes, micro_batch=None)


def time_on_lengths(bench: Bench, choice: Choice, lengths: Lengths) -> float:
    """Mean seconds of a step over batches drawn from the lengths; the same batches for every choice."""
    times, most = PassTimes(bench, choice.recipe), choice.micro_batch * bench.base.seq
    typical = max(round(sum(n * n for n in lengths.values) / sum(lengths.values)), MIN_TRACED)
    found = []
    is_packed = choice.recipe.attention == "packed"
    for batch in (_batches if is_packed else _padded_batches)(bench, lengths):
        if is_packed:
            rows = packed_rows(batch, most)
            if choice.recipe.graphs:
                rows = [row_tokens(tokens, most) for tokens in rows]
            passes_s = sum(times.row_seconds(tokens, min(typical, bench.base.seq)) for tokens in rows)
        else:
            passes_s = sum(times.seconds(num, tokens) for num, tokens in padded_passes(batch, most))
        found.append(times.rest(choice.micro_batch) + passes_s)
    return mean(found)


def least_on_lengths(bench: Bench, choice: Choice, lengths: Lengths) -> float:
    """What `time_on_lengths` gives at least, without further traces.

    Passes of full length take what they take; shorter ones no less than the same ones in which no layer is computed
    twice, where these were timed before.
    """
    if choice.recipe.attention == "packed":
        return 0.0
    times, full = PassTimes(bench, choice.recipe), bench.base.seq
    plain = replace(choice.recipe, checkpointing=None)
    is_known = choice.recipe.checkpointing is not None and bench.knows_work_by_length(plain)
    shorter = PassTimes(bench, plain) if is_known else None
    found = []
    for batch in _padded_batches(bench, lengths):
        passes_s = 0.0
        for num, tokens in padded_passes(batch, choice.micro_batch * full):
            if tokens == full:
                passes_s += times.seconds(num, tokens)
            elif shorter is not None:
                passes_s += shorter.seconds(num, tokens)
        found.append(times.rest(choice.micro_batch) + passes_s)
    return mean(found)


def full_samples(bench: Bench, lengths: Lengths) -> int:
    """Samples of full length that have as many tokens as most batches of these lengths."""
    tokens = sorted(sum(batch) for batch in _batches(bench, lengths))
    return min(-(-tokens[int(MOST * len(tokens))] // bench.base.seq), bench.batch)


def padding_share(bench: Bench, micro_batch: int, lengths: Lengths) -> float:
    """Of the tokens of padded passes, how many are padding."""
    num_real = num_tokens = 0
    for batch in _batches(bench, lengths):
        num_real += sum(batch)
        num_tokens += sum(n * each for n, each in padded_passes(_as_padded(bench, batch), micro_batch * bench.base.seq))
    return 1 - num_real / num_tokens


def _batches(bench: Bench, lengths: Lengths) -> Iterator[list[int]]:
    """As they come."""
    draw = Random(SEED)
    for _ in range(NUM_BATCHES):
        yield draw.choices(lengths.values, k=bench.share)


def _padded_batches(bench: Bench, lengths: Lengths) -> Iterator[list[int]]:
    """As they come, or a window of them in which like lengths meet, as `runtime.data.order` has it."""
    share, num_whole = bench.share, min(len(lengths.values) // bench.share, WINDOW_BATCHES)
    batches: Iterable[list[int]] = _batches(bench, lengths)
    if bench.request.group_by_length and num_whole:
        drawn = sorted(Random(SEED).sample(lengths.values, num_whole * share), reverse=True)
        batches = (drawn[begin : begin + share] for begin in range(0, len(drawn), share))
    yield from (_as_padded(bench, batch) for batch in batches)


def _as_padded(bench: Bench, batch: list[int]) -> list[int]:
    """Nothing is cut for a task whose loss runs over padding too."""
    return [max(batch)] * len(batch) if find_task(bench.base.task).reads_padding else batch


def quicker(bench: Bench, search: Search, choice: Choice, lengths: Lengths) -> Choice:
    """The choice that is fastest on the lengths, among those that are fast at full length."""
    if (
        len(search.families) == 1 and choice.recipe.compile and not bench.base.compile
    ):  # chosen before, as it is without
        return _grown(bench, search, choice, lengths)
    others = sorted(search.largest(), key=lambda c: c.step_time_s * bench.price(c.recipe))
    compared = [choice, *(c for c in others if c.recipe != choice.recipe)][:MAX_COMPARED]
    best = _quickest(bench, compared, lengths)
    faster = [c for c in search.fitting() if c.step_time_s < best.step_time_s and c not in compared]
    return _grown(bench, search, _quickest(bench, [best, *faster], lengths), lengths)


def _quickest(bench: Bench, choices: Sequence[Choice], lengths: Lengths) -> Choice:
    best, *others = choices
    best_s = time_on_lengths(bench, best, lengths) * bench.price(best.recipe) if others else 0.0
    for other in others:
        price = bench.price(other.recipe)
        if least_on_lengths(bench, other, lengths) * price < best_s:
            other_s = time_on_lengths(bench, other, lengths) * price
            best, best_s = (other, other_s) if other_s < best_s else (best, best_s)
    return best


def _grown(bench: Bench, search: Search, choice: Choice, lengths: Lengths) -> Choice:
    """The largest micro-batch with as many passes at full length, unless it takes longer: short samples need fewer."""
    if {"micro_batch", "accumulate"} & bench.request.asked:
        return choice
    size, batch = choice.micro_batch, bench.timed_batch(choice.recipe)
    while size < batch and -(-batch // (size + 1)) == -(-batch // choice.micro_batch):
        size += 1
    for grown in range(size, choice.micro_batch, -1):
        if bench.peek(choice.recipe, grown).requested_bytes > search.limit_bytes:
            continue
        found = search.predict(choice.recipe, grown)
        if found.safe_reserved_bytes <= search.limit_bytes:
            return min(found, choice, key=lambda c: time_on_lengths(bench, c, lengths))
    return choice
