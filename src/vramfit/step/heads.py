"""Losses as sums: what each head adds up, and how many things it adds up, so that any split gives one mean.

A head's own loss is a mean over what it sees. Summed over micro-batches and divided by the count of the whole
effective batch, it is the mean over the whole batch, however that was split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.step.inputs import SENTENCE_LABELS, Batch
from vramfit.techniques.packing import IGNORED, attended

LABELS = frozenset({"labels", "start_positions", "end_positions", *SENTENCE_LABELS})
"""Inputs that only a loss reads."""

Sums = Callable[[Any, Batch], list[torch.Tensor]]
Counts = Callable[[Batch], list[int]]


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """The loss of a head: one or more terms, each a sum and a count."""

    sums: Sums
    """Model output and batch → the sum of each term."""
    counts: Counts
    """Batch → how many things each term adds up."""
    leaves_out: bool = False
    """Whether what is labelled as ignored adds nothing, so that there may be any number of it."""

    @staticmethod
    def custom(loss_fn: Callable[[Any, Batch], torch.Tensor], count_fn: Callable[[Batch], int]) -> "HeadLoss":
        """A head of the user's: `loss_fn` gives a sum, `count_fn` what to divide it by."""
        return HeadLoss(lambda output, batch: [loss_fn(output, batch)], lambda batch: [count_fn(batch)])


def model_inputs(batch: Batch) -> Batch:
    """A batch without its labels: the head is asked for logits, and the loss is summed here."""
    return {name: value for name, value in batch.items() if name not in LABELS}


def head_loss(model: torch.nn.Module, batch: Batch) -> HeadLoss:
    """The loss that the labels of a batch call for, as the heads of transformers compute it.

    Raises:
        WorkloadError: labels of a shape that no head takes.
    """
    if "start_positions" in batch:
        return HeadLoss(_qa_sums, _qa_counts)
    labels = batch.get("labels")
    if labels is None:
        raise WorkloadError(["the batch has no labels, so there is nothing to learn"])
    config: Any = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None) or _problem(labels, getattr(config, "num_labels", 2))
    sentence = next((name for name in SENTENCE_LABELS if name in batch), None)
    if sentence is not None:
        return _with_sentence(sentence)
    if labels.dim() == 2 and problem == "single_label_classification":
        if hasattr(model, "discriminator_predictions"):
            return HeadLoss(_token_sums, lambda b: [_num_told_apart(b)])
        return HeadLoss(_token_sums, lambda b: [_num_labelled(b["labels"])], leaves_out=True)
    if problem == "regression":
        return HeadLoss(_regression_sums, lambda b: [b["labels"].numel()])
    if problem == "multi_label_classification":
        return HeadLoss(_multi_label_sums, lambda b: [b["labels"].numel()])
    return HeadLoss(_class_sums, lambda b: [_num_labelled(b["labels"])], leaves_out=True)


def _problem(labels: torch.Tensor, num_labels: int) -> str:
    """As the sequence classification heads of transformers guess it."""
    if num_labels == 1 and (labels.dim() == 1 or labels.shape[1:] == (1,)):
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def _num_labelled(labels: torch.Tensor) -> int:
    """By numpy: torch would wake all its threads for so little."""
    return labels.numel() if labels.device.type == "meta" else int(np.count_nonzero(labels.cpu().numpy() != IGNORED))


def _num_told_apart(batch: Batch) -> int:
    """Tokens that ELECTRA's discriminator judges: all that are attended to, whatever labels padding has."""
    mask = batch.get("attention_mask")
    if mask is None or mask.device.type == "meta":
        return batch["labels"].numel()
    return int(np.count_nonzero(attended(mask)))


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=ignored)


def _class_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    return [_cross_entropy(output.logits, batch["labels"])]


def _token_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    logits, labels = output.logits, batch["labels"]
    if logits.dim() == 2:  # one logit a token: ELECTRA's discriminator
        return [_discriminator_sum(logits, batch)]
    return [_cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))]


def _discriminator_sum(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    weight = batch["attention_mask"].to(logits.dtype) if "attention_mask" in batch else None
    return F.binary_cross_entropy_with_logits(logits, batch["labels"].to(logits.dtype), weight, reduction="sum")


def _regression_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    return [F.mse_loss(output.logits.squeeze(), batch["labels"].squeeze().to(output.logits.dtype), reduction="sum")]


def _multi_label_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    return [F.binary_cross_entropy_with_logits(output.logits, batch["labels"], reduction="sum")]


def _qa_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    """Half of the start's loss and half of the end's, each over the positions that are not ignored.

    Positions beyond the text are ignored: clamped to its length, which is then the ignored class.
    """
    length = output.start_logits.shape[1]
    pairs = ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
    return [_cross_entropy(logits, batch[name].clamp(0, length), ignored=length) / 2 for logits, name in pairs]


def _qa_counts(batch: Batch) -> list[int]:
    length = batch["input_ids"].shape[1]
    names = ("start_positions", "end_positions")
    if batch["input_ids"].device.type == "meta":
        return [batch[name].numel() for name in names]
    return [int((batch[name].clamp(0, length) != length).sum()) for name in names]


def _with_sentence(name: str) -> HeadLoss:
    """Masked tokens and the relation of two sentences, each with its own mean."""

    def sums(output: Any, batch: Batch) -> list[torch.Tensor]:
        logits = output.prediction_logits
        sentence = getattr(output, "seq_relationship_logits", None)
        sentence = sentence if sentence is not None else output.sop_logits
        words = _cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))
        return [words, _cross_entropy(sentence.reshape(-1, 2), batch[name].reshape(-1))]

    return HeadLoss(sums, lambda b: [_num_labelled(b["labels"]), _num_labelled(b[name])])
