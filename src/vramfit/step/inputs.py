"""A batch of inputs for any task: the tensors a data loader would put on the device."""

from collections.abc import Callable
from typing import Any

import torch

from vramfit.tasks import find_task
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
        device: `meta` for a prediction; elsewhere ids are zeros and a padded mask hides half of the rows' tails.
    """
    kind = find_task(task)
    inputs = kind.meta_batch(mask, batch, seq, device)
    return inputs | kind.meta_labels(model, batch, seq, device) if mode == "train" else inputs


def make_packed_batch(
    model: torch.nn.Module, task: str, mode: str, num_tokens: int, num_sequences: int, longest: int, device: str
) -> dict[str, Any]:
    """What `techniques.packing.pack` gives, in the same order: a row of tokens, labels, places and ends."""
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, num_tokens, dtype=torch.long, device=device)}
    if mode == "train":
        labels = find_task(task).meta_labels(model, num_sequences, 0, device)
        packed = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
        inputs.update({name: packed if value.dim() > 1 else value for name, value in labels.items()})
    inputs["position_ids"] = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    if packing.has_token_types(model):
        inputs["token_type_ids"] = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    inputs["cu_seq_lens_q"] = torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)
    return inputs | {"max_length_q": longest}
