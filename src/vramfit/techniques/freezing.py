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
            lowest layers, embeddings included; or patterns of parameter names.

    Raises:
        WorkloadError: more layers than there are, a pattern that matches nothing, or nothing left to learn.
    """
    if freeze is None:
        return
    for parameter in _chosen(model, freeze):
        parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError([f"freeze {freeze!r} leaves nothing to learn"])


def _chosen(model: torch.nn.Module, freeze: str | int | tuple[str, ...]) -> list[torch.nn.Parameter]:
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
    patterns = (freeze,) if isinstance(freeze, str) else freeze
    return _matching(model, patterns)


def _embedding_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    part = embeddings(model)
    if part is None:
        raise WorkloadError([f"freeze: {type(model).__name__} has no embeddings"])
    return list(part.parameters())


def _matching(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[torch.nn.Parameter]:
    chosen = []
    for pattern in patterns:
        found = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        if not found:
            raise WorkloadError([f"freeze {pattern!r} matches no parameter"])
        chosen += found
    return chosen
