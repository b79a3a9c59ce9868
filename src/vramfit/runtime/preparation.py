"""A workload made real: what can be run, the model with small random weights, its techniques, its batch, its step."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import max_positions, vocab_size
from vramfit.models.build import build_meta, built_with
from vramfit.models.resolve import ResolvedModel
from vramfit.models.tasks import default_attention
from vramfit.step.inputs import Batch
from vramfit.step.plain import forward_step, train_step
from vramfit.techniques import optimizers, precision
from vramfit.techniques.application import apply
from vramfit.workload import Workload

INITIAL_SCALE = 1024.0
"""GradScaler's own 65536 overflows a random model: its first step is skipped and makes no optimizer state."""
DRAWING = ("kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_uniform_")
"""The functions of `torch.nn.init` that take long on a CPU."""


def check(resolved: ResolvedModel, workload: Workload) -> None:
    """Refuse what cannot be run, before anything is loaded.

    Raises:
        WorkloadError: a technique that the runtime does not have yet, or what the model has not.
    """
    w, longest = workload, max_positions(resolved.config) if resolved.config is not None else None
    asked = {
        "attention packed cannot be measured yet": w.attention == "packed",
        "offload cannot be measured yet": w.offload is not None,
        "compile cannot be measured yet": w.compile,
        "num_gpus above 1 cannot be measured yet": w.num_gpus > 1,
        "loop stepper cannot be measured yet": w.loop != "plain",
        f"seq {w.seq} is beyond the {longest} positions of {resolved.name}: take {longest} or fewer": (
            longest is not None and w.seq > longest
        ),
    }
    problems = [problem for problem, is_asked in asked.items() if is_asked]
    if problems:
        raise WorkloadError(problems)
    build_meta(resolved, attention=w.attention)  # cheap, and says what is wrong with the model


def prepare(resolved: ResolvedModel, workload: Workload) -> torch.nn.Module:
    """The model on the CPU with small random weights and its techniques, in the order a prediction applies them."""
    model = _build(resolved, workload.attention)
    apply(model, workload)
    return model


def _build(resolved: ResolvedModel, attention: str | None) -> torch.nn.Module:
    """`model_class(config)`, without the slow drawing of every weight: memory does not depend on values."""
    if resolved.module is not None:
        return copy.deepcopy(resolved.module)
    from transformers import PreTrainedModel

    config = copy.deepcopy(resolved.config)
    config._attn_implementation = built_with(attention) or default_attention(resolved.model_class)
    undrawn: dict[str, Any] = dict.fromkeys(DRAWING, lambda tensor, *_, **__: tensor)
    skipped = patch.object(PreTrainedModel, "initialize_weights", lambda self: None, create=True)
    with patch.multiple(torch.nn.init, **undrawn), skipped:
        model: torch.nn.Module = resolved.model_class(config)
    _write_weights(model)
    return model


@torch.no_grad()
def _write_weights(model: torch.nn.Module) -> None:
    """Matrices small and random, norms one, biases zero: losses and gradients stay finite."""
    pool = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        flat = parameter.view(-1)
        num_whole = flat.numel() // pool.numel() * pool.numel()
        flat[:num_whole].view(-1, pool.numel()).copy_(pool)
        flat[num_whole:].copy_(pool[: flat.numel() - num_whole])


def write_tokens(batch: Batch, model: torch.nn.Module) -> None:
    """Ids as a tokenizer gives them, special ones left out; in place, so that nothing more is requested."""
    words = vocab_size(model) or 2
    ids = batch["input_ids"]
    generator = torch.Generator().manual_seed(0)
    ids.copy_(torch.randint(min(1000, words // 2), words, ids.shape, generator=generator))


def make_step(model: torch.nn.Module, workload: Workload, batch: Batch) -> Callable[[], None]:
    """The plain step of a workload, ready to be called again and again."""
    w, dtype = workload, precision.autocast_dtype(workload.precision)

    def autocast() -> AbstractContextManager[Any]:
        return nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)

    if not w.trains:
        return lambda: forward_step(model, batch, grad=w.mode == "forward", autocast=autocast)
    optimizer = optimizers.make(w.optimizer, model.parameters())
    scaler = torch.amp.GradScaler("cuda", INITIAL_SCALE) if precision.needs_scaler(w.precision) else None
    batches = [batch] * (w.accumulate or 1)
    return lambda: train_step(
        model, optimizer, batches, autocast=autocast, scaler=scaler, max_grad_norm=w.max_grad_norm
    )
