"""`TextSteps`: steps of a trainer of sentence-transformers, whose loss compares the texts of a batch.

A batch of the trainer has a tensor of tokens for each column. It becomes one row for each text, a sample's texts one
after the other, and a loss of all vectors: passes of any size give the gradient of the undivided batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.integrations.trainer.rows import MAX_ROWS, NUM_COLLATED, Rows
from vramfit.integrations.trainer.sentence_losses import (
    PACKAGE,
    Refused,
    TextLoss,
    encoder_in,
    giving_vectors,
    is_sentence_model,
    read_head,
    read_loss,
    sentence_losses,
)
from vramfit.step.plain import Batch
from vramfit.step.recovery import RandomState
from vramfit.tasks.parts.contrastive import check_contrast
from vramfit.tasks.parts.joint import PLACES, loss_of_texts, width_of
from vramfit.tasks.parts.losses import HeadLoss, taken_by
from vramfit.tasks.parts.pooling import EmbeddingHead

TOKENS = ("input_ids", "attention_mask", "token_type_ids")
"""Tensors of a column that an encoder is given."""
AT_ONCE = 64
"""Rows that are tokenized at once when lengths are counted."""
Features = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSteps:
    """How the steps of a trainer compare texts."""

    loss: TextLoss
    compared: int
    """Samples that are compared with each other: a batch of the script's. A step is the mean over its batches."""

    def read(self, trainer: Any, inputs: Any, head: EmbeddingHead) -> tuple[Batch, HeadLoss]:
        """The rows of a batch of the trainer, and their loss."""
        features, labels = trainer.collect_features(dict(inputs))
        encoder = encoder_in(trainer.model)
        batch = rows_of_texts(features, encoder)
        scores = {} if labels is None or not self.loss.is_scored else {"labels": self._scores(labels)}
        return batch, self._loss(loss_of_texts(head, encoder, batch | scores))

    def _scores(self, labels: torch.Tensor) -> torch.Tensor:
        """A row for each text, which repeats that of its sample."""
        how, scores = self.loss.contrast, labels.float()
        if how.loss == "margin-mse" and scores.dim() > 1 and scores.shape[1] == how.num_texts - 1:
            scores = scores[:, :1] - scores[:, 1:]  # of the positive and of each negative, not the margins
        if scores.dim() > 1 and scores.shape[1] == 1:
            scores = scores[:, 0]
        return scores.repeat_interleave(how.num_texts, 0)

    def _loss(self, whole: HeadLoss) -> HeadLoss:
        """The loss of a step: of all texts, or the mean over batches that the script compares each by itself."""
        joint = whole.joint
        assert joint is not None
        of_vectors = joint.of_vectors if self.loss.own is None else self._own
        num_rows = self.compared * self.loss.contrast.num_texts
        if joint.num_texts <= num_rows:
            return replace(whole, joint=replace(joint, of_vectors=of_vectors))

        def by_batch(vectors: torch.Tensor, labels: Batch) -> torch.Tensor:
            parts = [slice(begin, begin + num_rows) for begin in range(0, len(vectors), num_rows)]
            losses = [of_vectors(vectors[part], {name: v[part] for name, v in labels.items()}) for part in parts]
            return torch.stack(losses).mean()

        return replace(whole, joint=replace(joint, of_vectors=by_batch))

    def _own(self, vectors: torch.Tensor, labels: Batch) -> torch.Tensor:
        """By the loss's own function."""
        how, own = self.loss.contrast, self.loss.own
        assert own is not None
        texts = vectors.reshape(-1, how.num_texts, vectors.shape[-1])
        scores = labels["labels"][:: how.num_texts] if labels else None
        cut = [F.normalize(texts[..., :dim], dim=-1) for dim in how.dims] or [texts]
        return torch.stack([own(list(one.unbind(1)), scores) for one in cut]).sum()


def read_texts(trainer: Any) -> tuple[TextSteps | None, list[str]]:
    """How a trainer compares texts; or why its steps cannot be kept right, everything by name.

    Args:
        trainer: of sentence-transformers.
    """
    problems = list(_obstacles(trainer))
    head = read_head(trainer.model) if is_sentence_model(trainer.model) else None
    if isinstance(head, str):
        problems.append(f"{type(trainer.model).__name__}: {head}")
    losses = sentence_losses(trainer)
    if len(losses) > 1 or "" not in losses:
        names = ", ".join(type(loss).__name__ for loss in losses.values())
        return None, [*problems, f"a loss for each dataset ({names}): one loss is fitted at a time"]
    if problems or not isinstance(head, EmbeddingHead):
        return None, problems
    features, labels = _few(trainer, trainer.train_dataset, range(min(2, len(trainer.train_dataset))))
    name = type(losses[""]).__name__
    try:
        loss = read_loss(losses[""], num_texts=len(features), normalizes=head.normalizes)
    except Refused as reason:
        return None, [f"{name} {reason}"]
    steps = TextSteps(loss=loss, compared=trainer.args.train_batch_size)
    width = width_of(head, encoder_in(trainer.model))
    given = 0 if labels is None else steps._scores(labels).shape[1:].numel()
    problems += [f"{name}: {problem}" for problem in check_contrast(loss.contrast, num_given=given, width=width)]
    if loss.contrast.loss == "triplet" and len(features) != 3:
        problems.append(f"{name} takes an anchor, a positive and a negative, and a sample has {len(features)} texts")
    return steps, problems


def _obstacles(trainer: Any) -> Iterator[str]:
    """What stands in the way whatever the loss is."""
    model, args, dataset = trainer.model, trainer.args, trainer.train_dataset
    if not is_sentence_model(model):
        yield f"{type(model).__name__} of sentence-transformers: its memory is not predicted"
        return
    if "compute_loss" in vars(trainer) or not type(trainer).compute_loss.__module__.startswith(PACKAGE):
        yield f"{type(trainer).__name__} has a compute_loss of its own, which would not be asked"
    if isinstance(dataset, dict):
        yield f"several datasets ({', '.join(map(str, dataset))}): give one, whose samples all have the same columns"
    elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        yield "the train_dataset has no length, so that nobody can tell how long its texts are: give a Dataset"
    if getattr(model.tokenizer, "padding_side", "right") != "right":
        yield "texts are padded on the left, and a step reads them from the left: set padding_side to right"
    skips_prompts = any(not getattr(part, "include_prompt", True) for part in model.children())
    if skips_prompts and getattr(args, "prompts", None):
        yield "pooling leaves prompts out (include_prompt=False), which a step does not"
    own = trainer.accelerator.unwrap_model(model)
    for loss in sentence_losses(trainer).values():
        if any(is_sentence_model(one) and one is not own for one in loss.modules()):
            yield f"{type(loss).__name__} has another model than the trainer's in it, whose memory is not predicted"
    sampler = str(getattr(args, "batch_sampler", "batch_sampler")).rpartition(".")[2].lower()
    if args.gradient_accumulation_steps > 1 and sampler != "batch_sampler":
        yield (
            f"gradient_accumulation_steps {args.gradient_accumulation_steps} with batch_sampler {sampler}: it would "
            f"draw other batches for a step as a whole; set per_device_train_batch_size to "
            f"{args.train_batch_size * args.gradient_accumulation_steps} and gradient_accumulation_steps to 1, which "
            "compares the whole step and takes no more memory once it is fitted"
        )


@contextmanager
def comparing(trainer: Any, head: EmbeddingHead | None) -> Iterator[None]:
    """Inside, the encoder of a trainer gives vectors of texts; nothing is changed without a head."""
    if head is None:
        yield
        return
    with giving_vectors(encoder_in(trainer.model), head):
        yield


def make_head(trainer: Any, steps: TextSteps) -> EmbeddingHead:
    """What makes vectors of the encoder's outputs; its modules are those of the trainer's model."""
    head = read_head(trainer.model)
    assert isinstance(head, EmbeddingHead)
    head.contrast = steps.loss.contrast
    return head


def rows_of_texts(features: Features, encoder: Any) -> Batch:
    """A row for each text: those of the first sample, in the order of the columns, then those of the second.

    Raises:
        WorkloadError: columns hold something else than padded tokens.
    """
    odd = {name for column in features for name, value in column.items() if isinstance(value, torch.Tensor)}
    odd -= set(TOKENS)
    if odd or not all(isinstance(column.get("input_ids"), torch.Tensor) for column in features):
        named = ", ".join(sorted(odd)) or "no input_ids"
        raise WorkloadError(
            [f"the data collator gives {named}: a step takes {', '.join(TOKENS)} of each column"],
            hint="texts alone are fitted, padded, without flash attention's flattened inputs",
        )
    width = max(int(column["input_ids"].shape[1]) for column in features)
    padding = {"input_ids": getattr(encoder.config, "pad_token_id", None) or 0}
    batch = {
        name: torch.stack(
            [
                F.pad(column[name], (0, width - column[name].shape[1]), value=padding.get(name, 0))
                for column in features
            ],
            1,
        ).flatten(0, 1)
        for name in TOKENS
        if all(name in column for column in features)
    }
    batch = taken_by(encoder, batch)
    return batch | {PLACES: torch.arange(len(batch["input_ids"]), device=batch["input_ids"].device)}


def _few(trainer: Any, dataset: Any, places: Any) -> tuple[Features, torch.Tensor | None]:
    """Some rows of a dataset as the trainer's collator gives them."""
    start = RandomState.now()
    try:
        batch = trainer.data_collator([dataset[place] for place in places])
    finally:
        start.restore()
    batch.pop("dataset_name", None)
    features, labels = trainer.collect_features(batch)
    return features, labels


def rows_of_dataset(trainer: Any, dataset: Any) -> Rows:
    """What a dataset looks like to the encoder: texts have lengths of their own."""
    if dataset is None or isinstance(dataset, dict) or not hasattr(dataset, "__len__") or not len(dataset):
        return Rows(num_samples=None, lengths=(), complete=False, batch={})
    step = max(1, -(-len(dataset) // MAX_ROWS))
    places = range(0, len(dataset), step)
    by_sample: list[tuple[int, ...]] = []
    for begin in range(0, len(places), AT_ONCE):
        features, _ = _few(trainer, dataset, places[begin : begin + AT_ONCE])
        by_sample += zip(*(_lengths(column) for column in features), strict=True)
    longest = max(range(len(by_sample)), key=lambda i: max(by_sample[i]))
    features, _ = _few(trainer, dataset, [places[longest], *places[:NUM_COLLATED]])
    return Rows(
        num_samples=len(dataset),
        lengths=tuple(n for sample in by_sample for n in sample),
        complete=step == 1,
        batch=rows_of_texts(features, encoder_in(trainer.model)),
    )


def _lengths(column: dict[str, Any]) -> list[int]:
    ids, mask = column["input_ids"], column.get("attention_mask")
    counts = mask.sum(1).tolist() if mask is not None else [ids.shape[1]] * len(ids)
    return [max(int(n), 1) for n in counts]
