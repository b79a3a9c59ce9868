"""Why a plan has the settings it has, each in a sentence with numbers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vramfit.planner.alternatives import without_checkpointing
from vramfit.planner.bench import Bench
from vramfit.planner.lengths import Lengths
from vramfit.planner.search import Choice, Search
from vramfit.planner.space import Recipe, Training
from vramfit.planner.varied import WORTH_PACKING, padding_share
from vramfit.records.estimate import COPIES, HOST_STEP, Estimate
from vramfit.records.plan import Reason
from vramfit.settings import BF16_CAPABILITY, PLANNED, SETTINGS, Technique, find
from vramfit.tasks import find_task
from vramfit.units import format_bytes
from vramfit.workload import Workload

ASKED = "asked for"
KEYWORDS = tuple(name for name in PLANNED if name not in ("micro_batch", "accumulate"))
BY_CHANCE = "little: adamw-8bit rounds weights by chance, and small updates count on average"
MASTERS = "hardly any: masters in fp32 keep every update"
COSTS = {"amp-bf16": "hardly any: weights, sums and the optimizer stay in fp32"}
"""Where the catalogue speaks of several values at once."""


def reasons_of(
    bench: Bench,
    search: Search,
    chosen: Choice,
    training: Training,
    estimate: Estimate,
    lengths: Lengths | None = None,
) -> tuple[Reason, ...]:
    """A reason for each setting that is not the plainest, in the order of the step."""
    workload = bench.workload(chosen.recipe, chosen.micro_batch)
    whys = dict(_whys(bench, search, chosen, training))
    if chosen.recipe.attention == "packed":
        whys["attention"] = _why_packed(bench, chosen, lengths)
    elif estimate.has_large_mask:
        why = why_not_packed(bench, chosen.recipe, lengths) or "packed passes are no faster on these lengths"
        mask = f"packed attention has no mask, which takes {format_bytes(estimate.mask_bytes)} here"
        whys["attention"] += f"; {mask}, but {why}"
    if chosen.recipe.offload is not None:
        whys["offload"] = _why_offload(bench, chosen, estimate)
    made = [_split_reason(bench, search, chosen, lengths)]
    for keyword in KEYWORDS:
        value = getattr(workload, keyword)
        technique = find(keyword, value)
        if technique is None and keyword not in bench.request.asked:
            continue
        made.append(
            Reason(
                setting=f"{keyword} {SETTINGS[keyword].shown(value)}",
                kind=technique.kind if technique else "free",
                why=_why(bench, keyword, whys.get(keyword, technique.does if technique else "")),
                cost=_cost_in_bf16(chosen.recipe) if value == "bf16" else _cost(technique, value),
            )
        )
    return tuple(made)


def _why_packed(bench: Bench, chosen: Choice, lengths: Lengths | None) -> str:
    """What laying sequences end to end saves."""
    if lengths is None:
        return "sequences lie end to end, so that padding takes nothing"
    share = padding_share(bench, chosen.micro_batch, lengths)
    why = "sequences lie end to end"
    if share >= WORTH_PACKING:
        why += f"; {share:.0%} of padded passes would be padding"
    else:
        how = "as fused layers take them" if chosen.recipe.keywords()["fused"] else "and need no mask"
        why += f", {how}; of padded passes hardly anything would be padding"
    more = find_task(bench.base.task).why_packed
    return f"{why}; {more}" if more else why


def why_not_packed(bench: Bench, recipe: Recipe, lengths: Lengths | None) -> str | None:
    """What keeps a plan that is padded from being packed; None where nothing does."""
    is_16_bits = recipe.precision not in ("fp32", "tf32")
    why_not = {
        "that is not for several GPUs": bench.base.num_gpus > 1,
        "this model has no such attention": not bench.can_pack,
        "its kernel needs a GPU of sm_80 or newer": bench.target.profile.compute_capability < BF16_CAPABILITY,
        f"its kernel computes in 16 bits, not in {recipe.precision}": not is_16_bits,
        "that is not planned beside what waits in host memory": recipe.offload is not None,
        "that is planned where lengths are known (--lengths, --data) or where it is asked for (--attention packed)": (
            lengths is None
        ),
    }
    return next((why for why, is_so in why_not.items() if is_so), None)


def _cost_in_bf16(recipe: Recipe) -> str:
    """What weights in bfloat16 cost goes by how they are stepped."""
    if recipe.offload is not None:
        return MASTERS
    return BY_CHANCE if recipe.optimizer == "adamw-8bit" else _cost(find("precision", "bf16"), "bf16")


def _why(bench: Bench, keyword: str, why: str) -> str:
    """What was asked for needs no reason; what it costs to wait in host memory is said all the same."""
    if keyword not in bench.request.asked:
        return why
    return f"{ASKED}; {why.partition('; ')[2]}" if keyword == "offload" else ASKED


def _why_offload(bench: Bench, chosen: Choice, estimate: Estimate) -> str:
    """Why something waits in host memory, and what that costs."""
    on_device = bench.floor_bytes(replace(chosen.recipe, offload=None))
    times = estimate.time_breakdown  # of a GPU that is named
    spent = (
        f", and of the {chosen.step_time_s:.2g} s of a step copies of layers and gradients take "
        f"{times.get(COPIES, 0.0):.2g} s and the optimizer {times.get(HOST_STEP, 0.0):.2g} s"
    )
    return (
        f"nothing fits that stays on the GPU, where weights, gradients and {chosen.recipe.optimizer}'s state alone "
        f"would take {format_bytes(on_device)}; {format_bytes(estimate.host_bytes)} wait in host memory"
        f"{spent if times else ''}"
    )


def _cost(technique: Technique | None, value: Any) -> str:
    """What a setting costs in quality; nothing for same maths."""
    if technique is None or technique.kind == "free":
        return ""
    return COSTS.get(str(value), technique.costs)


def _whys(bench: Bench, search: Search, chosen: Choice, training: Training) -> Iterator[tuple[str, str]]:
    recipe = chosen.recipe
    other = _other_precision(search, recipe)
    if other is not None:
        yield "precision", _compare(bench, chosen, other)
    if recipe.offload == "weights":
        yield "checkpointing", "layers that wait in host memory come again for backward, and are computed again then"
    elif recipe.checkpointing is not None:
        yield "checkpointing", _why_checkpointing(search, chosen)
    if recipe.optimizer == "adamw-8bit":
        fused = replace(recipe, optimizer="adamw-fused")
        saved = _state_saved(search, recipe)
        before = next((c for c in search.tried if c.recipe == fused and c.micro_batch == chosen.micro_batch), None)
        much = f"its state takes {format_bytes(saved)} less" if saved else "its state takes less"
        yield "optimizer", f"{much} than AdamW's" + (", which does not fit" if before is None else "")
    elif recipe.offload is not None:
        yield "optimizer", "what waits comes to the GPU in pieces, where one kernel steps them"
    elif recipe.optimizer == "adamw-fused":
        yield "optimizer", "the same AdamW in one kernel: its step makes no copy of the weights' size"
    if recipe.compile:
        yield "compile", _why_compiled(bench, chosen)
    yield "attention", "scores are computed in tiles and never written out"
    yield "allocator", "batches of varied lengths leave holes in fixed segments: segments that grow lose about 3 %"
    if recipe.offload is not None and recipe.precision == "bf16":
        yield "precision", "weights in fp32 do not fit; their masters wait in host memory"
    for keyword in training.settings:
        yield keyword, "allowed, and nothing milder fits"


def _other_precision(search: Search, recipe: Recipe) -> Recipe | None:
    families = [family for one in search.and_before() for family in one.families]
    others = [f.recipe for f in families if f.recipe.precision != recipe.precision]
    alike = replace(recipe, checkpointing=None)
    return next((o for o in others if replace(o, precision=recipe.precision, compile=recipe.compile) == alike), None)


def _compare(bench: Bench, chosen: Choice, other: Recipe) -> str:
    """Time and memory beside the other precision, all else alike."""
    alike = replace(chosen.recipe, checkpointing=other.checkpointing, compile=other.compile)
    this = bench.peek(alike, chosen.micro_batch)
    that = bench.peek(other, chosen.micro_batch)
    pace = that.step_time_s / this.step_time_s
    less = that.requested_bytes - this.requested_bytes
    size = f"{format_bytes(abs(less))} {'less' if less > 0 else 'more'}"
    faster = f"{pace:.1f} times as fast as {other.precision}" if pace >= 1 else f"slower than {other.precision}"
    return f"{faster} and {size} for the same samples"


def _why_compiled(bench: Bench, chosen: Choice) -> str:
    """Time and memory beside the same layers as they are."""
    this, that = (bench.peek(replace(chosen.recipe, compile=c), chosen.micro_batch) for c in (True, False))
    less, faster = that.requested_bytes - this.requested_bytes, that.step_time_s / this.step_time_s - 1
    return f"fused kernels keep {format_bytes(max(less, 0))} less, and steps are {faster:.0%} faster by what they read"


def _state_saved(search: Search, recipe: Recipe) -> int | None:
    family = next((f for f in search.families if f.recipe == replace(recipe, checkpointing=None)), None)
    if family is None or family.sibling is None:
        return None
    size = search.sizes[-1]
    return family.sibling.plain[size].requested_bytes - family.plain[size].requested_bytes


def _why_checkpointing(search: Search, chosen: Choice) -> str:
    plain = without_checkpointing(search, chosen)
    if plain is None:
        return "without it not even the smallest passes fit"
    gained = plain.step_time_s / chosen.step_time_s
    faster = f"{gained:.1f} times as fast" if gained >= 1.5 else f"{gained - 1:.0%} faster"
    return (
        f"passes of {chosen.micro_batch} fit in place of {plain.micro_batch}, and a step is {faster} although these "
        "layers are computed twice"
    )


def _why_rows(bench: Bench, chosen: Choice, lengths: Lengths) -> str:
    """How the tokens of a batch go into packed rows."""
    room, mean = chosen.micro_batch * bench.base.seq, bench.batch * sum(lengths.values) / len(lengths.values)
    passes = -(-bench.timed_batch(chosen.recipe) // chosen.micro_batch)
    several = "one pass" if passes == 1 else f"{passes} passes"
    return (
        f"a pass holds {room:,} tokens, and {bench.batch} samples have {mean:,.0f} on average: {several} for most "
        "batches, with gradients summed where there are several"
    )


def _split_reason(bench: Bench, search: Search, chosen: Choice, lengths: Lengths | None) -> Reason:
    if chosen.recipe.attention == "packed" and lengths is not None:
        asked = {"micro_batch", "accumulate"} & bench.request.asked
        why = ASKED if asked else _why_rows(bench, chosen, lengths)
        return Reason(setting=f"micro_batch {chosen.micro_batch}", kind="free", why=why)
    workload: Workload = bench.workload(chosen.recipe, chosen.micro_batch)
    passes = workload.accumulate or 1
    setting = f"micro_batch {chosen.micro_batch} × {passes}" if passes > 1 else f"micro_batch {chosen.micro_batch}"
    if {"micro_batch", "accumulate"} & bench.request.asked:
        return Reason(setting=setting, kind="free", why=ASKED)
    if passes == 1:
        return Reason(setting=setting, kind="free", why="the whole batch fits at once")
    return Reason(setting=setting, kind="free", why=_why_not_larger(bench, search, chosen))


def _why_not_larger(bench: Bench, search: Search, chosen: Choice) -> str:
    larger = max(m for m in search.sizes if m > chosen.micro_batch) if chosen.micro_batch < bench.share else None
    larger = min((m for m in search.sizes if m > chosen.micro_batch), default=larger)
    same = f"gradients of {bench.batch} samples are summed, so that nothing changes"
    if larger is None:
        return same
    needs = bench.peek(chosen.recipe, larger).requested_bytes
    if bench.passes(larger) == 1:
        needs -= bench.weight_bytes(chosen.recipe)
    if needs <= search.limit_bytes:  # by its tensors; segments may take more
        needs = bench.safe_bytes(chosen.recipe, larger)
    if needs <= search.limit_bytes:
        return f"{same}; passes of {larger} fit too, and are no faster"
    return f"{same}; passes of {larger} would need {format_bytes(needs)}"
