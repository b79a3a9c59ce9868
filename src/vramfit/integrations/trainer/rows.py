"""The samples of a Trainer's datasets: how long they are, and how the collator lays them out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vramfit.integrations.trainer.heads import MAX_DIFFERENCE
from vramfit.runtime.model_state import untouched
from vramfit.runtime.random_state import RandomState
from vramfit.step.own_loss import still
from vramfit.step.plain import each_tensor


@contextmanager
def put_together_once() -> Iterator[None]:
    """Evaluations inside pile up their batches, and give the arrays that they would have given."""
    from transformers import trainer
    from transformers.trainer_pt_utils import EvalLoopContainer

    class Pile(EvalLoopContainer):  # type: ignore[misc]
        """Batches as they came: on the GPU, then on the host."""

        tensors: Any
        arrays: Any

        def add(self, tensors: Any) -> None:
            self.tensors = self.tensors or []
            self.tensors.append(whole(tensors))

        def to_cpu_and_numpy(self) -> None:
            if self.tensors is not None:
                self.arrays = self.arrays or []
                self.arrays += [on_host(batch) for batch in self.tensors]
                self.tensors = None

        def get_arrays(self) -> Any:
            self.to_cpu_and_numpy()
            joins = self.arrays is not None and self.do_nested_concat
            return put_together(self.arrays, self.padding_index) if joins else self.arrays

    before = getattr(trainer, "EvalLoopContainer", None)
    if before is not EvalLoopContainer:  # another version of transformers, or somebody's own
        yield
        return
    trainer.EvalLoopContainer = Pile
    try:
        yield
    finally:
        trainer.EvalLoopContainer = before


def whole(value: Any) -> Any:
    """The same tensors, copied where they are a part of something larger: it need not be kept for them."""
    return _each(value, lambda x: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x)


def on_host(value: Any) -> Any:
    """The same tensors as arrays that keep none of their memory."""
    return _each(value, _array)


def _each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tensor changed, or the tensors of lists, tuples and mappings."""
    kind: Any = type(value)
    if isinstance(value, list | tuple):
        return kind(_each(part, change) for part in value)
    if isinstance(value, Mapping):
        return kind({name: _each(part, change) for name, part in value.items()})
    return change(value)


def _array(tensor: torch.Tensor) -> Any:
    moved = tensor.detach().cpu()
    array = (moved.float() if moved.dtype == torch.bfloat16 else moved).numpy()
    return array.copy() if tensor.device.type == "cpu" else array


def put_together(parts: Sequence[Any], filler: float) -> Any:
    """Arrays, or lists, tuples and mappings of them, one after another; rows of different widths are filled up."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, list | tuple):
        return type(first)(put_together(column, filler) for column in zip(*parts, strict=False))
    if isinstance(first, Mapping):
        kind: Any = type(first)
        return kind({name: put_together([part[name] for part in parts], filler) for name in first})
    arrays = [np.atleast_1d(part) for part in parts]
    if arrays[0].ndim == 1 or len({array.shape[1] for array in arrays}) == 1:
        return np.concatenate(arrays)
    shape = (sum(map(len, arrays)), max(array.shape[1] for array in arrays), *arrays[0].shape[2:])
    made = np.full(shape, filler, dtype=np.result_type(*arrays))
    begin = 0
    for array in arrays:
        made[begin : begin + len(array), : array.shape[1]] = array
        begin += len(array)
    return made


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


MAX_ROWS = 20_000
"""Rows that are looked at; beyond them, one as long as the model allows is expected."""
NUM_COLLATED = 8
"""Rows that the collator is tried on, the longest among them."""


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
