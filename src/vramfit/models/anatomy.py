"""What a built model is made of: asked of its modules, so that it holds for families we have never seen."""

import copy
from typing import TYPE_CHECKING, Any

from vramfit.quiet import import_modelling

if TYPE_CHECKING:
    from torch import nn


def backbone(model: "nn.Module") -> "nn.Module":
    """The encoder without its head; the model itself where there is no head to tell apart."""
    import_modelling()
    from transformers import PreTrainedModel

    for module in model.modules():  # the model first; beneath it where it is wrapped
        if isinstance(module, PreTrainedModel):
            found: nn.Module = module.base_model
            return found
    return model


def layer_lists(model: "nn.Module") -> "list[nn.ModuleList]":
    """All lists of layers: an encoder-decoder has two."""
    return _layer_lists(backbone(model))


def layer_list(model: "nn.Module") -> "nn.ModuleList | None":
    """The list of the encoder's layers: the longest list of modules of one class, outermost first."""
    return max(layer_lists(model), key=len, default=None)


def _layer_lists(module: "nn.Module") -> "list[nn.ModuleList]":
    """Lists of like modules, not looking inside those that repeat (there may be experts or heads)."""
    from torch import nn

    found: list[nn.ModuleList] = []
    for child in module.children():
        kinds = {type(item) for item in child} if isinstance(child, nn.ModuleList) else set()
        if isinstance(child, nn.ModuleList) and len(kinds) == 1 and nn.ModuleList not in kinds:
            found.append(child)
            if len(child) > 1:
                continue
        found += _layer_lists(child)
    return found


def encoder_layers(model: "nn.Module") -> "list[nn.Module]":
    """The repeated layers, lowest first, each once.

    ALBERT applies one layer many times: this gives that one; `num_layer_applications` says how often.
    """
    return list(layer_list(model) or ())


def num_layer_applications(model: "nn.Module") -> int:
    """Layers a token passes: more than `encoder_layers` gives where layers are shared."""
    configured = getattr(getattr(backbone(model), "config", None), "num_hidden_layers", None)
    return configured if isinstance(configured, int) else len(encoder_layers(model))


def embeddings(model: "nn.Module") -> "nn.Module | None":
    """The part of the backbone that turns tokens into vectors; None where there is none."""
    base = backbone(model)
    words = _word_embedding(base)
    if words is None:
        return None
    holders = (child for child in base.children() if any(module is words for module in child.modules()))
    return next(holders, words)


def head_parameters(model: "nn.Module") -> tuple[str, ...]:
    """Names of the parameters outside the backbone; a decoder tied to the word embedding is inside."""
    from vramfit.tasks.parts.pooling import head_of

    base = backbone(model)
    inside = {id(parameter) for parameter in base.parameters()}
    pooled = head_of(base)  # it hangs on the encoder itself
    inside -= {id(parameter) for parameter in pooled.parameters()} if pooled is not None else set()
    return tuple(name for name, p in model.named_parameters() if id(p) not in inside)


def vocab_size(model: Any) -> int | None:
    """Rows of the word embedding of a model, or what a configuration says."""
    if hasattr(model, "forward"):
        words = _word_embedding(backbone(model))
        return getattr(words, "num_embeddings", None)
    size = getattr(model, "vocab_size", None)
    return size if isinstance(size, int) else None


def max_positions(model: Any) -> int | None:
    """The longest usable sequence of a model or a configuration; None where nothing limits it.

    RoBERTa and its kin number positions from `padding_idx + 1`, so that 514 rows serve 512 tokens.
    """
    config = getattr(model, "config", None) if hasattr(model, "forward") else model
    configured = getattr(config, "max_position_embeddings", None)
    if not isinstance(configured, int) or configured < 1:  # XLNet says -1: nothing limits it
        return None
    table = _position_embedding(model if hasattr(model, "forward") else _smallest(config), configured)
    offset = getattr(table, "padding_idx", None)
    return configured if offset is None else configured - offset - 1


def _position_embedding(model: "nn.Module | None", rows: int) -> "nn.Module | None":
    """The learned table of positions, if the embeddings have one."""
    part = embeddings(model) if model is not None else None
    named = part.named_modules() if part is not None else ()
    tables = (m for name, m in named if "position" in name and getattr(m, "num_embeddings", None) == rows)
    return next(tables, None)


def _smallest(config: Any) -> "nn.Module | None":
    """The family's bare encoder with one layer, on the meta device: its embeddings are what we ask about."""
    import torch

    from vramfit.models.tasks import encoder_class

    one_layer = copy.deepcopy(config)
    one_layer.num_hidden_layers = 1
    try:
        with torch.device("meta"):
            model: nn.Module = encoder_class(config)(one_layer)  # type: ignore[misc]
    except Exception:  # an unbuildable configuration is build_meta's to report
        return None
    return model


def _word_embedding(base: "nn.Module") -> "nn.Module | None":
    from torch import nn

    ask = getattr(base, "get_input_embeddings", None)
    if ask is not None:
        try:
            found = ask()
        except NotImplementedError:
            found = None
        if isinstance(found, nn.Module):
            return found
    return next((m for m in base.modules() if isinstance(m, nn.Embedding)), None)
