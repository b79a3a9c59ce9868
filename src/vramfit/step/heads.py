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
from vramfit.step.outputs import field, first_tensor, logits_of, loss_of, parameters_of
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
    takes_labels: bool = False
    """Whether the model is given its labels, to compute the loss itself."""
    splits: bool = True
    """Whether the losses of parts of a batch add up to the loss of the whole."""

    @staticmethod
    def custom(
        loss_fn: Callable[[Any, Batch], torch.Tensor], count_fn: Callable[[Batch], int], *, takes_labels: bool = False
    ) -> "HeadLoss":
        """A head of the user's: `loss_fn` gives a sum, `count_fn` what to divide it by."""
        return HeadLoss(
            lambda output, batch: [loss_fn(output, batch)],
            lambda batch: [count_fn(batch)],
            takes_labels=takes_labels,
        )

    def inputs(self, batch: Batch) -> Batch:
        """What of a batch the model is given."""
        return batch if self.takes_labels else model_inputs(batch)


def model_inputs(batch: Batch) -> Batch:
    """A batch without its labels: the head is asked for logits, and the loss is summed here."""
    return {name: value for name, value in batch.items() if name not in LABELS}


def needs_labels(model: torch.nn.Module) -> bool:
    """Whether forward cannot be called without labels."""
    parameters = parameters_of(model) or {}
    return any(parameters[name].default is parameters[name].empty for name in LABELS & set(parameters))


def mean_of(loss: HeadLoss, output: Any, batch: Batch) -> torch.Tensor:
    """The mean loss of a batch that is not split."""
    terms = [s / n for s, n in zip(loss.sums(output, batch), loss.counts(batch), strict=True) if n]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def loss_to_learn_from(model: torch.nn.Module, output: Any, batch: Batch) -> torch.Tensor:
    """The loss of a plain loop: the model's own, or what the labels call for; of an encoder alone, a mean.

    Raises:
        WorkloadError: there is none.
    """
    own = loss_of(output)
    if own is not None:
        return own
    features = None if LABELS & set(batch) else first_tensor(output)
    return mean_of(head_loss(model, batch), output, batch) if features is None else features.float().mean()


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
        return HeadLoss(_token_sums, lambda b: [num_labelled(b["labels"])], leaves_out=True)
    if problem == "regression":
        return HeadLoss(_regression_sums, lambda b: [b["labels"].numel()])
    if problem == "multi_label_classification":
        return HeadLoss(_multi_label_sums, lambda b: [b["labels"].numel()])
    return HeadLoss(_class_sums, lambda b: [num_labelled(b["labels"])], leaves_out=True)


def _problem(labels: torch.Tensor, num_labels: int) -> str:
    """As the sequence classification heads of transformers guess it."""
    if num_labels == 1 and (labels.dim() == 1 or labels.shape[1:] == (1,)):
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def num_labelled(labels: torch.Tensor) -> int:
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
    return [_cross_entropy(logits_of(output), batch["labels"])]


def _token_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    logits, labels = logits_of(output), batch["labels"]
    if logits.dim() == 2:  # one logit a token: ELECTRA's discriminator
        return [_discriminator_sum(logits, batch)]
    return [_cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))]


def _discriminator_sum(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    weight = batch["attention_mask"].to(logits.dtype) if "attention_mask" in batch else None
    return F.binary_cross_entropy_with_logits(logits, batch["labels"].to(logits.dtype), weight, reduction="sum")


def _regression_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    logits = logits_of(output)
    return [F.mse_loss(logits.squeeze(), batch["labels"].squeeze().to(logits.dtype), reduction="sum")]


def _multi_label_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    return [F.binary_cross_entropy_with_logits(logits_of(output), batch["labels"], reduction="sum")]


def _qa_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    """Half of the start's loss and half of the end's, each over the positions that are not ignored.

    Positions beyond the text are ignored: clamped to its length, which is then the ignored class.
    """
    starts, ends = logits_of(output, "start_logits"), logits_of(output, "end_logits")
    length = starts.shape[1]
    pairs = ((starts, "start_positions"), (ends, "end_positions"))
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
        logits = logits_of(output, "prediction_logits")
        sentence = field(output, "seq_relationship_logits")
        sentence = sentence if sentence is not None else logits_of(output, "sop_logits")
        words = _cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))
        return [words, _cross_entropy(sentence.reshape(-1, 2), batch[name].reshape(-1))]

    return HeadLoss(sums, lambda b: [num_labelled(b["labels"]), num_labelled(b[name])])
