"""The plain step: what the usual PyTorch loop does, mean loss and all.

`on_part` is called as the step goes from one part to the next (forward, backward, optimizer), with the index
of the micro-batch; a prediction and a run listen to the same calls.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from vramfit.tasks import find_task
from vramfit.tasks.parts.losses import loss_to_learn_from, taken_by
from vramfit.techniques import packing

Batch = dict[str, torch.Tensor]


def each_tensor(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """The batch with its tensors changed; a packed one has numbers too."""
    return {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def bring(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; a GPU takes it while the host goes on.

    Memory that is not pinned would be copied only when everything sent before is done.
    """
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def make_batch(
    model: torch.nn.Module, task: str, mode: str, mask: str, batch: int, seq: int, device: torch.device | str
) -> Batch:
    """Inputs of one forward pass, in the order they come to the device: ids, mask, labels.

    Args:
        model: whose inputs; families name the second label of pretraining differently.
        task, mode, mask: as in `Workload`; labels are made for training only.
        batch: samples.
        seq: tokens a sequence.
        device: `meta` for a prediction; elsewhere a padded mask hides the second half of half of the rows. On the host,
            ids are what a tokenizer gives; on a GPU, zeros.
    """
    kind = find_task(task)
    inputs = kind.meta_batch(mask, batch, seq, device)
    if inputs["input_ids"].device.type == "cpu":
        write_tokens(inputs["input_ids"], inputs.get("attention_mask"), getattr(model, "config", None))
    if mode != "train":
        return inputs
    labels = kind.meta_labels(model, batch, seq, device)
    return inputs | labels | make_targets(model, task, (batch, seq), device)


def write_tokens(ids: torch.Tensor, mask: torch.Tensor | None, config: Any) -> None:
    """Turn ids into what a tokenizer gives for texts: words in place of special tokens, an end, and padding.

    Heads of some families look for the end, or for the last token that is no padding.

    Args:
        ids: of a batch, on the host; zeros become words.
        mask: that goes with them.
        config: of the model; None for a model that has none, whose ids are left as they are.
    """
    special = special_tokens(config)
    word = next(token for token in range(len(special) + 1) if token not in special.values())
    ids[torch.isin(ids, torch.tensor([0, *special.values()]))] = word
    lengths = torch.full((len(ids),), ids.shape[1]) if mask is None else mask.sum(1)
    if "eos_token_id" in special:
        ids[torch.arange(len(ids)), lengths - 1] = special["eos_token_id"]
    if "pad_token_id" in special and mask is not None:
        ids[mask == 0] = special["pad_token_id"]


def special_tokens(config: Any) -> dict[str, int]:
    """The tokens of the vocabulary that a configuration names, by their fields; of several, the first."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    named = {} if config is None else vars(config) | vars(text)
    found: dict[str, int] = {}
    for name, value in named.items():
        value = value[0] if isinstance(value, list) and value else value
        if name.endswith("_token_id") and type(value) is int and 0 <= value < named.get("vocab_size", math.inf):
            found[name] = value
    return found


def make_packed_batch(
    model: torch.nn.Module, task: str, mode: str, num_tokens: int, num_sequences: int, longest: int, device: str
) -> dict[str, Any]:
    """What `techniques.packing.pack` gives, in the same order: a row of tokens, labels, places and ends."""
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, num_tokens, dtype=torch.long, device=device)}
    if mode == "train":
        labels = find_task(task).meta_labels(model, num_sequences, 0, device)
        packed = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
        inputs.update({name: packed if value.dim() > 1 else value for name, value in labels.items()})
        inputs |= make_targets(model, task, (num_sequences, longest), device, num_packed=num_tokens)
    inputs["position_ids"] = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    if packing.has_token_types(model):
        inputs["token_type_ids"] = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    inputs["cu_seq_lens_q"] = torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)
    return inputs | {"max_length_q": longest}


def make_targets(
    model: torch.nn.Module, task: str, sizes: tuple[int, int], device: torch.device | str, *, num_packed: int = 0
) -> Batch:
    """What a batch has beside its labels where a model has a teacher: see `distilled.meta_targets`."""
    if not hasattr(model, "_teaching"):
        return {}
    from vramfit.tasks.parts.distilled import meta_targets

    return meta_targets(model, task, sizes, device, num_packed=num_packed)


OnPart = Callable[[str, int | str], None]
"""Told of the part (forward, backward, optimizer) and of the micro-batch, or the name of what else a step does."""
Autocast = Callable[[], AbstractContextManager[Any]]


class Scaler(Protocol):
    """The part of `torch.amp.GradScaler` that a step uses."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None: ...
    def step(self, optimizer: torch.optim.Optimizer) -> Any: ...
    def update(self) -> None: ...


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    autocast: Autocast = nullcontext,
    scaler: Scaler | None = None,
    max_grad_norm: float | None = None,
    on_part: OnPart = lambda part, index: None,
) -> None:
    """One optimizer step over its micro-batches; the loss of each is divided by their number."""
    for index, batch in enumerate(batches):
        on_part("forward", index)
        with autocast():
            output = model(**taken_by(model, batch))
        loss = loss_to_learn_from(model, output, batch) / len(batches)
        on_part("backward", index)
        (loss if scaler is None else scaler.scale(loss)).backward()
        on_part("forward", index)
        del loss, output
    on_part("optimizer", 0)
    if max_grad_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        learned = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(learned, max_grad_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)


def forward_step(
    model: torch.nn.Module,
    batch: Batch,
    *,
    grad: bool,
    autocast: Autocast = nullcontext,
    on_part: OnPart = lambda part, index: None,
) -> None:
    """One forward pass; with `grad`, everything a backward pass would need is kept until it ends."""
    on_part("forward", 0)
    with torch.set_grad_enabled(grad), autocast():
        output = model(**batch)
    del output
