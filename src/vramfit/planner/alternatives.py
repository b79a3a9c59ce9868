"""What else was possible: settings that were predicted, each at its best split, and the plainest run."""

from dataclasses import replace

from vramfit.planner.bench import Bench
from vramfit.planner.lengths import Lengths
from vramfit.planner.search import Choice, Search
from vramfit.planner.space import PRICED, Recipe, strongest
from vramfit.planner.varied import time_on_lengths
from vramfit.records.plan import Alternative
from vramfit.settings import chosen_in_words

MAX_SHOWN = 8


def alternatives_of(
    bench: Bench, search: Search, chosen: Choice, lengths: Lengths | None = None
) -> tuple[Alternative, ...]:
    """Other settings, fastest first; what does not fit stands behind what does, and what is faster says why not."""
    found: dict[tuple[Recipe, int], tuple[Choice, int]] = {}
    for one in search.and_before():
        found |= {(c.recipe, c.micro_batch): (c, one.limit_bytes) for c in [*one.largest(), *one.tried]}
        plainest = _plainest(one)
        if bench.share in one.sizes and plainest is not None:
            found.setdefault((plainest, bench.share), (one.predict(plainest, bench.share), one.limit_bytes))
    found.pop((chosen.recipe, chosen.micro_batch), None)
    made = [(_alternative(bench, choice, limit_bytes), choice) for choice, limit_bytes in found.values()]
    shown = sorted(made, key=lambda pair: (not pair[0].fits, pair[0].step_time_s))[:MAX_SHOWN]
    own_s = _full_time(bench, chosen)
    return tuple(
        replace(a, why_not=_why_not(bench, search, chosen, choice, lengths)) if a.fits and a.step_time_s < own_s else a
        for a, choice in shown
    )


def _full_time(bench: Bench, choice: Choice) -> float:
    """Seconds of a step whose samples are all of full length."""
    packed = choice.recipe.attention == "packed"
    return bench.full_time(choice.recipe, choice.micro_batch) if packed else choice.step_time_s


def _why_not(bench: Bench, search: Search, chosen: Choice, other: Choice, lengths: Lengths | None) -> str:
    """Why settings that are faster at full length are not the plan."""
    own_s, other_s = _full_time(bench, chosen), _full_time(bench, other)
    where = ""
    if lengths is not None:
        own_s, other_s = (time_on_lengths(bench, choice, lengths) for choice in (chosen, other))
        where = " on the real lengths"
        if other_s >= own_s:
            return f"on the real lengths a step takes {other_s:.3g} s, and {own_s:.3g} s by this plan"
    if other.safe_reserved_bytes > search.limit_bytes:
        return "it leaves less free than the margin of this plan"
    if chosen.recipe.graphs and not other.recipe.graphs:
        return "recorded passes do not wait for the host, whose time differs from machine to machine"
    more = [PRICED[name] for name in other.recipe.priced if name not in chosen.recipe.priced]
    needed, saved = 1 - bench.price(chosen.recipe) / bench.price(other.recipe), 1 - other_s / own_s
    return f"{' and '.join(more)} must save {needed:.0%} of the time to be taken, and save {saved:.0%}{where}"


def _plainest(search: Search) -> Recipe | None:
    """fp32, or the nearest to it, with nothing else changed."""
    plain = [f.recipe for f in search.families if f.recipe.precision in ("fp32", "tf32") and f.sibling is None]
    return plain[0] if plain else None


def _alternative(bench: Bench, choice: Choice, limit_bytes: int) -> Alternative:
    return Alternative(
        settings=words_of(bench, choice),
        kind=strongest(bench.workload(choice.recipe, choice.micro_batch)),
        micro_batch=choice.micro_batch,
        accumulate=bench.passes(choice.micro_batch),
        step_time_s=_full_time(bench, choice),
        safe_reserved_bytes=choice.safe_reserved_bytes,
        fits=choice.safe_reserved_bytes <= limit_bytes,
    )


def words_of(bench: Bench, choice: Choice) -> str:
    """Settings in short, but for how the batch is split."""
    return ", ".join(chosen_in_words(bench.workload(choice.recipe, choice.micro_batch)))


def without_checkpointing(search: Search, chosen: Choice) -> Choice | None:
    """The fastest choice of the same recipe that fits and computes nothing twice."""
    recipe = replace(chosen.recipe, checkpointing=None)
    return min((c for c in search.fitting() if c.recipe == recipe), key=lambda c: c.step_time_s, default=None)
