"""`check`: what is wrong with a Trainer, found by looking; nothing is changed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.integrations.trainer.fit import budget_of
from vramfit.integrations.trainer.job import effective_batch, frozen_part
from vramfit.integrations.trainer.rows import (
    Rows,
    bare_model,
    follows_count,
    is_overridden,
    origin_of,
    rows_of,
    step_model,
    task_of,
)
from vramfit.integrations.trainer.sentence_checks import check_duplicates, check_mini_batch, check_scale
from vramfit.integrations.trainer.sentence_losses import sentence_losses
from vramfit.integrations.trainer.settings import sample_bytes
from vramfit.records.finding import Finding
from vramfit.runtime.step_settings import across_samples
from vramfit.step.plain import Batch, each_tensor
from vramfit.tasks import find_task
from vramfit.tasks.parts.losses import LABELS
from vramfit.units import format_bytes

MUCH_PADDING = 0.25
"""Of all tokens: from here on it is worth a word."""
MUCH_PILED = 256 * 2**20
"""Logits on a GPU: from here on they are worth a word."""
ONE_LINE = "vramfit.integrations.trainer.fit_trainer(trainer) sets it right"


def check(trainer: Any, *, memory: str | int | None = None, gpu: str | None = None) -> list[Finding]:
    """Everything that is wrong with a Trainer's settings, gravest first; an ok for what is right.

    Its model sees a few samples, in evaluation mode. Nothing is changed, and nothing is drawn from random generators.

    Args:
        trainer: a `transformers.Trainer` or a subclass, before `train`.
        memory, gpu: what passes are to fit into, where a loss splits a batch by itself; without both, what is free on
            the GPU that the Trainer uses.

    Raises:
        WorkloadError: it is no Trainer.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise WorkloadError([f"check takes a transformers.Trainer, not {type(trainer).__name__}"])
    rows = rows_of(trainer, trainer.train_dataset)
    checks: tuple[Callable[[Any, Rows], Iterator[Finding]], ...] = (
        _loss_scale,
        _effective_batch,
        _samples,
        _padding,
        _evaluation,
        _checkpointing,
    )
    found = [finding for one in checks for finding in one(trainer, rows)]
    has_budget = memory is not None or gpu is not None or trainer.args.device.type == "cuda"
    if sentence_losses(trainer):
        found += check_duplicates(trainer)
        found += check_mini_batch(trainer, budget_of(trainer, memory, gpu) if has_budget else {})
    order = ("error", "warning", "info", "ok")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _loss_scale(trainer: Any, rows: Rows) -> Iterator[Finding]:
    """Whether a step is as long as that of the whole batch."""
    from transformers import Trainer

    name, steps = "trainer.loss_scale", trainer.args.gradient_accumulation_steps
    head = type(bare_model(trainer)).__name__
    if steps == 1:
        yield Finding(check=name, severity="ok", what="One pass a step: the loss is the head's own")
        return
    losses = sentence_losses(trainer)
    if losses:
        yield from check_scale(trainer, losses)
        return
    if origin_of(trainer) == "own":
        yield Finding(
            check=name,
            severity="info",
            what=f"{type(trainer).__name__} computes a loss of its own over {steps} accumulation steps",
            why="the Trainer cannot know whether it is a mean over a pass or a share of the whole step",
            fix="set loss_is_scaled_for_ga in the class: False for a mean over a pass",
        )
        return
    batch = _on_device(trainer, rows.batch)
    if not batch:
        yield Finding(check=name, severity="info", what="No sample could be looked at, so the loss was not tried")
        return
    if not set(LABELS) & set(batch):
        yield Finding(
            check=name,
            severity="error",
            what=f"Samples have no labels, only {', '.join(batch)}: there is nothing to learn",
            fix="give every sample labels, under a name that the model's forward takes",
        )
        return
    counts = trainer._get_num_items_in_batch([batch], trainer.args.device) is not None
    known = hasattr(Trainer, "loss_is_scaled_for_ga")  # older ones look at nothing of that name
    scaled = trainer.loss_is_scaled_for_ga if known else None
    divides = not scaled if scaled is not None else not (counts and trainer.model_accepts_loss_kwargs)
    divides = divides and trainer.compute_loss_func is None
    right = counts and (trainer.compute_loss_func is not None or trainer.label_smoother is not None)
    if not divides and not right and not follows_count(trainer.model, batch):
        yield Finding(
            check=name,
            severity="error",
            what=f"A step is {steps} times too long: {steps} accumulation steps are added up and never divided",
            why=f"the Trainer leaves the division to the head, and {head} ignores num_items_in_batch",
            fix=ONE_LINE,
        )
    elif divides and not _counts_samples(task_of(trainer)):
        yield Finding(
            check=name,
            severity="warning",
            what=f"The loss of {steps} passes is a mean of means: passes with few labels count as much as full ones",
            why=f"{head} divides by what it sees, not by what the step sees",
            fix=ONE_LINE,
        )
    else:
        yield Finding(check=name, severity="ok", what=f"The loss is right over {steps} equal accumulation steps")


def _counts_samples(task: str | None) -> bool:
    return task is not None and find_task(task).counts_samples


def _on_device(trainer: Any, batch: Batch) -> Batch:
    return each_tensor(batch, lambda value: value[:2].to(trainer.args.device))


def _effective_batch(trainer: Any, rows: Rows) -> Iterator[Finding]:
    name, args = "trainer.effective_batch", trainer.args
    batch = effective_batch(trainer)
    if args.auto_find_batch_size:
        yield Finding(
            check=name,
            severity="warning",
            what=f"auto_find_batch_size changes the effective batch of {batch} without a word when memory runs out",
            why="it also starts again from step 0, with the weights as they are by then",
            fix=ONE_LINE,
        )
    elif args.n_gpu > 1:
        yield Finding(
            check=name,
            severity="warning",
            what=f"DataParallel makes a step of {batch} samples out of {args.per_device_train_batch_size} for each GPU",
            fix="CUDA_VISIBLE_DEVICES=0, or torchrun",
        )
    else:
        yield Finding(check=name, severity="ok", what=f"Every step learns from {batch} samples")


def _samples(trainer: Any, rows: Rows) -> Iterator[Finding]:
    for problem in across_samples(trainer.model):
        yield Finding(check="trainer.samples", severity="error", what=problem, fix="take LayerNorm in its place")


def _padding(trainer: Any, rows: Rows) -> Iterator[Finding]:
    """Rows that are all of one length and end in padding were padded before the collator saw them."""
    name, mask = "trainer.padding", rows.batch.get("attention_mask")
    if mask is None:
        return
    needed = int(mask.bool().sum(dim=-1).max())
    width = int(mask.shape[-1])
    if needed < width and rows.share_of_padding > MUCH_PADDING:
        yield Finding(
            check=name,
            severity="warning",
            what=f"{rows.share_of_padding:.0%} of all tokens are padding: every sample is {width} wide, "
            f"the longest of {len(mask)} has {needed} tokens",
            why="padding takes as much memory and time as text",
            fix="leave padding out of the tokenizer's call, and let DataCollatorWithPadding do it batch by batch",
        )
    else:
        yield Finding(
            check=name, severity="ok", what=f"{rows.share_of_padding:.0%} of the tokens looked at are padding"
        )


def _evaluation(trainer: Any, rows: Rows) -> Iterator[Finding]:
    """Logits that pile up on the GPU until the last batch is done."""
    name, args, task = "trainer.evaluation", trainer.args, task_of(trainer)
    config = getattr(bare_model(trainer), "config", None)
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        yield Finding(
            check=name,
            severity="warning",
            what="The model gives hidden states or attentions, and an evaluation keeps them of every batch",
            fix="set output_hidden_states and output_attentions to False, or name them in ignore_keys",
        )
    if trainer.eval_dataset is None or task is None:
        return
    evaluation = rows_of(trainer, trainer.eval_dataset)
    if evaluation.num_samples is None:
        return
    width = evaluation.width or max(evaluation.lengths, default=1)
    piled = evaluation.num_samples * sample_bytes(trainer, task, width)
    kept = args.eval_accumulation_steps is None and not args.batch_eval_metrics
    only_loss = args.prediction_loss_only or trainer.compute_metrics is None
    if kept and not only_loss and trainer.preprocess_logits_for_metrics is None and piled >= MUCH_PILED:
        yield Finding(
            check=name,
            severity="error" if _beyond_gpu(args.device, piled) else "warning",
            what=f"An evaluation piles up to {format_bytes(piled)} of logits on the GPU, of {evaluation.num_samples:,} "
            "samples, and twice that while it joins them",
            why="they go to the host only when the last batch is done: eval_accumulation_steps is None",
            fix=f"eval_accumulation_steps=1; {ONE_LINE}",
        )
    else:
        yield Finding(check=name, severity="ok", what="Logits of an evaluation do not pile up")


def _beyond_gpu(device: torch.device, num_bytes: int) -> bool:
    return device.type == "cuda" and 2 * num_bytes > torch.cuda.get_device_properties(device).total_memory


def _checkpointing(trainer: Any, rows: Rows) -> Iterator[Finding]:
    name, args = "trainer.checkpointing", trainer.args
    on = args.gradient_checkpointing or getattr(step_model(trainer), "is_gradient_checkpointing", False)
    if not on:
        return
    frozen = frozen_part(bare_model(trainer))
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        yield Finding(
            check=name,
            severity="warning",
            what="Checkpointing is the reentrant one, which keeps more and learns nothing below frozen inputs",
            fix='gradient_checkpointing_kwargs={"use_reentrant": False}',
        )
    elif frozen is not None and not is_overridden(trainer, "training_step"):
        yield Finding(
            check=name,
            severity="warning",
            what=f"Checkpointing computes frozen layers twice as well ({_short(frozen)} does not learn)",
            why="it makes the embeddings' outputs require gradients, so that backward passes through every layer",
            fix="model.disable_input_require_grads() after it is turned on; fit_trainer turns it on only where needed",
        )
    else:
        yield Finding(check=name, severity="ok", what="Checkpointing: every layer learns, and is computed twice")


def _short(frozen: str | int | tuple[str, ...]) -> str:
    if isinstance(frozen, tuple):
        return f"{len(frozen)} parameters"
    return f"the lowest {frozen} layers" if isinstance(frozen, int) else f"the {frozen}"
