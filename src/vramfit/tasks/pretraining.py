"""Pretraining: masked tokens and, in some families, the relation of two sentences; or ELECTRA's discriminator."""

import inspect
from typing import Any

from vramfit.tasks.base import Task, zeros

SENTENCE_LABELS = ("next_sentence_label", "sentence_order_label")
"""Families name the label of two sentences differently."""


class Pretraining(Task):
    """See the module."""

    name = "pretraining"
    title = "Pretraining"
    rank = 50
    auto_class = "AutoModelForPreTraining"
    labels = ("labels", *SENTENCE_LABELS)

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        accepted = inspect.signature(model.forward).parameters
        sentence = [name for name in SENTENCE_LABELS if name in accepted]
        return {"labels": zeros(device, batch, seq)} | {name: zeros(device, batch) for name in sentence}

    def loss(self, model: Any, batch: Any) -> Any:
        from vramfit.tasks.parts import losses

        labels = batch.get("labels")
        sentence = next((name for name in SENTENCE_LABELS if name in batch), None)
        if labels is None:
            return None
        if sentence is not None:
            return _with_sentence(sentence)
        if losses.judges_every_token(model) and losses.are_per_token(model, labels):
            return losses.HeadLoss(losses.token_sums, lambda batch: [_num_judged(batch)])
        return losses.token_labels_loss(model, batch)


def _num_judged(batch: Any) -> int:
    """Tokens that ELECTRA's discriminator judges: all that are attended to, whatever labels padding has."""
    import numpy as np

    from vramfit.tasks.parts.losses import attended

    mask = batch.get("attention_mask")
    if mask is None or mask.device.type == "meta":
        return int(batch["labels"].numel())
    return int(np.count_nonzero(attended(mask)))


def _with_sentence(name: str) -> Any:
    """Masked tokens and the relation of two sentences, each with its own mean."""
    from vramfit.tasks.parts.losses import HeadLoss, cross_entropy, field, logits_of, num_labelled

    def sums(output: Any, batch: Any) -> list[Any]:
        logits = logits_of(output, "prediction_logits")
        sentence = field(output, "seq_relationship_logits")
        sentence = sentence if sentence is not None else logits_of(output, "sop_logits")
        words = cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))
        return [words, cross_entropy(sentence.reshape(-1, 2), batch[name].reshape(-1))]

    return HeadLoss(sums, lambda batch: [num_labelled(batch["labels"]), num_labelled(batch[name])])


TASK = Pretraining()
