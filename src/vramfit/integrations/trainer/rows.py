"""The samples of a Trainer: how long they are, how the collator lays them out, and whether a batch may be packed.

Steps are packed where padded passes would give the very same; a batch is looked at on the host, before any of it is
sent to the device. Where a loss compares texts, each of them becomes a row.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.integrations.trainer.models import TOKENS, Origin, bare_model, drawn_again, encoder_in, is_overridden
from vramfit.models.configuration import supported_attention
from vramfit.step.plain import Batch
from vramfit.tasks import find_task
from vramfit.tasks.base import IGNORED, PER_TOKEN
from vramfit.tasks.parts import joint
from vramfit.tasks.parts.losses import LABELS, PLACES, taken_by
from vramfit.techniques.casting import CastLinear
from vramfit.techniques.packing import is_per_token, positions_skip
from vramfit.techniques.packing.attention import takes_heads

MAX_ROWS = 20_000
"""Rows that are looked at; beyond them, one as long as the model allows is expected."""
NUM_COLLATED = 8
"""Rows that the collator is tried on, the longest among them."""
UNDERSTOOD = {*TOKENS} | LABELS - PLACES
"""Inputs whose meaning for a token, or for a sample, is known; any other may count on where a token lies."""
AT_ONCE = 64
"""Rows that are tokenized at once when lengths are counted."""
MOVES = ("_prepare_inputs", "_prepare_input")
"""Methods of a Trainer that bring batches to the device."""
Features = list[dict[str, Any]]


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
    with drawn_again():
        several = [
            _look_at_one(trainer, one) for one in (dataset.values() if isinstance(dataset, dict) else (dataset,))
        ]
    if not several:
        return _look_at_one(trainer, None)
    if len(several) == 1:
        return several[0]
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
    return batch | {joint.PLACES: torch.arange(len(batch["input_ids"]), device=batch["input_ids"].device)}


def collated(trainer: Any, dataset: Any, places: Any) -> tuple[Features, torch.Tensor | None]:
    """Some rows of a dataset as the trainer's collator gives them."""
    with drawn_again():
        batch = trainer.data_collator([dataset[place] for place in places])
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
        features, _ = collated(trainer, dataset, places[begin : begin + AT_ONCE])
        by_sample += zip(*(_lengths(column) for column in features), strict=True)
    longest = max(range(len(by_sample)), key=lambda i: max(by_sample[i]))
    features, _ = collated(trainer, dataset, [places[longest], *places[:NUM_COLLATED]])
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
