"""`plan`: the fastest settings that fit a job into a GPU, certified by prediction.

Four stages over a `Job`: `recipes` proposes settings and filters out what contradicts itself, the model or the GPU;
`predictions` says what they cost in memory and time; `choose` takes the fastest that fits; `reasons` says why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vramfit.cache import remembered
from vramfit.errors import NoPlanFits
from vramfit.estimator.predict import estimate_at
from vramfit.estimator.traced import collection_paused
from vramfit.planner.choose import Found, find, for_long_run, margins, may_pay_to_record
from vramfit.planner.elsewhere import no_plan_fits
from vramfit.planner.heuristics import COMPILE_S, SHARDS_PRICE
from vramfit.planner.job import Job
from vramfit.planner.predictions import choose_evaluation, num_predicted
from vramfit.planner.reasons import alternatives_of, reasons_of
from vramfit.planner.recipes import Proposal
from vramfit.planner.request import REHEARSAL, Request, lengths_of
from vramfit.records.estimate import Estimate
from vramfit.records.plan import Plan, Reason
from vramfit.settings import SETTINGS
from vramfit.stages import within
from vramfit.units import counted, plain

MAY_WAIT = "the GPU may wait for the host: told how long the run is (--steps), a plan records passes where that pays"
SAVING = "saving a checkpoint takes no GPU memory: tensors are copied to the host one by one"
SAVING_SHARDS = "saving a checkpoint gathers one parameter after another on the GPU, and copies it to the host"
PARALLEL = {
    "ddp": "every GPU has the whole model, and they talk once a step",
    "fsdp": "each GPU has a part of weights, gradients and moments, and gathers a layer when its turn comes",
}
"""Ways to share a step, in words."""


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
            allow: of "freeze", "lora", "int8", "nf4", "bf16" (weights in bfloat16), "adafactor", "sgd".
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
        return _plan_for_ranks(model, lengths, keywords)
    return _plan_for_one(model, lengths, keywords)


def _plan_for_one(model: Any, lengths: Any, keywords: Mapping[str, Any]) -> Plan:
    """The plan of a job whose GPUs share the model in a given way."""
    request = Request.of(keywords)
    with collection_paused():
        job = Job.of(model, request, None if lengths is None else lengths_of(lengths))
        with within(lambda: f"{counted(num_predicted(job), 'setting')} tried"):
            if job.is_described:
                return _with_snapshot(remembered(Plan, job.question(), lambda: _search(job)), job)
            return _search(job)


def _with_snapshot(made: Plan, job: Job) -> Plan:
    """A plan that was read from disk, whose estimates can give their predicted streams again."""

    def training() -> Estimate:
        return estimate_at(replace(job.traced, workload=made.workload), job.target, made.micro_batch)

    def evaluation() -> Estimate:
        return _search(job).evaluation  # what it is estimated beside is not in the plan

    if made.estimate.snapshot is not None:
        return made
    return replace(
        made,
        estimate=replace(made.estimate, snapshot=lambda: _stream_of(training())),
        evaluation=replace(made.evaluation, snapshot=lambda: _stream_of(evaluation())),
    )


def _stream_of(estimate: Estimate) -> dict[str, Any]:
    assert estimate.snapshot is not None  # it was made here
    return estimate.snapshot()


def _search(job: Job) -> Plan:
    found = find(job)
    if found is None:
        raise no_plan_fits(job, margins(job, Proposal())[-1].num_bytes)
    return _plan_of(for_long_run(found))


def _plan_of(found: Found) -> Plan:
    job, estimate = found.job, found.estimate
    evaluation = choose_evaluation(job, found.choice, found.search.limit_bytes)
    alternatives = alternatives_of(found)
    reasons = reasons_of(found)
    return Plan(
        workload=estimate.workload,
        estimate=estimate,
        evaluation=evaluation,
        step_time_s=found.seconds,
        budget_bytes=job.budget_bytes,
        margin_bytes=found.margin.num_bytes,
        margin_reason=found.margin.reason,
        reasons=reasons,
        alternatives=alternatives,
        num_predicted=num_predicted(job),
        lengths=None if job.lengths is None else job.lengths.summary(),
        notes=(*estimate.notes, *found.search.not_available, *_notes(found)),
    )


def _notes(found: Found) -> Iterator[str]:
    job, request, workload = found.job, found.job.request, found.estimate.workload
    yield SAVING_SHARDS if job.base.shards else SAVING
    if job.target.gpu is None or found.estimate.step_time_s is None:
        yield f"times are those of {job.timed_gpu.title}: name the GPU (gpu=) for its own"
    yield from (SETTINGS[name].if_possible for name, on in request.wishes.items() if on and not getattr(workload, name))
    if may_pay_to_record(found):
        yield MAY_WAIT
    if request.rehearses:
        yield REHEARSAL
    if workload.is_compiled:
        yield f"compiling takes about {COMPILE_S:.0f} s before the first step, which step times leave out"


def _plan_for_ranks(model: Any, lengths: Any, keywords: Mapping[str, Any]) -> Plan:
    """The plan of a job on several GPUs: every GPU with the whole model, or each with a part, whichever is faster.

    Raises:
        NoPlanFits: neither fits; of the two, the one that lacks less.
        WorkloadError: offloading, which is for one GPU.
    """
    asked = keywords.get("parallel")
    found: dict[str, Plan] = {}
    failures: dict[str, NoPlanFits] = {}
    for parallel in PARALLEL if asked is None else (asked,):
        try:
            found[parallel] = _plan_for_one(model, lengths, {**keywords, "parallel": parallel})
        except NoPlanFits as failure:
            failures[parallel] = failure
    if not found:
        raise min(failures.values(), key=lambda failure: failure.shortfall_bytes)
    best = min(found, key=lambda name: found[name].step_time_s * (SHARDS_PRICE if name == "fsdp" else 1))
    why = PARALLEL[best] + ("" if asked is None else "; as asked for")
    for name in PARALLEL:
        if name in failures:
            why += f"; {name} does not fit"
        elif name in found and name != best:
            why += f"; {name} takes {found[name].step_time_s:.3g} s a step, this {found[best].step_time_s:.3g} s"
    reason = Reason(setting=f"parallel {best}", kind="free", why=why)
    return replace(found[best], reasons=(reason, *found[best].reasons))
