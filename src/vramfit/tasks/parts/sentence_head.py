"""What a sentence-transformers folder says of the head: pooling, layers after it, and what is kept beside them.

Plain data, read in `models/sentence_folder.py`; `make_head` makes modules of it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.errors import CheckpointError

if TYPE_CHECKING:
    from vramfit.tasks.parts.pooling import EmbeddingHead

MODES = {"cls": "cls", "max": "max", "mean": "mean", "weightedmean": "weighted-mean", "lasttoken": "last"}
"""Pooling in sentence-transformers → here."""
JOINED = "+"
"""Between the names of poolings whose vectors are joined end to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPart:
    """A module after pooling."""

    kind: str
    """`Dense`, `LayerNorm` or `Normalize`, as sentence-transformers calls it."""
    folder: Path | None = None
    """Where its configuration and its weights lie."""
    in_features: int = 0
    out_features: int = 0
    bias: bool = True
    activation: str = "Identity"
    """A class of `torch.nn`."""

    @property
    def has_weights(self) -> bool:
        """Whether it has a file of weights."""
        return self.kind != "Normalize"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadParts:
    """All modules after the encoder, in order."""

    pooling: str = "mean"
    """One of `POOLINGS`, or several of them with `JOINED` between."""
    layers: tuple[LayerPart, ...] = (LayerPart(kind="Normalize"),)
    includes_prompt: bool = True
    """Whether the tokens of a prompt are pooled too."""
    max_length: int | None = None
    """Tokens at which texts are cut."""
    lowers_case: bool = False
    """Whether texts are lowered before they are tokenized."""
    settings: str = field(default="", repr=False)
    """What config_sentence_transformers.json holds, prompts and similarity: kept, and written back."""


def make_head(parts: HeadParts, hidden_size: int | None) -> "EmbeddingHead":
    """The modules, with weights as torch draws them: none on the meta device.

    Args:
        hidden_size: of the encoder's vectors; None where it is not known.

    Raises:
        CheckpointError: a layer that is not as wide as what goes into it.
    """
    from vramfit.tasks.parts import pooling

    if hidden_size is not None:
        _check_widths(parts, hidden_size)
    layers = parts.layers
    normalizes = bool(layers) and layers[-1].kind == "Normalize"
    inner = layers[:-1] if normalizes else layers
    return pooling.EmbeddingHead(
        parts.pooling, normalizes=normalizes, layers=[pooling.make_layer(layer) for layer in inner], parts=parts
    )


def _check_widths(parts: HeadParts, hidden_size: int) -> None:
    width = hidden_size * len(parts.pooling.split(JOINED))
    for layer in parts.layers:
        if not layer.has_weights:
            continue
        if layer.in_features != width:
            file = str(layer.folder / "config.json") if layer.folder is not None else ""
            raise CheckpointError(
                f"{file}: the {layer.kind} takes vectors of {layer.in_features:,} numbers, and what comes before it "
                f"gives {width:,}",
                file=file,
                hint="use the parts of one model: config.json, modules.json and the folders that it names",
            )
        width = layer.out_features
