"""Why a plan has the settings it has, each in a sentence with numbers; and what else was possible."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vramfit.planner.choose import Found, why_not_packed
from vramfit.planner.heuristics import WORTH_PACKING
from vramfit.planner.job import Job
from vramfit.planner.predictions import (
    Choice,
    floor_bytes,
    full_time,
    peek,
    safe_bytes,
    timed_batch,
    weight_bytes,
    workload_of,
)
from vramfit.planner.recipes import IN_RECIPE, Recipe, strongest
from vramfit.planner.search import Search
from vramfit.planner.varied import padding_share, time_on_lengths
from vramfit.records.estimate import COPIES, HOST_STEP
from vramfit.records.plan import Alternative, Reason
from vramfit.settings import SETTINGS, Technique, chosen_in_words, find
from vramfit.settings.sizes import split_of
from vramfit.tasks import find_task
from vramfit.units import format_bytes

ASKED = "asked for"
BY_CHANCE = "little: adamw-8bit rounds weights by chance, and small updates count on average"
MASTERS = "hardly any: masters in fp32 keep every update"
COSTS = {"amp-bf16": "hardly any: weights, sums and the optimizer stay in fp32"}
"""Where the catalogue speaks of several values at once."""
MAX_ALTERNATIVES = 8


def reasons_of(found: Found) -> tuple[Reason, ...]:
    """A reason for each setting that is not the plainest, in the order of the step."""
    workload, asked = found.estimate.workload, found.job.request.asked
    whys = dict(_whys(found))
    made = [_split_reason(found)]
    for keyword in IN_RECIPE:
        value = getattr(workload, keyword)
        technique = find(keyword, value)
        if technique is None and keyword not in asked:
            continue
        why = whys.get(keyword, technique.why or technique.does if technique else "")
        if keyword in asked:  # needs no reason; what it costs to wait in host memory is said all the same
            why = f"{ASKED}; {why.partition('; ')[2]}" if keyword == "offload" else ASKED
        made.append(
            Reason(
                setting=f"{keyword} {SETTINGS[keyword].shown(value)}",
                kind=technique.kind if technique else "free",
                why=why,
                cost=_cost_in_bf16(found.recipe) if value == "bf16" else _cost(technique, value),
            )
        )
    return tuple(made)


def _whys(found: Found) -> Iterator[tuple[str, str]]:
    """Keyword → why, where there is more to say than what the technique does."""
    recipe, search = found.recipe, found.search
    other = _other_precision(found)
    if other is not None:
        yield "precision", _compare(found, other)
    if recipe.offloads_layers:
        yield "checkpointing", "layers that wait in host memory come again for backward, and are computed again then"
    elif recipe.is_checkpointed:
        yield "checkpointing", _why_checkpointing(found)
    if recipe.has_8_bit_state:
        fused = replace(recipe, optimizer="adamw-fused")
        saved = _state_saved(search, recipe)
        fits = any(c.recipe == fused and c.micro_batch == found.choice.micro_batch for c in search.tried)
        much = f"its state takes {format_bytes(saved)} less" if saved else "its state takes less"
        yield "optimizer", f"{much} than AdamW's" + ("" if fits else ", which does not fit")
    elif recipe.offloads:
        yield "optimizer", "what waits comes to the GPU in pieces, where one kernel steps them"
    if recipe.is_compiled:
        yield "compile", _why_compiled(found)
    if recipe.is_packed:
        yield "attention", _why_packed(found)
    elif found.estimate.has_large_mask and (technique := find("attention", recipe.attention)) is not None:
        why = why_not_packed(found.job, recipe) or "packed passes are no faster on these lengths"
        mask = f"packed attention has no mask, which takes {format_bytes(found.estimate.mask_bytes)} here"
        yield "attention", f"{technique.does}; {mask}, but {why}"
    if recipe.offloads:
        yield "offload", _why_offload(found)
        if recipe.has_bf16_weights:
            yield "precision", "weights in fp32 do not fit; their masters wait in host memory"
    for keyword in found.proposal.training.settings:
        yield keyword, "allowed, and nothing milder fits"


def _why_packed(found: Found) -> str:
    """What laying sequences end to end saves."""
    if found.job.lengths is None:
        return "sequences lie end to end, so that padding takes nothing"
    share = padding_share(found.job, found.choice.micro_batch)
    why = "sequences lie end to end"
    if share >= WORTH_PACKING:
        why += f"; {share:.0%} of padded passes would be padding"
    else:
        how = "as fused layers take them" if found.recipe.has_own_kernels else "and need no mask"
        why += f", {how}; of padded passes hardly anything would be padding"
    more = find_task(found.job.base.task).why_packed
    return f"{why}; {more}" if more else why


def _cost_in_bf16(recipe: Recipe) -> str:
    """What weights in bfloat16 cost goes by how they are stepped."""
    if recipe.offloads:
        return MASTERS
    return BY_CHANCE if recipe.has_8_bit_state else _cost(find("precision", "bf16"), "bf16")


def _cost(technique: Technique | None, value: Any) -> str:
    """What a setting costs in quality; nothing for same maths."""
    if technique is None or technique.kind == "free":
        return ""
    return COSTS.get(str(value), technique.costs)


def _why_offload(found: Found) -> str:
    """Why something waits in host memory, and what that costs."""
    recipe, times = found.recipe, found.estimate.time_breakdown  # of a GPU that is named
    on_device = floor_bytes(found.job, replace(recipe, offload=None))
    spent = (
        f", and of the {found.choice.step_time_s:.2g} s of a step copies of layers and gradients take "
        f"{times.get(COPIES, 0.0):.2g} s and the optimizer {times.get(HOST_STEP, 0.0):.2g} s"
    )
    is_first = found.job.request.allow and not found.proposal.training.needs
    instead = ". It comes before what is allowed: --no-offload (offload=False) uses that instead" if is_first else ""
    return (
        f"nothing fits that stays on the GPU, where weights, gradients and {recipe.optimizer}'s state alone "
        f"would take {format_bytes(on_device)}; {format_bytes(found.estimate.host_bytes)} wait in host memory"
        f"{spent if times else ''}{instead}"
    )


def _other_precision(found: Found) -> Recipe | None:
    recipe = found.recipe
    families = [family for search in found.searches for family in search.families]
    others = [f.recipe for f in families if f.recipe.precision != recipe.precision]
    alike = recipe.without_checkpointing()
    return next(
        (o for o in others if replace(o, precision=recipe.precision, compile=recipe.is_compiled) == alike), None
    )


def _compare(found: Found, other: Recipe) -> str:
    """Time and memory beside the other precision, all else alike."""
    alike = replace(found.recipe, checkpointing=other.checkpointing, compile=other.compile)
    this, that = (peek(found.job, recipe, found.choice.micro_batch) for recipe in (alike, other))
    pace = that.step_time_s / this.step_time_s
    less = that.requested_bytes - this.requested_bytes
    size = f"{format_bytes(abs(less))} {'less' if less > 0 else 'more'}"
    faster = f"{pace:.1f} times as fast as {other.precision}" if pace >= 1 else f"slower than {other.precision}"
    return f"{faster} and {size} for the same samples"


def _why_compiled(found: Found) -> str:
    """Time and memory beside the same layers as they are."""
    both = (replace(found.recipe, compile=compiles) for compiles in (True, False))
    this, that = (peek(found.job, recipe, found.choice.micro_batch) for recipe in both)
    less, faster = that.requested_bytes - this.requested_bytes, that.step_time_s / this.step_time_s - 1
    return f"fused kernels keep {format_bytes(max(less, 0))} less, and steps are {faster:.0%} faster by what they read"


def _state_saved(search: Search, recipe: Recipe) -> int | None:
    family = next((f for f in search.families if f.recipe == recipe.without_checkpointing()), None)
    size = search.sizes[-1]
    if family is None or family.sibling is None or size not in family.sibling.plain:
        return None
    return family.sibling.plain[size].requested_bytes - family.plain[size].requested_bytes


def _why_checkpointing(found: Found) -> str:
    recipe, chosen = found.recipe.without_checkpointing(), found.choice
    fitting = [c for c in found.search.fitting() if c.recipe == recipe]
    plain = min(fitting, key=lambda c: c.step_time_s, default=None)
    if plain is None:
        return "without it not even the smallest passes fit"
    gained = plain.step_time_s / chosen.step_time_s
    faster = f"{gained:.1f} times as fast" if gained >= 1.5 else f"{gained - 1:.0%} faster"
    return (
        f"passes of {chosen.micro_batch} fit in place of {plain.micro_batch}, and a step is {faster} although these "
        "layers are computed twice"
    )


def _split_reason(found: Found) -> Reason:
    passes, setting = found.job.passes(found.choice.micro_batch), f"micro_batch {found.choice.micro_batch}"
    in_rows = found.recipe.is_packed and found.job.lengths is not None
    if passes > 1 and not in_rows:
        setting += f" × {passes}"
    if found.job.request.fixes_split:
        why = ASKED
    elif in_rows:
        why = _why_rows(found)
    else:
        why = "the whole batch fits at once" if passes == 1 else _why_not_larger(found)
    return Reason(setting=setting, kind="free", why=why)


def _why_rows(found: Found) -> str:
    """How the tokens of a batch go into packed rows."""
    job, micro_batch = found.job, found.choice.micro_batch
    assert job.lengths is not None
    mean = job.base.step_texts * sum(job.lengths.values) / len(job.lengths.values)
    passes = -(-timed_batch(job, found.recipe) // micro_batch)
    several = "one pass" if passes == 1 else f"{passes} passes"
    summed = "passes run twice, so that all texts are compared," if job.base.is_joint else "with gradients summed"
    return (
        f"a pass holds {micro_batch * job.base.sample_tokens:,} tokens, and {job.base.batch} samples have {mean:,.0f} "
        f"on average: {several} for most batches, {summed} where there are several"
    )


def _why_same(job: Job) -> str:
    """Why a split changes nothing that is learned."""
    if job.base.is_joint:
        return (
            f"passes run twice, and all {job.base.step_texts:,} texts of a step are compared, so that nothing changes"
        )
    return f"gradients of {job.base.batch} samples are summed, so that nothing changes"


def _why_not_larger(found: Found) -> str:
    job, recipe, limit_bytes = found.job, found.recipe, found.search.limit_bytes
    same = _why_same(job)
    larger = min((m for m in found.search.sizes if m > found.choice.micro_batch), default=None)
    if larger is None:
        return same
    needs = peek(job, recipe, larger).requested_bytes
    if job.passes(larger) == 1:
        needs -= weight_bytes(job, recipe)
    if needs <= limit_bytes:  # by its tensors; segments may take more
        needs = safe_bytes(job, recipe, larger)
    if needs <= limit_bytes:
        return f"{same}; passes of {larger} fit too, and are no faster"
    room = f", which leaves less than the headroom of {format_bytes(job.budget_bytes - limit_bytes)}"
    why = room if needs <= job.budget_bytes else ""
    return f"{same}; passes of {larger} would need {format_bytes(needs)}{why}"


def alternatives_of(chosen: Found) -> tuple[Alternative, ...]:
    """Other settings that were predicted, each at its best split, and the plainest run; the fastest that fits first.

    What is faster than the plan says why it was not taken.
    """
    job = chosen.job
    found: dict[tuple[Recipe, int], tuple[Choice, int]] = {}
    for search in chosen.searches:
        found |= {(c.recipe, c.micro_batch): (c, search.limit_bytes) for c in [*search.largest(), *search.tried]}
        plainest = _plainest(search)
        if job.base.share in search.sizes and plainest is not None:
            whole = (search.predict(plainest, job.base.share), search.limit_bytes)
            found.setdefault((plainest, job.base.share), whole)
    found.pop((chosen.recipe, chosen.choice.micro_batch), None)
    made = [(_alternative(job, choice, limit_bytes), choice) for choice, limit_bytes in found.values()]
    shown = sorted(made, key=lambda pair: (not pair[0].fits, pair[0].step_time_s))[:MAX_ALTERNATIVES]
    own_s = full_time(job, chosen.choice)
    return tuple(
        replace(a, why_not=_why_not(chosen, choice)) if a.fits and a.step_time_s < own_s else a for a, choice in shown
    )


def _why_not(chosen: Found, other: Choice) -> str:
    """Why settings that are faster at full length are not the plan."""
    job, price, where = chosen.job, chosen.search.price, ""
    own_s, other_s = (full_time(job, choice) for choice in (chosen.choice, other))
    if job.lengths is not None:
        own_s, other_s = (time_on_lengths(job, choice) for choice in (chosen.choice, other))
        where = " on the real lengths"
        if other_s >= own_s:
            return f"on the real lengths a step takes {other_s:.3g} s, and {own_s:.3g} s by this plan"
    if other.safe_reserved_bytes > chosen.search.limit_bytes:
        return "it leaves less free than the headroom of this plan"
    if chosen.recipe.captures_graphs and not other.recipe.captures_graphs:
        return "recorded passes do not wait for the host, whose time differs from machine to machine"
    more = [each.words for each in other.recipe.priced if each not in chosen.recipe.priced]
    needed, saved = 1 - price(chosen.recipe) / price(other.recipe), 1 - other_s / own_s
    return f"{' and '.join(more)} must save {needed:.0%} of the time to be taken, and save {saved:.0%}{where}"


def _plainest(search: Search) -> Recipe | None:
    """fp32, or the nearest to it, with nothing else changed."""
    plain = [f.recipe for f in search.families if f.recipe.is_32_bit and f.sibling is None]
    return plain[0] if plain else None


def _alternative(job: Job, choice: Choice, limit_bytes: int) -> Alternative:
    return Alternative(
        settings=words_of(job, choice),
        kind=strongest(workload_of(job, choice.recipe, choice.micro_batch)),
        **split_of(choice.micro_batch, job.passes(choice.micro_batch)),
        step_time_s=full_time(job, choice),
        safe_reserved_bytes=choice.safe_reserved_bytes,
        fits=choice.safe_reserved_bytes <= limit_bytes,
    )


def words_of(job: Job, choice: Choice) -> str:
    """Settings in short, but for how the batch is split."""
    return ", ".join(chosen_in_words(workload_of(job, choice.recipe, choice.micro_batch)))
