"""`ModelCard`: one model the way a person checks it: sizes, parameters by part, bytes in each precision."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from vramfit.models.anatomy import (
    backbone,
    embeddings,
    encoder_layers,
    head_parameters,
    layer_list,
    max_positions,
    num_layer_applications,
    vocab_size,
)
from vramfit.models.build import build_meta
from vramfit.models.resolve import ResolvedModel
from vramfit.models.tasks import default_attention, supported_attention, supported_tasks

if TYPE_CHECKING:
    from torch import nn

_INTERMEDIATE = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff")
_ACTIVATION = ("hidden_act", "hidden_activation", "activation", "activation_function")


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
