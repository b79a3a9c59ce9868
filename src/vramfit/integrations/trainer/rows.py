"""The samples of a Trainer: how long they are, how the collator lays them out, and whether a batch may be packed.

Steps are packed where padded passes would give the very same; a batch is looked at on the host, before any of it is
sent to the device. The loss of a Trainer is found here too: whose it is, and the sum it stands for.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from vramfit.errors import WorkloadError
from vramfit.integrations.trainer.sentence_losses import encoder_in
from vramfit.models.tasks import supported_attention, task_of_class
from vramfit.runtime.model_state import untouched
from vramfit.step.own_loss import still
from vramfit.step.plain import Batch
from vramfit.step.recovery import RandomState
from vramfit.tasks import find_task, task_names
from vramfit.tasks.base import IGNORED, PER_TOKEN
from vramfit.tasks.parts.losses import LABELS, PLACES, head_loss, loss_of, model_inputs
from vramfit.techniques.casting import CastLinear
from vramfit.techniques.packing import is_per_token, positions_skip
from vramfit.techniques.packing.attention import takes_heads

Origin = Literal["head", "smoother", "function", "texts", "own"]
MAX_DIFFERENCE = 1e-3
"""Of a head's loss against the mean that vramfit takes; half precision stays below."""

LossPair = tuple[Callable[[Any, Batch], torch.Tensor], Callable[[Batch], int]]


def bare_model(trainer: Any) -> Any:
    """The model of transformers, beneath what accelerate, peft or sentence-transformers put around it."""
    model = encoder_in(trainer.accelerator.unwrap_model(trainer.model))
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def step_model(trainer: Any) -> Any:
    """The model that the passes of a step go through: the encoder, where sentence-transformers has more around it."""
    return encoder_in(trainer.model)


def task_of(trainer: Any) -> str | None:
    """The task of the model's head; None for a head that transformers does not list."""
    from transformers import PreTrainedModel

    model = bare_model(trainer)
    if not isinstance(model, PreTrainedModel):
        return None
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    for kind in kinds:
        task = task_of_class(kind, model.config, preferred="")
        if task in task_names() and find_task(task).has_head:
            return task
    return None


def is_overridden(trainer: Any, method: str) -> bool:
    """Whether a subclass, or the script itself, put something in the place of a method of Trainer."""
    from transformers import Trainer

    return method in vars(trainer) or getattr(type(trainer), method) is not getattr(Trainer, method)


def origin_of(trainer: Any) -> Origin:
    """Where the loss comes from."""
    if is_overridden(trainer, "compute_loss"):
        return "own"
    if trainer.compute_loss_func is not None:
        return "function"
    if trainer.label_smoother is not None:
        return "smoother"
    return "head" if task_of(trainer) is not None else "own"


def loss_pair(trainer: Any) -> LossPair | None:
    """The sum and the count of a Trainer's loss; None where the labels of the batch say all."""
    function, smoother = trainer.compute_loss_func, trainer.label_smoother
    if function is not None:
        return lambda output, batch: function(output, batch.get("labels"), num_items_in_batch=1), _num_labelled
    if smoother is not None:
        return lambda output, batch: smoother(output, batch["labels"], num_items_in_batch=1), _num_labelled
    return None


def _num_labelled(batch: Batch) -> int:
    """As the Trainer counts."""
    return int((batch["labels"] != IGNORED).sum())


def follows_count(model: Any, batch: Batch) -> bool:
    """Whether a head divides by the `num_items_in_batch` it is given."""
    once, twice = (own_loss(model, batch, num_items_in_batch=torch.tensor(n)) for n in (64, 128))
    return abs(once - twice) > MAX_DIFFERENCE * abs(once)


def own_loss(model: Any, batch: Batch, **keywords: Any) -> float:
    """What the model itself gives as its loss, nothing dropped.

    Raises:
        WorkloadError: it gives none.
    """
    with untouched(model), still(model):
        output = model(**batch, **keywords)
    loss = loss_of(output)
    if loss is None:
        raise WorkloadError(
            [f"{type(model).__name__} gives no loss for samples of {', '.join(batch)}: they have no labels"],
            hint="give every sample `labels`, or start_positions and end_positions",
        )
    return float(loss)


def summed_loss(model: Any, batch: Batch) -> float:
    """The mean that vramfit makes of the same batch out of sums and counts."""
    loss = head_loss(model, batch)
    with untouched(model), still(model):
        sums = loss.sums(model(**model_inputs(batch)), batch)
    return sum(float(s) / n for s, n in zip(sums, loss.counts(batch), strict=True) if n)


MAX_ROWS = 20_000
"""Rows that are looked at; beyond them, one as long as the model allows is expected."""
NUM_COLLATED = 8
"""Rows that the collator is tried on, the longest among them."""
UNDERSTOOD = {"input_ids", "attention_mask", "token_type_ids"} | LABELS - PLACES
"""Inputs whose meaning for a token, or for a sample, is known; any other may count on where a token lies."""
MOVES = ("_prepare_inputs", "_prepare_input")
"""Methods of a Trainer that bring batches to the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a dataset looks like to the model."""

    num_samples: int | None
    """None where the dataset does not know."""
    lengths: tuple[int, ...]
    """Tokens of each row that was looked at, those that its mask hides left out; empty where rows do not say."""
    complete: bool
    """Whether every row was looked at."""
    batch: dict[str, torch.Tensor]
    """A few rows, the longest among them, as the collator gives them; empty where there are none to be had."""

    @property
    def width(self) -> int | None:
        """Columns of the collated rows."""
        ids = self.batch.get("input_ids")
        return int(ids.shape[1]) if ids is not None and ids.dim() > 1 else None

    @property
    def share_of_padding(self) -> float:
        """Of the collated rows."""
        mask = self.batch.get("attention_mask")
        return 0.0 if mask is None or not mask.numel() else 1 - float(mask.bool().sum()) / mask.numel()


def rows_of(trainer: Any, dataset: Any) -> Rows:
    """Look at a dataset without using it up: what is drawn at random on the way is drawn again later."""
    start = RandomState.now()
    try:
        return _look(trainer, dataset)
    finally:
        start.restore()


def _look(trainer: Any, dataset: Any) -> Rows:
    if not isinstance(dataset, dict):
        return _look_at_one(trainer, dataset)
    several = [_look_at_one(trainer, one) for one in dataset.values()]
    if not several:
        return _look_at_one(trainer, None)
    largest = max(several, key=lambda rows: rows.num_samples or 0)
    if any(rows.num_samples and not rows.lengths for rows in several):
        return largest
    widest = max(several, key=lambda rows: rows.width or 0)
    lengths = tuple(n for rows in several for n in rows.lengths)
    return replace(largest, lengths=lengths, complete=all(rows.complete for rows in several), batch=widest.batch)


def _look_at_one(trainer: Any, dataset: Any) -> Rows:
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return Rows(num_samples=None, lengths=(), complete=False, batch={})
    count = len(dataset)
    step = max(1, -(-count // MAX_ROWS))
    lengths, places = [], list(range(0, count, step))
    for place in places:
        length = _length(dataset[place])
        if length is None:
            return Rows(num_samples=count, lengths=(), complete=False, batch=_collate(trainer, dataset, places))
        lengths.append(length)
    longest = sorted(range(len(places)), key=lambda i: -lengths[i])[:1]
    chosen = [places[i] for i in longest] + places
    batch = _collate(trainer, dataset, chosen)
    return Rows(num_samples=count, lengths=tuple(lengths), complete=step == 1, batch=batch)


def _length(row: Any) -> int | None:
    """Tokens of a row that count; None where it does not say."""
    get = getattr(row, "get", None)
    ids, mask = (None, None) if get is None else (get("input_ids"), get("attention_mask"))
    if ids is None or not hasattr(ids, "__len__") or isinstance(ids, str):
        return None
    if mask is None or not hasattr(mask, "__len__") or len(mask) != len(ids):
        return max(len(ids), 1)
    return max(int(mask.bool().sum()) if isinstance(mask, torch.Tensor) else int(np.count_nonzero(mask)), 1)


def _collate(trainer: Any, dataset: Any, places: list[int]) -> dict[str, torch.Tensor]:
    """The first few of some rows, as the model would get them."""
    if not places:
        return {}
    rows = [dataset[place] for place in places[:NUM_COLLATED]]
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    made = collate(rows)
    if not isinstance(made, Mapping) and not hasattr(made, "items"):
        return {}
    return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}


def why_not(trainer: Any, task: str, origin: Origin, planned: Any, batch: Batch) -> str | None:
    """Why no step of a Trainer can be packed, in words; None where steps can.

    Args:
        origin: of the loss.
        planned: what is traced: a configuration, or a module that a configuration does not say all of.
        batch: a few samples as the collator gives them.
    """
    model = bare_model(trainer)
    attention = getattr(model.config, "_attn_implementation", None)
    rules = [
        (origin == "own", f"{type(trainer).__name__} computes a loss of its own, out of padded batches"),
        (origin == "function", "a loss function of the script's own is given padded outputs"),
        (
            find_task(task).reads_padding,
            "the softmax over an answer's places runs over padding too, which would be gone",
        ),
        (
            isinstance(planned, torch.nn.Module) and (origin != "texts" or is_changed(model)),
            f"{type(trainer.model).__name__} is not the model that transformers makes of its configuration",
        ),
        (
            "packed" not in supported_attention(type(model)),
            f"of {type(model).__name__}, rows of several sequences are not known to be kept apart",
        ),
        (not takes_heads(model.config), f"the flash kernel does not take the heads of {type(model).__name__}"),
        (attention != "sdpa", f"attention {attention} was chosen for the model"),
        (
            attention == "sdpa" and not isinstance(planned, torch.nn.Module) and is_changed(model),
            f"{type(model).__name__} has other parts than transformers makes of its configuration",
        ),
        (bool(getattr(model.config, "is_decoder", False)), f"{type(model).__name__} is a decoder: it looks back only"),
        (
            bool(getattr(model.config, "chunk_size_feed_forward", 0)),
            "chunk_size_feed_forward cuts rows into pieces of one length",
        ),
        (
            getattr(trainer, "neftune_noise_alpha", None) is not None,
            "neftune_noise_alpha makes noise by the width of a batch",
        ),
        (keeps_moves(trainer), f"{type(trainer).__name__} brings batches to the device in a way of its own"),
    ]
    found = next((text for holds, text in rules if holds), None)
    return found or (why_padded(batch, model, task) if batch else None)


def keeps_moves(trainer: Any) -> bool:
    """Whether a subclass, or accelerate, brings batches to the device by itself: then what it does to them is done."""
    dispatched = bool(getattr(trainer.accelerator, "dispatch_batches", False))
    return dispatched or any(is_overridden(trainer, name) for name in MOVES)


def is_changed(model: Any) -> bool:
    """Whether a part of a model was replaced, or its forward: that may look at rows in ways nobody knows."""
    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    patched = any("forward" in vars(m) and "_original_forward" not in vars(m) for m in model.modules())
    return patched or _parts(model) != _parts(made)


def _parts(model: torch.nn.Module) -> list[tuple[str, type]]:
    return [
        (name, torch.nn.Linear if isinstance(part, CastLinear) else type(part)) for name, part in model.named_modules()
    ]


def why_padded(batch: Batch, model: Any, task: str) -> str | None:
    """Why a batch is not packed, in words; None for one whose packed gradient is that of the padded one."""
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != PER_TOKEN:
        return "it has no input_ids with a row for each sample"
    unknown = sorted(set(batch) - UNDERSTOOD)
    if unknown:
        return f"{', '.join(unknown)} may count on where tokens lie"
    if any(value.device.type != "cpu" for value in batch.values()):
        return "it is on the device already, where looking at it would take a wait"
    odd = [name for name, value in batch.items() if not _is_laid_out(name, value, ids, task)]
    if odd:
        return f"{', '.join(odd)} of shape {tuple(batch[odd[0]].shape)} beside {tuple(ids.shape)} tokens"
    return _in_the_mask(batch, model) or _in_the_tokens(batch, model)


def _is_laid_out(name: str, value: torch.Tensor, ids: torch.Tensor, task: str) -> bool:
    """Whether a tensor has one value a token or one row a sample, whichever its name calls for."""
    if name == "labels" and find_task(task).counts_samples:
        return not is_per_token(name, value, ids.shape[1])
    if name in LABELS - {"labels"}:
        return value.dim() == 1
    return value.shape == ids.shape and not value.is_floating_point()


def _in_the_mask(batch: Batch, model: Any) -> str | None:
    """What a mask says that a row of whole sequences does not."""
    mask, ids = batch.get("attention_mask"), batch["input_ids"]
    if mask is None:
        padding = getattr(model.config, "pad_token_id", None)
        has_padding = padding is not None and bool((ids.numpy() == padding).any())
        return "it has padding and no attention_mask" if has_padding else None
    marks = mask.numpy()
    lengths = np.count_nonzero(marks, axis=1)
    if not lengths.all():
        return "a sample has no token that is attended to"
    if not np.array_equal(marks, np.arange(marks.shape[1]) < lengths[:, None]):
        return "attention_mask is not ones up to a sample's end and zeros behind it"
    return None


def _in_the_tokens(batch: Batch, model: Any) -> str | None:
    """Tokens that are counted, or left out, though the mask says otherwise."""
    ids, mask, labels = batch["input_ids"], batch.get("attention_mask"), batch.get("labels")
    kept = np.ones(ids.shape, bool) if mask is None else mask.numpy() != 0
    skipped = positions_skip(model)
    if skipped is not None and bool((ids.numpy()[kept] == skipped).any()):
        return f"token {skipped}, which takes no position, is attended to"
    judged_by_mask = hasattr(model, "discriminator_predictions")
    if labels is not None and is_per_token("labels", labels, ids.shape[1]) and not judged_by_mask:
        behind = labels.numpy()[~kept]
        if bool((behind != IGNORED).any()):
            return "padding has labels that count"
    return None


def samples_of(inputs: Any) -> Batch:
    """The inputs of a batch, each with a row for every sample.

    Raises:
        WorkloadError: an input that cannot be split, by name.
    """
    batch = dict(inputs) if isinstance(inputs, Mapping) or hasattr(inputs, "items") else {}
    sizes = {name: num_rows(value) for name, value in batch.items() if value is not None}
    num_samples = next((n for n in sizes.values() if n is not None), None)
    wrong = [name for name, n in sizes.items() if n is None or n != num_samples]
    if wrong or num_samples is None:
        named = ", ".join(wrong) or type(inputs).__name__
        raise WorkloadError(
            [f"the data collator gives {named}, which has no row for each of the {num_samples or 0} samples"],
            hint="leave it out of the batch: a step is split by samples",
        )
    return {name: value for name, value in batch.items() if value is not None}


def num_rows(value: Any) -> int | None:
    """Rows of an input; None for what has none."""
    return int(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else None
