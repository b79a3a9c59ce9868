"""`plan`: the fastest settings that fit a job into a GPU, certified by prediction."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from vramfit.errors import MissingExtra, TraceError, WorkloadError
from vramfit.estimator.traced import collection_paused
from vramfit.planner.alternatives import alternatives_of
from vramfit.planner.bench import Bench
from vramfit.planner.evaluation import choose_evaluation
from vramfit.planner.lengths import Lengths, lengths_of
from vramfit.planner.margin import Margin, margin_of, tight_margin_of
from vramfit.planner.reasons import reasons_of, why_not_packed
from vramfit.planner.request import REHEARSAL, Request
from vramfit.planner.search import Choice, Search
from vramfit.planner.shortfall import no_plan_fits
from vramfit.planner.space import NOTHING, Recipe, Training, Waiting, recipes, trainings, waitings
from vramfit.planner.varied import WORTH_PACKING, full_samples, padding_share, quicker, time_on_lengths
from vramfit.records.estimate import HOST, Estimate
from vramfit.records.plan import Plan
from vramfit.settings import TRITON_CAPABILITY
from vramfit.stages import within
from vramfit.units import counted, plain

COMPILE_S = 30.0
"""What compiling is taken to take before the first step, training and evaluation together: for training, BERT-base took
11 s and BERT-large 14 s on the machine of an H200."""
LEAST_COMPILED_S = 10 * COMPILE_S
"""Shorter runs are not worth it: compiled steps are a sixth faster at best."""
LEAST_RECORDED_S = 10.0
"""Shorter runs are not worth it: recording took one or two seconds, spread over the first steps."""
NEAR_HOST = 0.8
"""The host's share of the device's time from which passes are recorded: what the host takes differs from machine to
machine, by a third between two that an H200 stood in."""
SLOWER = 1.05
"""What recorded passes may be predicted to take more: rows that are filled up to a few sizes, for a host that is not
waited for."""
TIGHT_PRICE = 3.0
"""How many times as fast a plan has to be that leaves nothing for batches of other lengths: on a GPU, such runs took up
to 2.1 times as long as predicted; recorded ones took 12 times as long, and are left out."""
NOT_RECORDED = (
    "passes are not recorded: that is for packed ones in bfloat16 without checkpointing, and where gradients that stay "
    "in memory fit"
)
NOT_FUSED = (
    "layers are not fused: that is for packed rows of BERT and its kin in amp-bf16 or amp-fp16, on one GPU of sm_80 or "
    "newer, with lengths given, and without compile, lora, quantize and offload"
)
MAY_WAIT = "the GPU may wait for the host: told how long the run is (--steps), a plan records passes where that pays"
SAVING = "saving a checkpoint takes no GPU memory: tensors are copied to the host one by one"
SAVING_SHARDS = "saving a checkpoint gathers one parameter after another on the GPU, and copies it to the host"


@dataclass(frozen=True, slots=True)
class Found:
    """Settings that fit, and the way there."""

    choice: Choice
    training: Training
    search: Search
    margin: Margin
    estimate: Estimate


def plan(model: Any, *, lengths: Any = None, **keywords: Any) -> Plan:
    """The fastest settings that fit, why, and what else was possible.

    The effective batch is kept exactly. Techniques that change no result are used at will; lower precision and 8-bit
    optimizer state by default, and said so; what changes what is learned only where it is allowed, the mildest first,
    and only where nothing else fits. Host memory is used where nothing fits that stays on the GPU.

    Args:
        model: as for `estimate`.
        lengths: real lengths of the samples in tokens, a list or a file with one a line: the plan is certified for the
            longest and timed on all of them. Where they vary, sequences are laid end to end (attention `packed`) if
            model, precision and GPU can.
        **keywords: fields of `Workload`; what is given is kept, the rest is chosen. `gpu` or `memory` is needed.
            allow: of "freeze", "lora", "int8", "bf16" (weights in bfloat16), "adafactor", "sgd".
            exact: True for the same maths only: fp32, no 8-bit optimizer.
            margin: what stays free of the budget, a share (0.05) or a size ("500MiB").
            compile: True or False; else layers are compiled only where `steps`, the optimizer steps of the whole run,
                are given and so many that it pays.
            fused: False to leave layers as they are; else they are fused in packed passes, where that can be.
            graphs: True to record packed passes as CUDA graphs, where that can be; False not to. Else they are recorded
                where `steps` are given, the run is not short, and the host takes about as long as the device.
            pads_evaluation: True where evaluations are padded though steps are packed, as those of a Trainer are.
            group_by_length: True where samples of like length meet in padded batches, as in `vramfit train`: step times
                are of such batches.
            rehearses: True for a run on an emulated GPU: of what fits, what is quick on a CPU is taken.
            num_gpus, num_nodes: GPUs that share each step, in so many machines; `parallel` says how, or it is chosen.
            offload: `optimizer` or `weights` to have it so, False for neither; `host_memory` is what may wait there.

    Raises:
        NoPlanFits: nothing that is allowed fits; has the best that was found, what it lacks, and what would help.
        WorkloadError: the keywords contradict each other, the model or the GPU.

    >>> plan("bert-tiny", batch=32, seq=128, gpu="t4").accumulate
    1
    """
    num_gpus = plain(keywords.get("num_gpus", 1))
    if isinstance(num_gpus, int) and num_gpus != 1:
        from vramfit.planner.ranks import plan_for_ranks

        return plan_for_ranks(model, lengths, keywords)
    return plan_for_one(model, lengths, keywords)


def plan_for_one(model: Any, lengths: Any, keywords: Mapping[str, Any]) -> Plan:
    """The plan of a job whose GPUs share the model in a given way."""
    request = Request.of(keywords)
    with collection_paused():
        sampled = None if lengths is None else lengths_of(lengths)
        if sampled is not None:
            request, sampled = _at_longest(model, request, sampled)
        bench = Bench(model, request)
        if sampled is not None:
            bench.full_samples = full_samples(bench, sampled)
        with within(lambda: f"{counted(bench.num_predicted, 'setting')} tried"):
            return _plan(bench, sampled)


def _plan(bench: Bench, sampled: Lengths | None) -> Plan:
    found = find(bench, sampled)
    if found is None:
        raise no_plan_fits(bench, _margins(bench, sampled)[-1].num_bytes)
    recorded = _recorded(bench, found, sampled)
    if recorded is None or not recorded.estimate.workload.fused:  # which is as fast as compiled, and at once
        found = _compiled(bench, found, sampled) or found
        recorded = _recorded(bench, found, sampled) if found.choice.recipe.compile else recorded
    return _make(bench, recorded or found, sampled)


def _at_longest(model: Any, request: Request, sampled: Lengths) -> tuple[Request, Lengths]:
    """The request at the longest sample that is not cut."""
    from vramfit.models.anatomy import max_positions
    from vramfit.models.resolve import resolve

    fixed = request.fixed
    task = {"task": fixed["task"]} if "task" in fixed else {}
    config = resolve(model, **task, trust_remote_code=request.trust_remote_code).config
    most = max_positions(config) if config is not None else None
    limits = [n for n in (most, fixed.get("seq")) if n is not None]
    cut = sampled.cut(min(limits)) if limits else sampled
    return replace(request, fixed={**fixed, "seq": cut.longest}), cut


def _margins(
    bench: Bench, sampled: Lengths | None, *, packs: bool = False, compiles: bool = False, graphs: bool = False
) -> list[Margin]:
    """The usual margin, and a tight one where the usual one is the planner's own.

    Where memory is tight, passes are recorded only if that was asked for: every size of a row is a graph more.
    """
    allocator = bench.request.fixed.get("allocator", "expandable")
    varied = bench.base.mask == "padded" and (sampled is None or sampled.varies)
    basis = bench.basis(packs=packs, compiles=compiles)
    attention = "packed" if packs else bench.base.attention
    workload = replace(bench.base, allocator=allocator, attention=attention, compile=compiles)
    usual = margin_of(bench.budget_bytes, basis, workload, bench.request.margin, varied=varied, whole=graphs)
    tight = tight_margin_of(bench.budget_bytes, basis, workload)
    has_one = bench.request.margin is not None or tight.num_bytes >= usual.num_bytes
    return [usual] if has_one or (graphs and bench.request.graphs is None) else [usual, tight]


def find(bench: Bench, sampled: Lengths | None) -> Found | None:
    """The fastest choice of the mildest training that fits, predicted in full.

    Something waits in host memory only where nothing fits without that, and weights are rounded only where it must be.
    A plan with a thin margin that has no way back once its cache is gone is taken only where there is no other.
    """
    found = _find(bench, sampled)
    if found is None and bench.has_refused:
        bench.starts_over = False
        found = _find(bench, sampled)
    return found


def _find(bench: Bench, sampled: Lengths | None) -> Found | None:
    for training in trainings(bench.request, bench.num_layers):
        levels = waitings(bench.request, training, able=bench.can_checkpoint)
        for _, group in groupby(levels, key=lambda w: (w.offload is not None, w.in_16_bits)):
            found = [f for waiting in group if (f := _find_waiting(bench, training, waiting, sampled)) is not None]
            if found:
                return min(found, key=lambda f: _cost(bench, f, sampled))
    return None


def _find_waiting(bench: Bench, training: Training, waiting: Waiting, sampled: Lengths | None) -> Found | None:
    """The fastest choice where this waits in host memory, without padding or with it."""
    packed = _find_packed(bench, training, waiting, sampled)
    if packed is not None and not _waits_for_host(packed.estimate) and _has_padding(bench, packed, sampled):
        return packed
    padded = _find_with(bench, training, waiting, sampled, packs=False)
    has_large_mask = packed is None and padded is not None and padded.estimate.has_large_mask
    if padded is not None and has_large_mask and why_not_packed(bench, padded.choice.recipe, sampled) is None:
        packed = _find_with(bench, training, waiting, sampled, packs=True)  # which has no mask
    return _quicker_of(bench, packed, padded, sampled)


def _find_packed(bench: Bench, training: Training, waiting: Waiting, sampled: Lengths | None) -> Found | None:
    """The fastest choice without padding, where lengths are known and there would be enough of it, or where layers can
    be fused, which is for packed rows."""
    if sampled is None or "attention" in bench.request.fixed or bench.request.rehearses:
        return None
    if waiting.offload is not None or not bench.can_pack or bench.base.num_gpus > 1:
        return None
    fuses = bench.can_fuse and not bench.base.compile and _may_fuse({**bench.request.fixed, **training.settings})
    if not fuses and padding_share(bench, bench.batch, sampled) < WORTH_PACKING:
        return None
    found = _find_with(bench, training, waiting, sampled, packs=True)
    if found is None or not (found.estimate.workload.fused or _has_padding(bench, found, sampled)):
        return None
    return found


def _may_fuse(given: Mapping[str, Any]) -> bool:
    """Whether nothing that was given speaks against fused layers."""
    return not {"lora", "quantize"} & set(given) and str(given.get("precision", "amp")).startswith("amp")


def _has_padding(bench: Bench, found: Found, sampled: Lengths | None) -> bool:
    """Whether there would be enough of it in padded passes."""
    return sampled is not None and padding_share(bench, found.choice.micro_batch, sampled) >= WORTH_PACKING


def _waits_for_host(estimate: Estimate) -> bool:
    """Whether the device is done before the host: then fewer tokens save no time."""
    times = estimate.time_breakdown
    return sum(times.values()) - times.get(HOST, 0.0) < times.get(HOST, 0.0)


def _quicker_of(bench: Bench, packed: Found | None, padded: Found | None, sampled: Lengths | None) -> Found | None:
    if packed is None or padded is None or sampled is None:
        return packed or padded
    return min((packed, padded), key=lambda f: _cost(bench, f, sampled))


def _compiled(bench: Bench, plain: Found, sampled: Lengths | None) -> Found | None:
    """The same with compiled layers, where a run is long enough for that; None where it is not."""
    request, recipe = bench.request, plain.choice.recipe
    capability = bench.target.profile.compute_capability
    before_s = (request.steps or 0) * _seconds(bench, plain, sampled)
    if "compile" in request.fixed or request.exact or request.rehearses or before_s < LEAST_COMPILED_S:
        return None
    if plain.estimate.workload.fused:  # as fast, and at once
        return None
    if capability < TRITON_CAPABILITY or recipe.offload is not None or recipe.quantize is not None:
        return None
    if bench.base.num_gpus > 1:
        return None
    packs = recipe.attention == "packed"
    try:
        found = _find_with(bench, plain.training, NOTHING, sampled, packs=packs, compiled_like=recipe)
    except (MissingExtra, WorkloadError, TraceError):  # then not compiled
        return None
    if found is None:
        return None
    found.search.before = plain.search
    before, after = ((request.steps or 0) * _cost(bench, f, sampled) for f in (plain, found))
    return found if after + COMPILE_S < before else None


def _recorded(bench: Bench, plain: Found, sampled: Lengths | None) -> Found | None:
    """Packed passes that are recorded, where that is asked for or pays, and can be; None elsewhere."""
    request, recipe = bench.request, plain.choice.recipe
    if request.graphs is False or (request.graphs is None and not _may_wait(bench, plain, sampled)):
        return None
    is_packed = recipe.attention == "packed"
    may_pack = sampled is not None and "attention" not in bench.request.fixed and bench.can_pack
    if recipe.offload is not None or bench.base.num_gpus > 1 or not (is_packed or may_pack):
        return None
    compiled_like = recipe if recipe.compile else None
    found = _find_with(bench, plain.training, NOTHING, sampled, packs=True, compiled_like=compiled_like, graphs=True)
    if found is None:
        return None
    found.search.before = plain.search
    made = found.choice.recipe
    priced = [_seconds(bench, f, sampled) * bench.price(f.choice.recipe) for f in (found, plain)]
    is_worse = made.optimizer != recipe.optimizer or priced[0] > SLOWER * priced[1]
    return None if request.graphs is None and is_worse else found


def _may_wait(bench: Bench, plain: Found, sampled: Lengths | None) -> bool:
    """Whether the device of a run that is not short may wait for the host."""
    if bench.request.exact or bench.request.rehearses:
        return False
    if (bench.request.steps or 0) * _seconds(bench, plain, sampled) < LEAST_RECORDED_S:
        return False
    return bench.host_share(plain.choice.recipe, plain.choice.micro_batch) >= NEAR_HOST


def _cost(bench: Bench, found: Found, sampled: Lengths | None) -> float:
    """Seconds of a step, what changes the results times its price, and so what leaves no room for other lengths."""
    price = bench.price(found.choice.recipe) * (TIGHT_PRICE if found.margin.is_tight else 1.0)
    return _seconds(bench, found, sampled) * price


def _seconds(bench: Bench, found: Found, sampled: Lengths | None) -> float:
    return found.choice.step_time_s if sampled is None else time_on_lengths(bench, found.choice, sampled)


def _find_with(
    bench: Bench,
    training: Training,
    waiting: Waiting,
    sampled: Lengths | None,
    *,
    packs: bool,
    compiled_like: Recipe | None = None,
    graphs: bool = False,
    fused: bool = True,
) -> Found | None:
    compiles = bench.base.compile or compiled_like is not None
    capability = bench.target.profile.compute_capability
    made = recipes(
        bench.request,
        training,
        bench.base,
        capability,
        waiting,
        packs=packs,
        compiles=compiles,
        graphs=graphs,
        casts=bench.casts,
        fused=fused and bench.can_fuse,
    )
    if compiled_like is not None and compiled_like.checkpointing is None and compiled_like.optimizer != "adamw-8bit":
        compiled = compiled_like.compile
        alike = [r for r in made if replace(r, compile=compiled, graphs=False) == compiled_like]
        made = alike or made  # memory is not short: as it was
    found: list[Found] = []
    for margin in _margins(bench, sampled, packs=packs, compiles=compiles, graphs=graphs) if made else ():
        if not found or found[0].margin.is_thin:
            fastest = _find_within(bench, made, training, margin, sampled)
            found += [fastest] if fastest is not None else []
    if found:
        return min(found, key=lambda f: _cost(bench, f, sampled))
    if any(recipe.keywords()["fused"] for recipe in made):  # whose sums of gradients over rows take some MiB
        split: dict[str, Any] = {"packs": packs, "compiled_like": compiled_like, "graphs": graphs}
        return _find_with(bench, training, waiting, sampled, **split, fused=False)
    return None


def _find_within(
    bench: Bench, made: list[Recipe], training: Training, margin: Margin, sampled: Lengths | None
) -> Found | None:
    """The fastest choice of one training that leaves a margin."""
    limit_bytes = bench.budget_bytes - margin.num_bytes
    while True:
        search = Search(bench, made, limit_bytes)
        choice = search.run()
        if choice is None:
            return None
        if sampled is not None:
            choice = quicker(bench, search, choice, sampled)
        estimate = bench.estimate(choice.recipe, choice.micro_batch)
        if estimate.safe_reserved_bytes > limit_bytes or estimate.num_retries or not estimate.fits:
            bench.correct(choice.recipe, choice.micro_batch, max(estimate.safe_reserved_bytes, limit_bytes + 1))
        elif margin.is_thin and bench.starts_over and not bench.can_start_over(choice.recipe, choice.micro_batch):
            bench.has_refused = True
            return None  # what stays and the largest gradient are the same in smaller passes
        else:
            return Found(choice, training, search, margin, estimate)


def _make(bench: Bench, found: Found, sampled: Lengths | None) -> Plan:
    choice, search, estimate = found.choice, found.search, found.estimate
    limit_bytes = bench.budget_bytes - found.margin.num_bytes
    evaluation = choose_evaluation(bench, choice, limit_bytes)
    others = alternatives_of(bench, search, choice, sampled)
    seconds, notes = choice.step_time_s, [*estimate.notes, *search.not_available]
    notes.append(SAVING_SHARDS if bench.base.shards else SAVING)
    if bench.target.gpu is None or estimate.step_time_s is None:
        notes.append(f"times are those of {bench.timed_gpu.title}: name the GPU (gpu=) for its own")
    if sampled is not None:
        seconds = time_on_lengths(bench, choice, sampled)
    if bench.request.fused and not estimate.workload.fused:
        notes.append(NOT_FUSED)
    if bench.request.graphs and not choice.recipe.graphs:
        notes.append(NOT_RECORDED)
    elif bench.request.steps is None and choice.recipe.attention == "packed" and not choice.recipe.graphs:
        notes += [MAY_WAIT] * (bench.host_share(choice.recipe, choice.micro_batch) >= NEAR_HOST)
    if bench.request.rehearses:
        notes.append(REHEARSAL)
    if choice.recipe.compile:
        notes.append(f"compiling takes about {COMPILE_S:.0f} s before the first step, which step times leave out")
    return Plan(
        workload=estimate.workload,
        estimate=estimate,
        evaluation=evaluation,
        step_time_s=seconds,
        budget_bytes=bench.budget_bytes,
        margin_bytes=found.margin.num_bytes,
        margin_reason=found.margin.reason,
        reasons=reasons_of(bench, search, choice, found.training, estimate, sampled),
        alternatives=others,
        num_predicted=bench.num_predicted,
        lengths=None if sampled is None else sampled.summary(),
        notes=tuple(notes),
    )
