"""What a built model is made of: asked of its modules, so that it holds for families we have never seen.

`ModelCard` is one model the way a person checks it: sizes, parameters by part, bytes in each precision.
"""

import copy
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from vramfit.models.build import build_meta
from vramfit.models.configuration import default_attention, encoder_class, supported_attention, supported_tasks
from vramfit.models.resolve import ResolvedModel
from vramfit.quiet import import_modelling

if TYPE_CHECKING:
    from torch import nn

_INTERMEDIATE = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff")
_ACTIVATION = ("hidden_act", "hidden_activation", "activation", "activation_function")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """The facts of one model; a size is None where the model has no such thing."""

    name: str
    """What the model was asked for by."""
    origin: str
    """catalogue, folder, hub, config or module."""
    family: str
    """`model_type` of the configuration; empty for a module without one."""
    task: str
    """The task whose head is counted here."""
    model_class: str
    """The transformers class."""
    num_layers: int
    """Layers a token passes."""
    num_layer_modules: int
    """Layers that have weights of their own: fewer where they are shared (ALBERT)."""
    hidden_size: int | None
    """Width of the residual stream."""
    intermediate_size: int | None
    """Width inside the feed-forward block."""
    num_heads: int | None
    """Attention heads a layer."""
    head_size: int | None
    """Width of one head."""
    max_positions: int | None
    """Longest usable sequence in tokens."""
    vocab_size: int | None
    """Rows of the word embedding."""
    type_vocab_size: int
    """Rows of the token-type embedding; 0 for none."""
    num_labels: int | None
    """Outputs of a classification head."""
    activation: str | None
    """Activation inside the feed-forward block."""
    parts: dict[str, int]
    """Parameters by module path; they add up to `num_parameters`, tied ones with the backbone."""
    num_parameters: int
    """All parameters, tied ones once."""
    num_trainable: int
    """Those that require a gradient."""
    num_head_parameters: int
    """Those outside the backbone."""
    buffer_bytes: int
    """Tensors that are no parameters but live on the GPU all the same."""
    weight_bytes: dict[str, int]
    """Bytes of the parameters in fp32, fp16, bf16; the command line adds int8, in which only layers shrink."""
    tasks: tuple[str, ...]
    """Tasks that transformers has a head for."""
    attention: tuple[str, ...]
    """Attention kernels it can take."""
    default_attention: str
    """The one it takes when nothing is asked."""
    saved_with: str | None
    """transformers version the configuration was written with."""
    installed: str
    """transformers version that built the model here."""


def model_card(resolved: ResolvedModel) -> ModelCard:
    """The card of a model, read off its twin on the meta device.

    Raises:
        CheckpointError: no model can be built from the configuration.

    >>> from vramfit.models.resolve import resolve
    >>> model_card(resolve("bert-base-uncased", task="features")).num_parameters
    109482240
    """
    model = build_meta(resolved)
    parts = parameters_by_part(model)
    head, parameters = set(head_parameters(model)), list(model.parameters())
    return ModelCard(
        name=resolved.name,
        origin=resolved.origin,
        task=resolved.task,
        model_class=resolved.model_class.__name__,
        num_layers=num_layer_applications(model),
        num_layer_modules=len(encoder_layers(model)),
        max_positions=max_positions(model),
        vocab_size=vocab_size(model),
        parts=parts,
        num_parameters=sum(parts.values()),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        num_head_parameters=sum(p.numel() for name, p in model.named_parameters() if name in head),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        weight_bytes=weight_bytes(model),
        attention=supported_attention(resolved.model_class),
        default_attention=default_attention(resolved.model_class),
        tasks=supported_tasks(resolved.config) if resolved.config is not None else (),
        saved_with=resolved.saved_with,
        installed=version("transformers"),
        **_configured(resolved.config),
    )


def _configured(config: Any) -> dict[str, Any]:
    """The fields that only a configuration can tell; standard names where the family maps its own to them."""
    hidden, heads = _first(config, "hidden_size"), _first(config, "num_attention_heads")
    head_size = _first(config, "head_dim") or (hidden // heads if hidden and heads else None)
    return {
        "family": getattr(config, "model_type", ""),
        "hidden_size": hidden,
        "intermediate_size": _first(config, *_INTERMEDIATE),
        "num_heads": heads,
        "head_size": head_size,
        "type_vocab_size": _first(config, "type_vocab_size") or 0,
        "num_labels": _first(config, "num_labels"),
        "activation": next((a for n in _ACTIVATION if isinstance(a := getattr(config, n, None), str)), None),
    }


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def parameters_by_part(model: "nn.Module") -> dict[str, int]:
    """Parameters by module path: embeddings, all layers together, what else the backbone has, the head.

    A weight that is tied to the backbone counts there, wherever the model registers it first.
    """
    base, layers = backbone(model), layer_list(model)
    paths = {id(module): name for name, module in model.named_modules()}
    prefix = paths.get(id(base), "")
    inner = [paths[id(m)] for m in (embeddings(model), layers) if m is not None and id(m) in paths]
    counts: dict[str, int] = {}
    counted: set[int] = set()
    named = [(f"{prefix}.{n}" if prefix else n, p) for n, p in base.named_parameters()]
    for name, parameter in [*named, *model.named_parameters()]:
        if id(parameter) in counted:
            continue
        counted.add(id(parameter))
        part = next((path for path in inner if name.startswith(f"{path}.")), None)
        depth = 1 + (prefix.count(".") + 1 if prefix and name.startswith(f"{prefix}.") else 0)
        key = part or ".".join(name.split(".")[:depth])
        counts[key] = counts.get(key, 0) + parameter.numel()
    return counts


def weight_bytes(model: "nn.Module") -> dict[str, int]:
    """Bytes of the parameters by precision, tied ones once."""
    num_all = sum(p.numel() for p in model.parameters())
    return {"fp32": 4 * num_all, "fp16": 2 * num_all, "bf16": 2 * num_all}
