"""A batch of inputs for any task: the tensors a data loader would put on the device."""

import inspect

import torch

from vramfit.workload import Task

Batch = dict[str, torch.Tensor]
SENTENCE_LABELS = ("next_sentence_label", "sentence_order_label")


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
