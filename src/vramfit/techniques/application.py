"""One way to prepare a model: everything that a workload asks for, in one order that predictions and runs share."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from vramfit.models.anatomy import backbone
from vramfit.models.build import build_for
from vramfit.models.configuration import supported_attention
from vramfit.models.resolve import ResolvedModel
from vramfit.records.plan import Plan
from vramfit.settings import APPLIED, LIVE, SETTINGS, Setting
from vramfit.settings.precision import name_of
from vramfit.techniques import compiling, offloading, optimizers, quantization
from vramfit.techniques.packing.attention import has_packed_kernel, takes_heads
from vramfit.workload import Workload, settings_of

Undo = Callable[[], None]
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SWITCHES = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
"""Attributes of modules that techniques set, and that are put back."""


NOTED = "_vramfit_applied"
"""Attribute of a model: keywords of settings that were applied to it and can be undone."""


def prepare(
    model: torch.nn.Module, plan: Plan | Workload, device: torch.device | str | None = None, *, compiles: bool = True
) -> torch.nn.Module:
    """Make a model ready to run as planned, in place: its techniques applied, on its device, layers compiled.

    Args:
        model: with its weights, on the host where they are to be quantized or offloaded.
        plan: the settings; a `Workload` serves as well.
        device: where it computes; None leaves it where it is.
        compiles: False leaves layers as they are where the plan has them compiled.

    Returns:
        The same model.

    Raises:
        WorkloadError: a technique that the model does not have.
        MissingExtra: a package that a technique needs.

    >>> import vramfit
    >>> model, _ = vramfit.load("bert-tiny", random_weights=True, device="cpu")
    >>> plan = vramfit.plan("bert-tiny", batch=8, seq=32, memory="256MiB", precision="fp32")
    >>> optimizer = vramfit.make_optimizer(vramfit.prepare(model, plan), plan, lr=2e-5)
    >>> vramfit.Stepper(model, optimizer, plan).micro_batch
    8
    """
    w = settings_of(plan)
    apply(model, w)
    if w.offload == "weights":
        offloading.apply(model, 0, device or next(model.parameters()).device, trains=w.trains)
    elif device is not None:
        if w.has_expandable_segments:
            use_expandable_segments(torch.device(device))
        _move(model, torch.device(device))
    if w.compile and compiles:
        compile_layers(model)
    return model


def settings_found(model: torch.nn.Module, device: torch.device, *, packs: bool | None = None) -> dict[str, str]:
    """What a model that somebody else has made and runs is, as keywords of a workload.

    Args:
        model: of transformers, with its weights.
        device: where it computes.
        packs: whether sequences are to lie end to end; None where the model and the device have what it takes.
    """
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    found = name_of(next(model.parameters()).dtype, autocast)
    base: Any = backbone(model)
    if packs is None:
        can = "packed" in supported_attention(type(base)) and takes_heads(base.config)
        packs = can and has_packed_kernel(device, found)
    own = base.config._attn_implementation
    kernel = "packed" if packs else own if own in ("sdpa", "eager") else "sdpa"
    return {"precision": found, "attention": kernel, "allocator": "expandable"}


def can_fuse(model: torch.nn.Module, workload: Workload, device: torch.device) -> bool:
    """Whether the kernels of fused layers give what a model's own code does on a device; if not, a warning says why.

    Args:
        model: on the meta device.

    Raises:
        WorkloadError: a model whose layers cannot be fused.
    """
    from vramfit.techniques import fusing

    fusing.require(model)
    return fusing.why_not_here(model, device, fusing.Types.of(workload)) is None


def try_out(model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Try the kernels of a packed model on its GPU before its first step, whose memory they would add to.

    Args:
        dtype: of autocast; None where there is none.
    """
    if device.type == "cuda" and dtype is not None:
        from vramfit.techniques import fusing

        fusing.try_out(model, device, dtype)


def make_optimizer(model: torch.nn.Module, plan: Plan | Workload, lr: float = 1e-5) -> torch.optim.Optimizer:
    """The plan's optimizer over the parameters that learn; of a prepared model, which ranks share already, if any do.

    Raises:
        WorkloadError: nothing learns, or no compiler for adamw-8bit on a GPU.
    """
    w = settings_of(plan)
    return optimizers.make(w, model.parameters(), lr=lr)


def apply(model: torch.nn.Module, workload: Workload) -> Undo:
    """Change a model in place, on the meta device or on a real one.

    The order matters: adapters take the type of the weights, freezing says which layers LoRA and quantization may
    have, quantization leaves alone what learns, and casting what is quantized.

    Returns:
        What undoes it in reverse order. Weights that were rounded or quantized, and adapters, stay.

    Raises:
        WorkloadError: a technique that the model does not have.
        MissingExtra: a package that a technique needs.
    """
    put_back = _kept_switches(model)
    for setting in APPLIED:
        if setting.is_applied_for(workload):
            setting.apply(model, workload)
            _note(model, setting)
        elif setting.is_undone:
            _undo_if_applied(model, setting)

    def undo() -> None:
        for setting in reversed(APPLIED):
            setting.undo(model)
        put_back()

    return undo


def build_prepared(resolved: ResolvedModel, workload: Workload) -> torch.nn.Module:
    """A model on the meta device with everything applied that a workload asks for."""
    model = build_for(resolved, workload)
    apply(model, workload)
    return model


def apply_to_steps(model: torch.nn.Module, workload: Workload) -> None:
    """What steps alone need: attention that takes packed batches, layers that cast together or are fused.

    May be called again; what the workload does not ask for is undone.
    """
    for setting in APPLIED:
        if setting.is_of_steps and setting.is_applied_for(workload):
            setting.apply_to_steps(model, workload)
            _note(model, setting)
        elif setting.is_undone:
            _undo_if_applied(model, setting)


def _note(model: torch.nn.Module, setting: Setting) -> None:
    """Remember a change that may have to be undone; the memory goes along with copies of the model."""
    if setting.is_of_steps:
        model.__dict__.setdefault(NOTED, set()).add(setting.keyword)


def _undo_if_applied(model: torch.nn.Module, setting: Setting) -> None:
    if setting.keyword in model.__dict__.get(NOTED, ()):
        setting.undo(model)
        model.__dict__[NOTED].discard(setting.keyword)


def change(model: torch.nn.Module, workload: Workload) -> None:
    """Give a model in a run what another workload asks for, as far as that can change between two steps."""
    for name in LIVE:
        SETTINGS[name].change(model, workload)


def undo_to_steps(model: torch.nn.Module) -> None:
    """The model computes as its own code says, outside of steps."""
    for setting in reversed(APPLIED):
        if setting.is_of_steps:
            _undo_if_applied(model, setting)


def compile_layers(model: torch.nn.Module) -> None:
    """Have the layers compiled when they first run; a warning says why where they cannot be."""
    if compiling.is_applied(model):
        return
    reason = compiling.why_not(next(model.parameters()).device)
    if reason is None:
        compiling.apply(model)
    else:
        warnings.warn(f"the plan's compile is left out: {reason}", stacklevel=3)


def use_expandable_segments(device: torch.device) -> bool:
    """Let segments made from now on grow in place; not where the user has set the allocator up. Says whether it did."""
    if device.type != "cuda" or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch moves it elsewhere; a user can do nothing about that
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return True


def _kept_switches(model: torch.nn.Module) -> Undo:
    """What puts back which parameters learn, and whether modules train and are checkpointed."""
    modules = [(m, {name: vars(m)[name] for name in SWITCHES if name in vars(m)}) for m in model.modules()]
    learning = [(p, p.requires_grad) for p in model.parameters()]
    had_hooks = bool(getattr(model, "_require_grads_hooks", None))

    def put_back() -> None:
        unhook = getattr(model, "disable_input_require_grads", None)
        if unhook is not None and not had_hooks:  # transformers' own, for checkpointed layers
            unhook()
        for parameter, learns in learning:
            parameter.requires_grad_(learns)
        for module, values in modules:
            for name in SWITCHES:
                vars(module).pop(name, None)
            vars(module).update(values)

    return put_back


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Bring a model to a device tensor by tensor, quantized ones part by part; shared ones stay shared."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.device == device:
                continue
            if id(parameter) not in moved:
                parts = {part: inner.detach().to(device) for part, inner in quantization.inner_tensors(parameter)}
                moved[id(parameter)] = quantization.with_inner_tensors(parameter, parts)
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
