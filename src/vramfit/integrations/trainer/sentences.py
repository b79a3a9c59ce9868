"""The trainer of sentence-transformers: which of its losses compare samples with each other, by name or by trial."""

from typing import Any

import torch

from vramfit.integrations.trainer.heads import MAX_DIFFERENCE
from vramfit.runtime.random_state import RandomState
from vramfit.runtime.state.model_state import untouched
from vramfit.step.inputs import each_tensor
from vramfit.step.own_loss import still

PACKAGE = "sentence_transformers"
NUM_TRIED = 4
"""Samples that a loss is tried on, and on half of them at a time."""
CACHED = "CachedMultipleNegatives", "CachedGIST"
NEGATIVES = "MultipleNegatives", "GIST"
ACROSS_SAMPLES = (
    *CACHED,
    *NEGATIVES,
    "CoSENT",
    "AnglE",
    "OnlineContrastive",
    "BatchHard",
    "BatchSemiHard",
    "BatchAll",
    "MegaBatch",
    "ContrastiveTensionLossInBatch",
)
"""How the names of losses begin that look at all samples of a batch together."""


def sentence_losses(trainer: Any) -> dict[str, Any]:
    """Losses by dataset, of a trainer of sentence-transformers with one for all under ""; empty for other trainers."""
    if not any(kind.__module__.partition(".")[0] == PACKAGE for kind in type(trainer).__mro__):
        return {}
    loss = getattr(trainer, "loss", None)
    losses = loss if isinstance(loss, dict) else {"": loss}
    return {name: one for name, one in losses.items() if isinstance(one, torch.nn.Module)}


def is_across(loss: Any) -> bool:
    """Whether a loss, or one that it wraps, is known to compare the samples of a batch with each other."""
    return any(type(module).__name__.startswith(ACROSS_SAMPLES) for module in loss.modules())


def is_mean(trainer: Any, name: str, loss: Any) -> bool | None:
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


def way_out(loss: Any) -> str:
    """What to do where a loss compares samples and a step of them does not fit in one pass."""
    names = [type(module).__name__ for module in loss.modules()]
    cached = next((name for name in names if name.startswith(CACHED)), None)
    if cached is not None:
        return (
            f"one pass a step, with a smaller mini_batch_size: {cached} splits a batch by itself and compares all of it"
        )
    negatives = next((name for name in names if name.startswith(NEGATIVES)), None)
    if negatives is not None:
        return f"one pass a step, with Cached{negatives}(mini_batch_size=…), which splits it by itself and compares all"
    return "one pass a step: per_device_train_batch_size as large as the step; bf16 and checkpointing make room for it"
