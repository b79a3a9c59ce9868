"""A batch of inputs for any task: the tensors a data loader would put on the device."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from vramfit.techniques import packing
from vramfit.workload import Task

Batch = dict[str, torch.Tensor]
SENTENCE_LABELS = ("next_sentence_label", "sentence_order_label")


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
    model: torch.nn.Module, task: Task, mode: str, mask: str, batch: int, seq: int, device: torch.device | str
) -> Batch:
    """Inputs of one forward pass, in the order they come to the device: ids, mask, labels.

    Args:
        model: whose inputs; families name the second label of pretraining differently.
        task, mode, mask: as in `Workload`; labels are made for training only.
        batch: samples.
        seq: tokens a sequence.
        device: `meta` for a prediction; elsewhere ids are zeros and a padded mask hides half of the rows' tails.
    """
    inputs = {"input_ids": torch.zeros(batch, seq, dtype=torch.long, device=device)}
    if mask != "none":
        inputs["attention_mask"] = torch.ones(batch, seq, dtype=torch.long, device=device)
        if mask == "padded" and seq > 1 and inputs["attention_mask"].device.type != "meta":
            inputs["attention_mask"][batch // 2 :, (seq + 1) // 2 :] = 0
    if mode == "train":
        inputs.update(_labels(model, task, batch, seq, device))
    return inputs


def make_packed_batch(
    model: torch.nn.Module, task: Task, mode: str, num_tokens: int, num_sequences: int, longest: int, device: str
) -> dict[str, Any]:
    """What `techniques.packing.pack` gives, in the same order: a row of tokens, labels, places and ends."""
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, num_tokens, dtype=torch.long, device=device)}
    if mode == "train":
        labels = _labels(model, task, num_sequences, 0, device)
        packed = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
        inputs.update({name: packed if value.dim() > 1 else value for name, value in labels.items()})
    inputs["position_ids"] = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    if packing.has_token_types(model):
        inputs["token_type_ids"] = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    inputs["cu_seq_lens_q"] = torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)
    return inputs | {"max_length_q": longest}


def _labels(model: torch.nn.Module, task: Task, batch: int, seq: int, device: torch.device | str) -> Batch:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.long, device=device)

    if task == "sequence-classification":
        return {"labels": zeros(batch)}
    if task in ("token-classification", "masked-lm"):
        return {"labels": zeros(batch, seq)}
    if task == "question-answering":
        positions = zeros(batch)
        return {"start_positions": positions, "end_positions": positions}
    if task == "pretraining":
        accepted = inspect.signature(model.forward).parameters
        sentence = [name for name in SENTENCE_LABELS if name in accepted]
        return {"labels": zeros(batch, seq)} | {name: zeros(batch) for name in sentence}
    return {}
