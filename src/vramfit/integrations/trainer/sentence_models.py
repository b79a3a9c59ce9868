"""Models of sentence-transformers: the encoder of transformers inside one, and what follows it as an `EmbeddingHead`.

The head has the modules of the SentenceTransformer in it, so what learns is theirs. The encoder gives vectors of texts
inside steps only; an evaluation and a save see the model as sentence-transformers made it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.tasks.parts.pooling import NAME, EmbeddingHead, attach
from vramfit.tasks.parts.sentence_head import MODES

PACKAGE = "sentence_transformers"
LAYERS = ("Dense", "LayerNorm", "Normalize")
VECTOR = "sentence_embedding"
"""What its modules call the vector of a text."""
NAMES_OF_VECTOR = ("module_input_name", "module_output_name")
HIDDEN = ("last_hidden_state", ["last_hidden_state"], ("last_hidden_state",))


class Shared(torch.nn.Module):
    """A module of sentence-transformers that takes a vector of each text and gives another."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.module({VECTOR: vectors})[VECTOR]
        return made


def is_of_package(value: Any) -> bool:
    """Whether an object is of a class of sentence-transformers, or of one derived from such a class."""
    return any(kind.__module__.partition(".")[0] == PACKAGE for kind in type(value).__mro__)


def is_sentence_model(model: Any, kind: str = "SentenceTransformer") -> bool:
    """Whether it is a SentenceTransformer, or a model of another kind; a sparse encoder is none."""
    names = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.partition(".")[0] == PACKAGE]
    return names[:1] == [kind]


def encoder_in(model: Any) -> Any:
    """The encoder of transformers inside a SentenceTransformer; any other model is given back."""
    if not is_sentence_model(model):
        return model
    from transformers import PreTrainedModel

    first = next(iter(model.children()), None)
    found = getattr(first, "model", None) or getattr(first, "auto_model", None)
    return found if isinstance(found, PreTrainedModel) else model


def read_head(model: Any) -> EmbeddingHead | str:
    """What makes vectors of texts out of the encoder's outputs; or why that is not known, in words."""
    if encoder_in(model) is model:
        return f"{type(model).__name__} has no encoder of transformers as its first module"
    first, *others = model.children()
    text = getattr(first, "modality_config", {}).get("text", {})
    if text.get("method", "forward") != "forward" or text.get("method_output_name", HIDDEN[0]) not in HIDDEN:
        return f"{type(first).__name__} pools something else than the encoder's last hidden states"
    if not others or type(others[0]).__name__ != "Pooling":
        return "no Pooling follows the encoder"
    mode = others[0].pooling_mode if hasattr(others[0], "pooling_mode") else others[0].get_pooling_mode_str()
    if mode not in MODES:
        return f"pooling {mode} is none of {', '.join(MODES)}"
    odd = [part for part in others[1:] if not _is_layer(part)]
    if odd:
        return f"the module {type(odd[0]).__name__} after pooling is none of {', '.join(LAYERS)}"
    layers = others[1:]
    normalizes = bool(layers) and type(layers[-1]).__name__ == "Normalize"
    inner = layers[:-1] if normalizes else layers
    return EmbeddingHead(MODES[mode], normalizes=normalizes, layers=[Shared(part) for part in inner])


def _is_layer(part: Any) -> bool:
    """Whether a module takes nothing but the vector of a text, and changes nothing else."""
    names = {getattr(part, name, VECTOR) for name in NAMES_OF_VECTOR}
    return is_of_package(part) and type(part).__name__ in LAYERS and names == {VECTOR}


@contextmanager
def giving_vectors(encoder: Any, head: EmbeddingHead) -> Iterator[None]:
    """Inside, an encoder gives vectors of texts."""
    hook = attach(encoder, head)
    try:
        yield
    finally:
        hook.remove()
        delattr(encoder, NAME)
