"""What is wrong with a trainer of sentence-transformers: batches that are compared, their duplicates, mini-batches."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.integrations.trainer.job import Job, as_set, effective_batch, job_of
from vramfit.integrations.trainer.rows import MAX_DIFFERENCE, MAX_ROWS
from vramfit.integrations.trainer.sentence_losses import cached_in, has_negatives, is_across, is_known, sentence_losses
from vramfit.integrations.trainer.texts import comparing, make_head
from vramfit.records.estimate import Estimate
from vramfit.records.finding import Finding
from vramfit.runtime.model_state import untouched
from vramfit.step.own_loss import still
from vramfit.step.plain import each_tensor
from vramfit.step.recovery import RandomState
from vramfit.units import format_bytes

NUM_TRIED = 4
"""Samples that a loss is tried on, and on half of them at a time."""
MANY_EQUAL = 0.01
"""Pairs of equal texts in a batch, on average: from here on they are worth a warning."""


def check_scale(trainer: Any, losses: dict[str, Any]) -> Iterator[Finding]:
    """Its trainer divides by the accumulation steps: right for a mean over samples, and for nothing else."""
    check_name, steps = "trainer.loss_scale", trainer.args.gradient_accumulation_steps
    samples = trainer.args.per_device_train_batch_size
    for dataset, loss in losses.items():
        name = type(loss).__name__
        mean = not is_across(loss) and _is_mean(trainer, dataset, loss)
        if mean is None:
            yield Finding(check=check_name, severity="info", what=f"{name} could not be tried on parts of a batch")
        elif mean:
            what = f"{name} is a mean over samples: right over {steps} equal accumulation steps"
            yield Finding(check=check_name, severity="ok", what=what)
        else:
            yield Finding(
                check=check_name,
                severity="warning",
                what=f"{name} compares the samples of a pass with each other: {steps} passes of {samples} are not a "
                f"step of {effective_batch(trainer)}",
                why="a sample is held against those of its own pass only: accumulation adds no negatives",
                fix=_way_out(trainer, loss),
            )


def _is_mean(trainer: Any, name: str, loss: Any) -> bool | None:
    """Whether the loss of a few samples is the mean of their halves'; None where that could not be tried."""
    datasets = trainer.train_dataset
    start = RandomState.now()
    try:
        dataset = datasets[name] if isinstance(datasets, dict) and name else datasets
        rows = [dataset[i] for i in range(NUM_TRIED)]
        with untouched(loss), still(loss):
            whole, first, last = (
                _loss(trainer, loss, part) for part in (rows, rows[: NUM_TRIED // 2], rows[NUM_TRIED // 2 :])
            )
    except Exception:  # anybody's loss, of anybody's rows
        return None
    finally:
        start.restore()
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
        return f"{whole}, with a smaller mini_batch_size: {type(cached).__name__} splits a batch by itself"
    return f"{whole}; bf16 and checkpointing make room for it"


def check_duplicates(trainer: Any) -> Iterator[Finding]:
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
        yield Finding(check=name, severity="ok", what=f"No text occurs twice in a column of {num_rows:,} samples")
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
    rows = dataset[: min(len(dataset), MAX_ROWS)]
    return {name: values for name, values in rows.items() if values and isinstance(values[0], str)}


def check_mini_batch(trainer: Any, budget: dict[str, Any]) -> Iterator[Finding]:
    """A cached loss whose passes do not fit, as predicted."""
    name = "trainer.mini_batch"
    cached = [found for loss in sentence_losses(trainer).values() if (found := cached_in(loss)) is not None]
    if not cached or not budget:
        return
    try:
        job = job_of(trainer, {}, has_loss=False)
        asked = _mini_batch(cached[0], job)
        found = _predicted(trainer, job, asked, budget)
        what = f"{type(cached[0]).__name__} passes {asked} texts of up to {job.keywords['seq']} tokens at once"
        if found.fits:
            room = f"{format_bytes(found.safe_reserved_bytes)} of {format_bytes(found.capacity_bytes or 0)} predicted"
            yield Finding(check=name, severity="ok", what=f"{what}: {room}")
            return
        smaller = asked // 2
        while smaller >= job.keywords["texts"] and not _predicted(trainer, job, smaller, budget).fits:
            smaller //= 2
    except VramfitError as error:
        yield Finding(check=name, severity="info", what=f"The mini_batch_size was not looked at: {error}")
        return
    fits = f"mini_batch_size={smaller}" if smaller >= job.keywords["texts"] else "no mini_batch_size fits"
    yield Finding(
        check=name,
        severity="error",
        what=f"{what}, which takes {format_bytes(found.safe_reserved_bytes)} and does not fit "
        f"{format_bytes(found.capacity_bytes or 0)}, as predicted",
        fix=f"{fits}; vramfit.integrations.trainer.fit_trainer(trainer) chooses passes by itself",
    )


def _mini_batch(loss: Any, job: Job) -> int:
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
