"""LoRA: the model is frozen, and two thin matrices beside each chosen linear layer learn, through peft.

Adapters go where the paper and peft put them, on the projections that make queries and values; where a family makes
queries, keys and values in one product, on that one; or on the layers that were asked for. The task's head learns in
full, as with peft's `modules_to_save`, but in place: there is no second, frozen copy of it, and a decoder tied to the
word embedding stays tied, and frozen with it. Adapters are of the type of the weights beside them.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

from vramfit.errors import MissingExtra, WorkloadError
from vramfit.models.anatomy import head_parameters, layer_lists
from vramfit.quiet import quiet
from vramfit.settings.lora import ALL_LINEAR

OLDEST_PEFT = "0.18"
ALPHA = 2
"""Adapters are scaled by this, whatever the rank: peft's `lora_alpha` is as many times the rank."""
QUERIES_AND_VALUES = frozenset(
    [
        *("query", "value"),  # BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA, ALBERT
        *("q_lin", "v_lin"),  # DistilBERT
        *("query_proj", "value_proj"),  # DeBERTa-v2 and v3
        *("q", "v"),  # MPNet
        *("q_proj", "v_proj"),  # Llama and most decoders, and newer encoders
        *("Wq", "Wv"),  # CTRL
    ]
)
FUSED = frozenset(["Wqkv", "in_proj", "qkv", "qkv_proj", "query_key_value", "c_attn"])
"""Queries, keys and values in one product: ModernBERT, the first DeBERTa, GPT-2, GPT-NeoX, Phi-3, and others."""
SHOWN = 8
"""Names of layers that an error lists."""


def apply(model: torch.nn.Module, rank: int | None, asked: Sequence[str] | None = None) -> None:
    """Add adapters in place, on the meta device or on a real one; freeze all else but the head.

    It comes after freezing, so that a layer that was taken out of training is noticed, and before quantization,
    which takes what is frozen.

    Args:
        rank: the adapters' inner size; None changes nothing.
        asked: names of layers, or `all-linear`; None takes the attention projections.

    Raises:
        MissingExtra: peft is not installed.
        WorkloadError: no such layer, one that is frozen, or a rank beyond its size.
    """
    if rank is None:
        return
    chosen = targets(model, asked)
    problems = _unknown(model, asked or ()) or _problems(model, chosen, rank)
    if problems:
        raise WorkloadError(problems)
    parameters = dict(model.named_parameters())
    learned = [parameters[name] for name in head_parameters(model) if parameters[name].requires_grad]
    on_meta = any(p.device.type == "meta" for p in model.parameters())
    peft = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=ALPHA * rank, target_modules=list(chosen))
    with warnings.catch_warnings(), quiet("torchao", "torch.utils._pytree"):
        warnings.simplefilter("ignore")  # of GPT-2's transposed weights, which peft finds by itself
        peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    for name in chosen:  # peft leaves adapters on meta in fp32
        adapted: Any = model.get_submodule(name)
        for adapters in (adapted.lora_A, adapted.lora_B):
            adapters.to(adapted.get_base_layer().weight.dtype)
    for parameter in learned:
        parameter.requires_grad_(True)


def targets(model: torch.nn.Module, asked: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the linear layers that get adapters: in the model's layers, known by their own names or all of them."""
    linears = _linears(model)
    if asked is not None:
        return tuple(linears) if ALL_LINEAR in asked else tuple(n for n in linears if any(_is(n, a) for a in asked))
    for names in (QUERIES_AND_VALUES, FUSED):
        found = tuple(name for name in linears if name.rsplit(".", 1)[-1] in names)
        if found:
            return found
    return ()


def _linears(model: torch.nn.Module) -> list[str]:
    """Names of the linear layers inside the model's layers; those of GPT-2 are `Conv1D`, the same transposed."""
    from transformers.pytorch_utils import Conv1D

    inside = {id(module) for each in layer_lists(model) for module in each.modules()}
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D) and id(m) in inside]


def _is(name: str, asked: str) -> bool:
    return name == asked or name.endswith(f".{asked}")


def _unknown(model: torch.nn.Module, asked: Sequence[str]) -> list[str]:
    """What is wrong with names of layers."""
    linears = _linears(model)
    missing = [one for one in asked if one != ALL_LINEAR and not any(_is(name, one) for name in linears)]
    if not missing:
        return []
    known = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linears))
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    has = f"has {', '.join(known[:SHOWN])}{more}" if known else "has no linear layers"
    return [f"lora_targets {', '.join(missing)}: no linear layer of {type(model).__name__} has that name; it {has}"]


def _problems(model: torch.nn.Module, chosen: tuple[str, ...], rank: int) -> list[str]:
    if not chosen:
        known = ", ".join(sorted(QUERIES_AND_VALUES | FUSED))
        name = type(model).__name__
        return [
            f"lora: the layers of {name} have no attention projection of a known name ({known}); "
            f"take lora_targets {ALL_LINEAR}, or names of its linear layers"
        ]
    linears: list[Any] = [model.get_submodule(name) for name in chosen]
    problems = []
    frozen = [name for name, linear in zip(chosen, linears, strict=True) if not linear.weight.requires_grad]
    if frozen:
        problems.append(
            f"lora {rank} adapts {len(frozen)} of {len(chosen)} projections in layers that freeze takes out of "
            f"training ({frozen[0]}): drop freeze, since LoRA freezes all but its adapters and the head"
        )
    smallest = min(min(linear.weight.shape) for linear in linears)
    if rank > smallest:
        problems.append(f"lora {rank} is beyond the {smallest} rows or columns of a layer that it adapts")
    return problems


@cache
def _peft() -> Any:
    """peft, imported without the remarks of what it imports."""
    try:
        with quiet("torchao", "torch.utils._pytree"):
            return import_module("peft")
    except ImportError:
        raise MissingExtra("lora", extra="train", package=f"peft {OLDEST_PEFT} or newer") from None
