"""Compiling: the layers of the encoder as fused kernels, for any number of tokens."""

from typing import Any

import torch

from vramfit.models.anatomy import encoder_layers


def apply(model: torch.nn.Module, *, backend: Any = "inductor") -> None:
    """Compile every layer when it first runs, in place.

    Layers are alike, so that one compilation serves them all; and sizes stay open, so that no batch asks for another.
    What comes before and after the layers is left as it is: it takes little time, and looks at each batch's lengths.

    Args:
        backend: of `torch.compile`.
    """
    for layer in encoder_layers(model):
        layer.compile(dynamic=True, backend=backend)
