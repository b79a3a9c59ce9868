"""LoRA: the model is frozen, and two thin matrices beside each chosen attention projection learn, through peft.

Adapters go where the paper and peft put them, on the projections that make queries and values; where a family makes
queries, keys and values in one product, on that one. The task's head learns in full, as with peft's
`modules_to_save`, but in place: there is no second, frozen copy of it, and a decoder tied to the word embedding
stays tied, and frozen with it. Adapters are of the type of the weights beside them.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch

from vramfit.errors import MissingExtra, WorkloadError
from vramfit.models.anatomy import encoder_layers, head_parameters
from vramfit.quiet import quiet

OLDEST_PEFT = "0.18"
ALPHA = 2
"""Adapters are scaled by this, whatever the rank: peft's `lora_alpha` is as many times the rank."""
QUERIES_AND_VALUES = frozenset(
    [
        *("query", "value"),  # BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA, ALBERT
        *("q_lin", "v_lin"),  # DistilBERT
        *("query_proj", "value_proj"),  # DeBERTa-v2 and v3
        *("q", "v"),  # MPNet
        *("q_proj", "v_proj"),  # newer encoders that follow Llama's names
    ]
)
FUSED = frozenset(["Wqkv", "in_proj", "qkv", "qkv_proj", "query_key_value"])
"""Queries, keys and values in one product: ModernBERT, the first DeBERTa, and others."""


def apply(model: torch.nn.Module, rank: int | None) -> None:
    """Add adapters in place, on the meta device or on a real one; freeze all else but the head.

    It comes after freezing, so that a layer that was taken out of training is noticed, and before quantization,
    which takes what is frozen.

    Args:
        rank: the adapters' inner size; None changes nothing.

    Raises:
        MissingExtra: peft is not installed.
        WorkloadError: no attention projection to adapt, one that is frozen, or a rank beyond its size.
    """
    if rank is None:
        return
    chosen = targets(model)
    problems = _problems(model, chosen, rank)
    if problems:
        raise WorkloadError(problems)
    parameters = dict(model.named_parameters())
    learned = [parameters[name] for name in head_parameters(model) if parameters[name].requires_grad]
    on_meta = any(p.device.type == "meta" for p in model.parameters())
    peft = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=ALPHA * rank, target_modules=list(chosen))
    with quiet("torchao", "torch.utils._pytree"):
        peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    for name in chosen:  # peft leaves adapters on meta in fp32
        adapted: Any = model.get_submodule(name)
        for adapters in (adapted.lora_A, adapted.lora_B):
            adapters.to(adapted.get_base_layer().weight.dtype)
    for parameter in learned:
        parameter.requires_grad_(True)


def targets(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the linear layers that get adapters: in the encoder's layers, known by their own names."""
    inside = {id(module) for layer in encoder_layers(model) for module in layer.modules()}
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and id(m) in inside]
    for names in (QUERIES_AND_VALUES, FUSED):
        found = tuple(name for name in linears if name.rsplit(".", 1)[-1] in names)
        if found:
            return found
    return ()


def _problems(model: torch.nn.Module, chosen: tuple[str, ...], rank: int) -> list[str]:
    if not chosen:
        known = ", ".join(sorted(QUERIES_AND_VALUES | FUSED))
        return [f"lora: the layers of {type(model).__name__} have no attention projection of a known name ({known})"]
    linears: list[Any] = [model.get_submodule(name) for name in chosen]
    problems = []
    frozen = [name for name, linear in zip(chosen, linears, strict=True) if not linear.weight.requires_grad]
    if frozen:
        problems.append(
            f"lora {rank} adapts {len(frozen)} of {len(chosen)} projections in layers that freeze takes out of "
            f"training ({frozen[0]}): drop freeze, since LoRA freezes all but its adapters and the head"
        )
    smallest = min(min(linear.in_features, linear.out_features) for linear in linears)
    if rank > smallest:
        problems.append(f"lora {rank} is beyond the {smallest} rows or columns of the projections it adapts")
    return problems


@cache
def _peft() -> Any:
    """peft, imported without the remarks of what it imports."""
    try:
        with quiet("torchao", "torch.utils._pytree"):
            return import_module("peft")
    except ImportError:
        raise MissingExtra("lora", extra="train", package=f"peft {OLDEST_PEFT} or newer") from None
