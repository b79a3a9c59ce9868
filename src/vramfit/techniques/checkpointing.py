"""Checkpointing: a layer keeps only its input and is computed again in backward."""

import logging
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers


def apply(model: Any, checkpointing: str | int | None) -> None:
    """Checkpoint all layers (`full`) or the first k, in place.

    Raises:
        WorkloadError: a model that cannot, or more layers than there are.
    """
    if checkpointing is None:
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise WorkloadError([f"checkpointing: {type(model).__name__} does not support it"])
    logging.getLogger("transformers.utils.generic").addFilter(_is_not_of_caches)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if checkpointing == "full":
        return
    layers: list[torch.nn.Module] = encoder_layers(model)
    if int(checkpointing) > len(layers):
        raise WorkloadError([f"checkpointing {checkpointing}: the model has {len(layers)} layers"])
    for layer in layers[int(checkpointing) :]:
        layer.gradient_checkpointing = False  # type: ignore[assignment]


def _is_not_of_caches(record: logging.LogRecord) -> bool:
    """Drops the warning that checkpointing sets `use_cache` to False: an encoder has no cache."""
    return "use_cache=True` is incompatible" not in record.getMessage()
