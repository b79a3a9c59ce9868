"""Freezing: parameters that do not learn need no gradient, no optimizer state, and often no activations."""

from fnmatch import fnmatchcase

import torch

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import backbone, embeddings, encoder_layers

Freeze = str | int | tuple[str, ...] | None


def apply(model: torch.nn.Module, freeze: Freeze) -> None:
    """Freeze in place.

    Args:
        freeze: `embeddings`; `encoder` (embeddings and all layers); `backbone` (all but the head); a number of
            lowest layers, embeddings included; or a pattern of parameter names. A tuple may mix them, with
            numbers as text.

    Raises:
        WorkloadError: more layers than there are, a pattern that matches nothing, or nothing left to learn.
    """
    if freeze is None:
        return
    for part in freeze if isinstance(freeze, tuple) else (freeze,):
        for parameter in _chosen(model, int(part) if str(part).isdecimal() else part):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError([f"freeze {freeze!r} leaves nothing to learn"])


def _chosen(model: torch.nn.Module, freeze: str | int) -> list[torch.nn.Parameter]:
    """The parameters that one name, number or pattern stands for."""
    if freeze == "backbone":
        return list(backbone(model).parameters())
    if freeze == "embeddings":
        return _embedding_parameters(model)
    if freeze == "encoder" or isinstance(freeze, int):
        layers = encoder_layers(model)
        count = len(layers) if freeze == "encoder" else int(freeze)
        if count > len(layers):
            raise WorkloadError([f"freeze {count}: the model has {len(layers)} layers"])
        return _embedding_parameters(model) + [p for layer in layers[:count] for p in layer.parameters()]
    found = [p for name, p in model.named_parameters() if fnmatchcase(name, freeze)]
    if not found:
        raise WorkloadError([f"freeze {freeze!r} matches no parameter"])
    return found


def _embedding_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    part = embeddings(model)
    if part is None:
        raise WorkloadError([f"freeze: {type(model).__name__} has no embeddings"])
    return list(part.parameters())
