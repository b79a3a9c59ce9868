"""`check`: what is wrong with a Trainer, found by looking; nothing is changed."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vramfit.errors import VramfitError, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.integrations.trainer.fit import budget_of
from vramfit.integrations.trainer.job import Job, as_set, effective_batch, frozen_part, job_of
from vramfit.integrations.trainer.models import (
    MAX_DIFFERENCE,
    bare_model,
    drawn_again,
    follows_count,
    is_overridden,
    sentence_losses,
    step_model,
    task_of,
)
from vramfit.integrations.trainer.rows import MAX_ROWS, Rows, rows_of
from vramfit.integrations.trainer.settings import sample_bytes
from vramfit.integrations.trainer.texts import cached_in, comparing, has_negatives, is_across, is_known, make_head
from vramfit.records.estimate import Estimate
from vramfit.records.finding import SEVERITIES, Finding
from vramfit.runtime.model_state import untouched
from vramfit.runtime.step_settings import across_samples
from vramfit.step.own_loss import still
from vramfit.step.plain import each_tensor
from vramfit.tasks import find_task
from vramfit.tasks.parts.losses import LABELS
from vramfit.units import format_bytes

MUCH_PADDING = 0.25
"""Of all tokens: from here on it is worth a word."""
MUCH_PILED = 256 * 2**20
"""Logits on a GPU: from here on they are worth a word."""
NUM_TRIED = 4
"""Samples that a loss is tried on, and on half of them at a time."""
MANY_EQUAL = 0.01
"""Pairs of equal texts in a batch, on average: from here on they are worth a warning."""
ONE_LINE = "vramfit.integrations.trainer.fit_trainer(trainer) sets it right"
BY_COUNT = "have compute_loss_func divide the sum of its losses by num_items_in_batch"


def check(trainer: Any, *, memory: str | int | None = None, gpu: str | None = None) -> list[Finding]:
    """Everything that is wrong with a Trainer's settings, gravest first; an ok for what is right.

    Its model sees a few samples, in evaluation mode. Nothing is changed, and nothing is drawn from random generators.

    Args:
        trainer: a `transformers.Trainer` or a subclass, before `train`.
        memory, gpu: what passes are to fit into, where a loss splits a batch itself; without both, what is free on
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
        found += _duplicates(trainer)
        found += _mini_batch(trainer, budget_of(trainer, memory, gpu) if has_budget else {})
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))


def _loss_scale(trainer: Any, rows: Rows) -> Iterator[Finding]:
    """Whether a step is as long as that of the whole batch."""
    from transformers import Trainer

    name, steps = "trainer.loss_scale", trainer.args.gradient_accumulation_steps
    head, task = type(bare_model(trainer)).__name__, task_of(trainer)
    if steps == 1:
        yield Finding.ok(name, "One pass a step: the loss is the head's own")
        return
    losses = sentence_losses(trainer)
    if losses:
        yield from _text_loss_scale(trainer, losses)
        return
    if is_overridden(trainer, "compute_loss"):
        yield Finding.info(
            name,
            f"{type(trainer).__name__} computes a loss of its own over {steps} accumulation steps",
            why="the Trainer cannot know whether it is a mean over a pass or a share of the whole step",
            fix="set loss_is_scaled_for_ga in the class: False for a mean over a pass",
        )
        return
    batch = each_tensor(rows.batch, lambda value: value[:2].to(trainer.args.device))
    if not batch:
        yield Finding.info(name, "No sample could be looked at, so the loss was not tried")
        return
    if not set(LABELS) & set(batch):
        yield Finding.error(
            name,
            f"Samples have no labels, only {', '.join(batch)}: there is nothing to learn",
            fix="give every sample labels, under a name that the model's forward takes",
        )
        return
    counts = trainer._get_num_items_in_batch([batch], trainer.args.device) is not None
    known = hasattr(Trainer, "loss_is_scaled_for_ga")  # older ones look at nothing of that name
    scaled = trainer.loss_is_scaled_for_ga if known else None
    function = trainer.compute_loss_func
    left = function is not None or (counts and trainer.model_accepts_loss_kwargs)
    divides = not (left if scaled is None else scaled)
    try:
        follows = counts and follows_count(trainer, batch)
    except WorkloadError as error:
        yield Finding.error(name, str(error), fix=error.hint or "")
        return
    if not divides and not follows:
        who, fix = (f"the head, and {head}", ONE_LINE) if function is None else ("compute_loss_func, and it", BY_COUNT)
        whole = f"per_device_train_batch_size={effective_batch(trainer)} and gradient_accumulation_steps=1"
        yield Finding.error(
            name,
            f"A step is {steps} times too long: {steps} accumulation steps are added up and never divided",
            why=f"the Trainer leaves the division to {who} ignores num_items_in_batch",
            fix=fix if task is not None else f"{whole}: fit_trainer knows no loss of {head}",
        )
    elif divides and task is None:
        yield Finding.info(
            name,
            f"The Trainer divides by {steps}: right over equal passes, if the loss of {head} is a mean over samples",
        )
    elif divides and task is not None and not find_task(task).counts_samples:
        yield Finding.warning(
            name,
            f"The loss of {steps} passes is a mean of means: passes with few labels count as much as full ones",
            why=f"{head} divides by what it sees, not by what the step sees",
            fix=ONE_LINE,
        )
    else:
        yield Finding.ok(name, f"The loss is right over {steps} equal accumulation steps")


def _effective_batch(trainer: Any, rows: Rows) -> Iterator[Finding]:
    name, args = "trainer.effective_batch", trainer.args
    batch = effective_batch(trainer)
    if args.auto_find_batch_size:
        yield Finding.warning(
            name,
            f"auto_find_batch_size changes the effective batch of {batch} without a word when memory runs out",
            why="it also starts again from step 0, with the weights as they are by then",
            fix=ONE_LINE,
        )
    elif args.n_gpu > 1:
        yield Finding.warning(
            name,
            f"DataParallel makes a step of {batch} samples out of {args.per_device_train_batch_size} for each GPU",
            fix="CUDA_VISIBLE_DEVICES=0, or torchrun",
        )
    else:
        yield Finding.ok(name, f"Every step learns from {batch} samples")


def _samples(trainer: Any, rows: Rows) -> Iterator[Finding]:
    for problem in across_samples(trainer.model):
        yield Finding.error("trainer.samples", problem, fix="take LayerNorm in its place")


def _padding(trainer: Any, rows: Rows) -> Iterator[Finding]:
    """Rows that are all of one length and end in padding were padded before the collator saw them."""
    name, mask = "trainer.padding", rows.batch.get("attention_mask")
    if mask is None:
        return
    needed = int(mask.bool().sum(dim=-1).max())
    width = int(mask.shape[-1])
    if needed < width and rows.share_of_padding > MUCH_PADDING:
        yield Finding.warning(
            name,
            f"{rows.share_of_padding:.0%} of all tokens are padding: every sample is {width} wide, "
            f"the longest of {len(mask)} has {needed} tokens",
            why="padding takes as much memory and time as text",
            fix="leave padding out of the tokenizer's call, and let DataCollatorWithPadding do it batch by batch",
        )
    else:
        yield Finding.ok(name, f"{rows.share_of_padding:.0%} of the tokens looked at are padding")


def _evaluation(trainer: Any, rows: Rows) -> Iterator[Finding]:
    """Logits that pile up on the GPU until the last batch is done."""
    name, args, task = "trainer.evaluation", trainer.args, task_of(trainer)
    config = getattr(bare_model(trainer), "config", None)
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        yield Finding.warning(
            name,
            "The model gives hidden states or attentions, and an evaluation keeps them of every batch",
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
        yield Finding.ok(name, "Logits of an evaluation do not pile up")


def _beyond_gpu(device: torch.device, num_bytes: int) -> bool:
    return device.type == "cuda" and 2 * num_bytes > torch.cuda.get_device_properties(device).total_memory


def _checkpointing(trainer: Any, rows: Rows) -> Iterator[Finding]:
    name, args = "trainer.checkpointing", trainer.args
    on = args.gradient_checkpointing or getattr(step_model(trainer), "is_gradient_checkpointing", False)
    if not on:
        return
    frozen = frozen_part(bare_model(trainer))
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        yield Finding.warning(
            name,
            "Checkpointing is the reentrant one, which keeps more and learns nothing below frozen inputs",
            fix='gradient_checkpointing_kwargs={"use_reentrant": False}',
        )
    elif frozen is not None and not is_overridden(trainer, "training_step"):
        yield Finding.warning(
            name,
            f"Checkpointing computes frozen layers twice as well ({_short(frozen)} does not learn)",
            why="it makes the embeddings' outputs require gradients, so that backward passes through every layer",
            fix="model.disable_input_require_grads() after it is turned on; fit_trainer turns it on only where needed",
        )
    else:
        yield Finding.ok(name, "Checkpointing: every layer learns, and is computed twice")


def _short(frozen: str | int | tuple[str, ...]) -> str:
    if isinstance(frozen, tuple):
        return f"{len(frozen)} parameters"
    return f"the lowest {frozen} layers" if isinstance(frozen, int) else f"the {frozen}"


def _text_loss_scale(trainer: Any, losses: dict[str, Any]) -> Iterator[Finding]:
    """Its trainer divides by the accumulation steps: right for a mean over samples, and for nothing else."""
    check_name, steps = "trainer.loss_scale", trainer.args.gradient_accumulation_steps
    samples = trainer.args.per_device_train_batch_size
    for dataset, loss in losses.items():
        name = type(loss).__name__
        mean = not is_across(loss) and _is_mean(trainer, dataset, loss)
        if mean is None:
            yield Finding.info(check_name, f"{name} could not be tried on parts of a batch")
        elif mean:
            yield Finding.ok(check_name, f"{name} is a mean over samples: right over {steps} equal accumulation steps")
        else:
            yield Finding.warning(
                check_name,
                f"{name} compares the samples of a pass with each other: {steps} passes of {samples} are not a "
                f"step of {effective_batch(trainer)}",
                why="a sample is held against those of its own pass only: accumulation adds no negatives",
                fix=_way_out(trainer, loss),
            )


def _is_mean(trainer: Any, name: str, loss: Any) -> bool | None:
    """Whether the loss of a few samples is the mean of their halves'; None where that could not be tried."""
    datasets, half = trainer.train_dataset, NUM_TRIED // 2
    try:
        with drawn_again(), untouched(loss), still(loss):
            dataset = datasets[name] if isinstance(datasets, dict) and name else datasets
            rows = [dataset[i] for i in range(NUM_TRIED)]
            whole, first, last = (_loss(trainer, loss, part) for part in (rows, rows[:half], rows[half:]))
    except Exception:  # anybody's loss, of anybody's rows
        return None
    return abs(whole - (first + last) / 2) <= MAX_DIFFERENCE * max(abs(whole), 1e-6)


def _loss(trainer: Any, loss: Any, rows: list[Any]) -> float:
    batch = each_tensor(trainer.data_collator(rows), lambda value: value.to(trainer.args.device))
    batch.pop("dataset_name", None)
    features, labels = trainer.collect_features(batch)
    found = loss(features, labels)
    return float(sum(found.values()) if isinstance(found, dict) else found)


def _way_out(trainer: Any, loss: Any) -> str:
    """What to do where a step of compared samples does not fit in one pass."""
    step = effective_batch(trainer)
    whole = f"per_device_train_batch_size={step} and gradient_accumulation_steps=1 compare the whole step"
    if is_known(loss):
        return f"{whole}; vramfit.integrations.trainer.fit_trainer(trainer) runs it in passes that fit, exactly"
    cached = cached_in(loss)
    if cached is not None:
        return f"{whole}, with a smaller mini_batch_size: {type(cached).__name__} splits a batch itself"
    return f"{whole}; bf16 and checkpointing free memory for it"


def _duplicates(trainer: Any) -> Iterator[Finding]:
    """Equal texts in a batch whose other samples are negatives: a text is pushed away from itself."""
    name, args = "trainer.duplicates", trainer.args
    negatives = [loss for loss in sentence_losses(trainer).values() if has_negatives(loss)]
    if not negatives or "no_duplicates" in str(args.batch_sampler).lower():
        return
    columns = _texts(trainer.train_dataset)
    num_rows = len(next(iter(columns.values()), ()))
    batch = min(args.train_batch_size, num_rows)
    if batch < 2:
        return
    counts = {column: Counter(values) for column, values in columns.items()}
    pairs = sum(n * (n - 1) // 2 for found in counts.values() for n in found.values())
    expected = pairs * batch * (batch - 1) / (num_rows * (num_rows - 1))
    repeated = {column: sum(n for n in found.values() if n > 1) for column, found in counts.items()}
    if not pairs:
        yield Finding.ok(name, f"No text occurs twice in a column of {num_rows:,} samples")
        return
    worst = max(repeated, key=lambda column: repeated[column])
    yield Finding(
        check=name,
        severity="warning" if expected >= MANY_EQUAL else "info",
        what=f"{type(negatives[0]).__name__} takes equal texts for negatives: of {num_rows:,} samples looked at, "
        f"{repeated[worst]:,} share their {worst!r} with another (equal pairs in a batch of {batch}, on average: "
        f"{expected:.2g})",
        why="a sample is pushed away from what another one, with the same text, is drawn to",
        fix="batch_sampler=BatchSamplers.NO_DUPLICATES",
    )


def _texts(dataset: Any) -> dict[str, list[str]]:
    """Columns of texts, of as many rows as are looked at; empty where rows cannot be had by column."""
    if isinstance(dataset, dict) or not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        return {}
    rows = dataset[:MAX_ROWS].items()
    return {name: values for name, values in rows if values and isinstance(values[0], str)}


def _mini_batch(trainer: Any, budget: dict[str, Any]) -> Iterator[Finding]:
    """A cached loss whose passes do not fit, as predicted."""
    name = "trainer.mini_batch"
    cached = [found for loss in sentence_losses(trainer).values() if (found := cached_in(loss)) is not None]
    if not cached or not budget:
        return
    try:
        job = job_of(trainer, {}, has_loss=False)
        asked = _texts_at_once(cached[0], job)
        found = _predicted(trainer, job, asked, budget)
        what = f"{type(cached[0]).__name__} passes {asked} texts of up to {job.keywords['seq']} tokens at once"
        if found.fits:
            room = f"{format_bytes(found.safe_reserved_bytes)} of {format_bytes(found.capacity_bytes or 0)} predicted"
            yield Finding.ok(name, f"{what}: {room}")
            return
        smaller = asked // 2
        while smaller >= job.keywords["texts"] and not _predicted(trainer, job, smaller, budget).fits:
            smaller //= 2
    except VramfitError as error:
        yield Finding.info(name, f"The mini_batch_size was not looked at: {error}")
        return
    fits = f"mini_batch_size={smaller}" if smaller >= job.keywords["texts"] else "no mini_batch_size fits"
    yield Finding.error(
        name,
        f"{what}, which takes {format_bytes(found.safe_reserved_bytes)} and does not fit "
        f"{format_bytes(found.capacity_bytes or 0)}, as predicted",
        fix=f"{fits}; vramfit.integrations.trainer.fit_trainer(trainer) chooses passes automatically",
    )


def _texts_at_once(loss: Any, job: Job) -> int:
    """Texts that a cached loss passes at once."""
    tokens = getattr(loss, "mini_batch_num_tokens", None)
    most = job.batch * int(job.keywords["texts"])
    return min(max(int(tokens) // int(job.keywords["seq"]), 1) if tokens else int(loss.mini_batch_size), most)


def _predicted(trainer: Any, job: Job, num_texts: int, budget: dict[str, Any]) -> Estimate:
    """A step of a batch in passes of so many texts, padded."""
    texts, batch = int(job.keywords["texts"]), trainer.args.train_batch_size
    passes = {"batch": batch, "micro_batch": max(min(num_texts // texts, batch), 1), "loop": "stepper"}
    assert job.texts is not None
    with comparing(trainer, make_head(trainer, job.texts)):
        return estimate(job.model, **as_set(trainer, job) | passes | budget)
