"""Time on real lengths: effective batches are drawn, split as the `Stepper` splits them, and timed pass by pass."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from random import Random
from statistics import mean

from vramfit.planner.heuristics import LENGTH_SHARES, MAX_COMPARED
from vramfit.planner.job import SEED, Job, drawn_batches, once
from vramfit.planner.predictions import (
    PROBED_PASSES,
    Choice,
    peek,
    time_of,
    timed_batch,
    traced_passes,
    work_by_length,
)
from vramfit.planner.recipes import Recipe
from vramfit.planner.search import Search
from vramfit.step.splitting import full_rows, packed_rows, padded_passes
from vramfit.tasks import find_task
from vramfit.techniques.packing import WINDOW_BATCHES, row_tokens

MIN_TRACED = 8
TIMED_PASSES = 4


class PassTimes:
    """Seconds of one pass of a recipe, by sequences and their tokens."""

    def __init__(self, job: Job, recipe: Recipe) -> None:
        self._job = job
        self._recipe = recipe
        full = job.base.seq
        self._seqs = sorted({min(max(int(share * full), MIN_TRACED), full) for share in LENGTH_SHARES})
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

    def least(self, tokens: float) -> float:
        """Of a step of so many tokens at least: in one pass, and in the shortest sequences that are timed."""
        rests_s = [self.rest(num * self._job.base.texts_per_sample) for num in (1, self._job.base.share)]
        return min(rests_s) + self._timed(max(int(tokens / self._seqs[0]), 1), self._seqs[0])[0]

    def _time(self, num: int, seq: int) -> tuple[float, float]:
        """Seconds of a pass, and of the rest of a step."""
        workload = traced_passes(self._job, self._recipe, PROBED_PASSES).workload
        template = work_by_length(self._job, self._recipe, seq)
        num = -(-num // workload.texts_per_sample)
        fewest = PROBED_PASSES if workload.runs_twice else 1  # one pass would not run twice
        few, several = (
            time_of(self._job, template, workload, num, num_passes).step.seconds
            for num_passes in (fewest, fewest + TIMED_PASSES)
        )
        each = (several - few) / TIMED_PASSES
        return each, max(few - fewest * each, 0.0)


@once
def time_on_lengths(job: Job, choice: Choice) -> float:
    """Mean seconds of a step over batches drawn from the lengths; the same batches for every choice."""
    assert job.lengths is not None
    times, most = PassTimes(job, choice.recipe), choice.micro_batch * job.base.sample_tokens
    values = job.lengths.values
    typical = min(max(round(sum(n * n for n in values) / sum(values)), MIN_TRACED), job.base.seq)
    rest_s = times.rest(choice.micro_batch * job.base.texts_per_sample)
    if not choice.recipe.is_packed:
        return mean(
            rest_s + sum(times.seconds(*each) for each in padded_passes(batch, most)) for batch in padded_batches(job)
        )
    filled_up = choice.recipe.captures_graphs  # to a few sizes
    found = []
    max_texts = choice.micro_batch * job.base.row_texts
    split = partial(full_rows, max_texts=max_texts) if job.base.is_joint else packed_rows
    for batch in drawn_batches(job):
        rows = [row_tokens(tokens, most) if filled_up else tokens for tokens in split(batch, most)]
        found.append(rest_s + sum(times.row_seconds(tokens, typical) for tokens in rows))
    return mean(found)


def least_on_lengths(job: Job, choice: Choice) -> float:
    """What `time_on_lengths` gives at least, without further traces.

    Passes of full length are timed; shorter ones take at least as long as without checkpointing, where that was timed
    before.
    """
    if choice.recipe.is_packed:
        return 0.0
    times, full, texts = PassTimes(job, choice.recipe), job.base.seq, job.base.texts_per_sample
    plain = choice.recipe.without_checkpointing()
    is_known = plain != choice.recipe and ("work_by_length", plain, full) in job.answers
    shorter = PassTimes(job, plain) if is_known else None
    found = []
    for batch in padded_batches(job):
        passes_s = 0.0
        for num, tokens in padded_passes(batch, choice.micro_batch * texts * full):
            if tokens == full:
                passes_s += times.seconds(num, tokens)
            elif shorter is not None:
                passes_s += shorter.seconds(num, tokens)
        found.append(times.rest(choice.micro_batch * texts) + passes_s)
    return mean(found)


def least_padded(job: Job, recipe: Recipe) -> float:
    """Seconds of a padded step at least, if nothing were padding."""
    return PassTimes(job, recipe).least(mean(map(sum, drawn_batches(job))))


@once
def padding_share(job: Job, micro_batch: int) -> float:
    """Of the tokens of padded passes, how many are padding."""
    num_real = num_tokens = 0
    for batch in drawn_batches(job):
        num_real += sum(batch)
        num_tokens += sum(
            n * each for n, each in padded_passes(_as_padded(job, batch), micro_batch * job.base.sample_tokens)
        )
    return 1 - num_real / num_tokens


def padded_batches(job: Job) -> Iterator[list[int]]:
    """As they come, or a window of them in which like lengths meet, as `runtime.data.samples` has it."""
    assert job.lengths is not None
    values, share = job.lengths.values, job.base.share * job.base.texts_per_sample
    batches: Iterable[list[int]] = drawn_batches(job)
    num_whole = min(len(values) // share, WINDOW_BATCHES)
    if job.request.group_by_length and num_whole:
        drawn = sorted(Random(SEED).sample(values, num_whole * share), reverse=True)
        batches = (drawn[begin : begin + share] for begin in range(0, len(drawn), share))
    yield from (_as_padded(job, batch) for batch in batches)


def _as_padded(job: Job, batch: list[int]) -> list[int]:
    """Nothing is cut for a task whose loss runs over padding too."""
    return [max(batch)] * len(batch) if find_task(job.base.task).reads_padding else batch


def quicker(search: Search, choice: Choice, *, repeats: bool) -> Choice:
    """The choice that is fastest on the lengths, among those that are fast at full length.

    Args:
        repeats: whether the same search was made before, with one setting less.
    """
    if repeats and len(search.families) == 1:
        return _grown(search, choice)
    others = sorted(search.largest(), key=lambda c: c.step_time_s * search.price(c.recipe))
    compared = [choice, *(c for c in others if c.recipe != choice.recipe)][:MAX_COMPARED]
    best = _quickest(search, compared)
    faster = [c for c in search.fitting() if c.step_time_s < best.step_time_s and c not in compared]
    return _grown(search, _quickest(search, [best, *faster]))


def _quickest(search: Search, choices: Sequence[Choice]) -> Choice:
    best, *others = choices
    best_s = time_on_lengths(search.job, best) * search.price(best.recipe) if others else 0.0
    for other in others:
        price = search.price(other.recipe)
        if least_on_lengths(search.job, other) * price < best_s:
            other_s = time_on_lengths(search.job, other) * price
            best, best_s = (other, other_s) if other_s < best_s else (best, best_s)
    return best


def _grown(search: Search, choice: Choice) -> Choice:
    """The largest micro-batch with as many passes at full length, unless it takes longer: short samples need fewer."""
    job = search.job
    if job.request.fixes_split:
        return choice
    size, batch = choice.micro_batch, timed_batch(job, choice.recipe)
    while size < batch and -(-batch // (size + 1)) == -(-batch // choice.micro_batch):
        size += 1
    for grown in range(size, choice.micro_batch, -1):
        if peek(job, choice.recipe, grown).requested_bytes > search.limit_bytes:
            continue
        found = search.predict(choice.recipe, grown)
        if found.safe_reserved_bytes <= search.limit_bytes:
            return min(found, choice, key=lambda c: time_on_lengths(job, c))
    return choice
