"""`fit_trainer`: one line that makes a Trainer right under accumulation, and fitting."""

from contextlib import nullcontext, suppress
from typing import Any, Unpack

import torch

from vramfit.devices.catalogue import match_gpu
from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.integrations.trainer.fitted import Fit, FittedTrainer
from vramfit.integrations.trainer.job import ALLOWED, Job, Wishes, job_of
from vramfit.integrations.trainer.models import (
    MAX_DIFFERENCE,
    bare_model,
    drawn_again,
    loss_pair,
    own_loss,
    summed_loss,
)
from vramfit.integrations.trainer.monitoring import MonitorCallback
from vramfit.integrations.trainer.rows import keeps_moves, samples_of
from vramfit.integrations.trainer.settings import put_plan
from vramfit.integrations.trainer.texts import TextSteps, comparing, make_head
from vramfit.loader.budget import free_bytes
from vramfit.planner.plan import plan as make_plan
from vramfit.records.plan import Fitting, Plan
from vramfit.report.run import render_fitting
from vramfit.runtime.device import enforce
from vramfit.settings import SETTINGS, having
from vramfit.step.plain import each_tensor
from vramfit.tasks.embedding import LOSSES
from vramfit.workload import CHOICES


def fit_trainer(
    trainer: Any,
    *,
    plan: Plan | None = None,
    loss_fn: Any = None,
    count_fn: Any = None,
    show: bool = True,
    **wishes: Unpack[Wishes],
) -> Fitting:
    """Fit a Hugging Face Trainer into a budget, in place, before its `train`.

    The effective batch, the order of samples and the schedule stay. A batch becomes a whole step, split inside into
    passes that fit; its gradient is that of the whole batch for every head. Memory that runs out costs nothing: the
    step is done again, in smaller passes. Evaluation gets a batch that fits, and its logits do not pile up on the GPU.
    Where samples differ in length and the GPU has the kernel, the sequences of a pass lie end to end, without padding;
    batches whose gradient that would change are padded.

    Args:
        trainer: a `Trainer` or a subclass, with whatever collator, metrics and callbacks.
        plan: one that was made before; then nothing is chosen, and what chooses (all of `wishes`) is left out.
        loss_fn, count_fn: for a loss of your own, as for `Stepper`: a sum over samples, and what to divide it by.
            Without them a Trainer with its own `compute_loss` gets whole batches, never split.
        show: print what was changed, and after training what the watch found, to stderr.
        memory, gpu: the budget, as for `plan`; without both, what is free on the GPU that the Trainer uses.
        allow: of "freeze" and "bf16" (weights in bfloat16).
        exact: same maths only: no lower precision, no 8-bit optimizer.
        margin: as for `plan`.
        seq: tokens of the longest sample, where the datasets do not say; longer ones must not come.
        micro_batch: samples of a pass, where they are not to be chosen.
        attention: sdpa, eager or packed (no padding), where it is not to be chosen.

    Raises:
        WorkloadError: what cannot be kept right, everything by name; nothing was changed.
        NoPlanFits: nothing that is allowed fits; nothing was changed.
        BudgetExceeded: the process holds more than the budget already.
    """
    unknown = [name for name in wishes if name not in Wishes.__annotations__]
    if unknown:
        raise TypeError(f"fit_trainer() got an unexpected keyword argument {unknown[0]!r}")
    _check(trainer, plan, wishes, loss_fn, count_fn)
    has_loss = loss_fn is not None
    with drawn_again():
        job = job_of(trainer, wishes, has_loss=has_loss)
        if plan is None:
            budget = budget_of(trainer, wishes.get("memory"), wishes.get("gpu"))
            chosen = {"allow": (), "exact": False, "margin": None}
            chosen |= {name: value for name, value in wishes.items() if name in chosen}
            with nullcontext() if job.texts is None else comparing(trainer, make_head(trainer, job.texts)):
                plan = _plan(trainer, job, budget | chosen)
        _check_plan(plan, job, wishes)
        _compare_losses(trainer, job)
    enforce(plan.budget_bytes, trainer.args.device)
    names = type(trainer).__name__, type(bare_model(trainer)).__name__
    changes = put_plan(trainer, job, plan)
    loss = (loss_fn, count_fn) if has_loss else loss_pair(trainer)
    waits = (plan.workload.is_packed or job.texts is not None) and not keeps_moves(trainer)
    trainer.vramfit = Fit(
        plan=plan,
        origin=job.origin,
        loss=loss,
        waits=waits,
        attn_implementation=job.attn_implementation,
        texts=job.texts,
        monitor=_monitor(trainer, show),
    )
    trainer.__class__ = type(f"Fitted{names[0]}", (FittedTrainer, type(trainer)), {})
    fitting = Fitting(trainer=names[0], model=names[1], plan=plan, changes=changes, notes=_notes(trainer, job, plan))
    if show:
        _show(fitting)
    return fitting


def _check(trainer: Any, plan: Any, wishes: Wishes, loss_fn: Any, count_fn: Any) -> None:
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise WorkloadError([f"fit_trainer takes a transformers.Trainer, not {type(trainer).__name__}"])
    problems = []
    if isinstance(trainer, FittedTrainer):
        problems.append("this Trainer was fitted already: make a new one to fit it otherwise")
    if (loss_fn is None) != (count_fn is None):
        problems.append("loss_fn and count_fn go together: a sum, and what to divide it by")
    if plan is not None and not isinstance(plan, Plan):
        problems.append(f"plan is a {type(plan).__name__}, not a Plan: Plan.load reads one from a file")
    for name, value in wishes.items():
        problems += SETTINGS[name].value.problems(name, value) if name in SETTINGS and value is not None else []
    allow = wishes.get("allow", ())
    asked = [a.strip() for a in (allow.split(",") if isinstance(allow, str) else allow) if a.strip()]
    for name in asked:
        if name == "lora":
            problems.append("allow lora: give the Trainer a peft model; it saves adapters then")
        elif name not in ALLOWED:
            problems.append(f"allow {name!r}: a Trainer can be allowed {' and '.join(ALLOWED)}")
    if trainer.optimizer is not None and asked:
        problems.append(f"allow {', '.join(asked)}: the optimizer was made already, over the parameters as they are")
    if problems:
        raise WorkloadError(problems)


def budget_of(trainer: Any, memory: str | int | None, gpu: str | None) -> dict[str, Any]:
    """What there is to fit into, as keywords of `plan`.

    Raises:
        WorkloadError: nothing says.
    """
    device = trainer.args.device
    if memory is None and gpu is None and device.type != "cuda":
        raise WorkloadError(["no budget: the Trainer runs on no GPU, so give memory= or gpu="])
    if device.type != "cuda":
        return {"memory": memory, "gpu": gpu}
    properties = torch.cuda.get_device_properties(device)
    here = match_gpu(properties.name, properties.total_memory)
    if memory is None and gpu is None:
        memory = (free_bytes(device) or 0) + torch.cuda.memory_allocated(device)
    return {"memory": memory, "gpu": gpu or (here.name if here is not None else None)}


def _plan(trainer: Any, job: Job, keywords: dict[str, Any]) -> Plan:
    """With AdamW as it is where that fits; only else with 8-bit moments, which cannot go on from a plain checkpoint.

    Nothing waits in host memory: a Trainer's optimizer steps what is on the device.
    """
    asked = {"offload": False, **job.keywords, **keywords, "pads_evaluation": True, "graphs": False}
    try:
        if "optimizer" not in asked and not asked["exact"]:
            with suppress(NoPlanFits):
                return make_plan(job.model, lengths=job.lengths, optimizer="adamw-fused", **asked)
        return make_plan(job.model, lengths=job.lengths, **asked)
    except NoPlanFits as error:
        if job.origin == "own":
            error.hint = (
                f"{type(trainer).__name__} computes a loss of its own, so a step of {job.batch} samples cannot be "
                "split: give loss_fn (a sum over samples) and count_fn (how many they are)"
            )
        raise


def _check_plan(plan: Plan, job: Job, wishes: Wishes) -> None:
    """Refuse a plan for another job.

    Raises:
        WorkloadError: everything in which they differ.
    """
    w = plan.workload
    found = {name: getattr(w, name) for name in having(is_trainers_own=True)}
    found |= {"texts": w.texts_per_sample, "loss": w.loss or LOSSES[0]}
    problems = [
        f"the plan is for {name} {value}, the Trainer has {job.keywords[name]}"
        for name, value in found.items()
        if name in job.keywords and value != job.keywords[name]
    ]
    asked = {name: value for name, value in wishes.items() if name in CHOICES and value is not None}
    others = [name for name, value in asked.items() if getattr(w, name) != value]
    problems += [f"the plan is for {name} {getattr(w, name)}, and {asked[name]} was asked for" for name in others]
    if not others and w.is_packed and job.why_padded is not None:
        problems.append(f"the plan is for attention packed, and {job.why_padded}")
    if w.seq < job.keywords["seq"]:
        problems.append(f"the plan is for {w.seq} tokens, the longest sample of the Trainer has {job.keywords['seq']}")
    refused = [s for s in SETTINGS.values() if s.not_fitted and getattr(w, s.keyword) not in (None, s.default)]
    problems += [f"the plan has {s.words(w)}, {s.not_fitted}" for s in refused]
    if job.origin == "own" and plan.workload.num_passes > 1:
        problems.append(
            f"the plan splits a step into {plan.workload.num_passes}, and the Trainer computes a loss of its own"
        )
    if problems:
        raise WorkloadError(problems, hint="leave plan out, and fit_trainer makes one")


def _compare_losses(trainer: Any, job: Job) -> None:
    """A head whose loss is not the one its labels call for is found before it is learned from.

    Raises:
        WorkloadError: names the head and both figures.
    """
    if job.origin != "head" or not job.rows.batch:
        return
    model = trainer.model
    batch = each_tensor(samples_of(job.rows.batch), lambda value: value[:4].to(trainer.args.device))
    own, summed = own_loss(model, batch), summed_loss(model, batch)
    if own == own and abs(own - summed) > MAX_DIFFERENCE * max(abs(own), 1e-6):
        raise WorkloadError(
            [
                f"{type(bare_model(trainer)).__name__} gives a loss of {own:.4g} where its labels call for "
                f"{summed:.4g}: it computes one of its own"
            ],
            hint="give fit_trainer that loss as loss_fn (a sum over samples) and count_fn (how many they are)",
        )


def _monitor(trainer: Any, show: bool) -> MonitorCallback:
    """The one that the Trainer has, or a silent one."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, MonitorCallback):
            return callback
    monitor = MonitorCallback(logs=False, show=show)
    trainer.add_callback(monitor)
    return monitor


def _notes(trainer: Any, job: Job, plan: Plan) -> tuple[str, ...]:
    notes = []
    if job.origin == "own":
        notes.append(
            f"{type(trainer).__mro__[2].__name__} computes a loss of its own: a step is never split, so only "
            "retried unchanged if memory runs out"
        )
    if job.lengths is None:
        notes.append(f"planned for sequences of {job.keywords['seq']} tokens throughout")
    elif not job.lengths.complete:
        notes.append("not every row was looked at: a sample as long as the model takes is expected")
    if plan.workload.is_packed:
        notes.append("a batch whose gradient packing would change is padded, and passes half as many tokens at once")
    elif job.why_padded is not None and job.lengths is not None and job.lengths.varies:
        notes.append(f"passes are padded: {job.why_padded}")
    if job.texts is not None:
        notes += _notes_on_texts(trainer, job.texts, plan)
    if trainer.args.dataloader_drop_last:
        notes.append("dataloader_drop_last leaves out the last incomplete step, not only its last incomplete pass")
    return tuple(notes)


def _notes_on_texts(trainer: Any, texts: TextSteps, plan: Plan) -> list[str]:
    name, compared, batch = texts.loss.name, texts.compared, plan.workload.batch
    notes = []
    if "Cached" in name:
        notes.append(f"{name} is the loss of the same name without Cached: its mini_batch_size is not used in steps")
    if compared < batch:
        notes.append(
            f"a step is the mean loss of {-(-batch // compared)} batches of {compared}, each compared within itself, "
            f"as with accumulation; per_device_train_batch_size={batch} compares all of them, in the same memory"
        )
    at_once = trainer.args.per_device_eval_batch_size * max(texts.loss.contrast.num_texts - 1, 1)
    if trainer.eval_dataset is not None and at_once > plan.evaluation_batch:
        notes.append(
            f"an evaluation passes {at_once} texts at once, and {plan.evaluation_batch} are predicted to fit next to "
            "the training state: set per_device_eval_batch_size lower"
        )
    return notes


def _show(fitting: Fitting) -> None:
    from rich.console import Console

    Console(stderr=True).print(render_fitting(fitting))
