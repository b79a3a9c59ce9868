"""Every kind of layer is tried beside its own code before it is fused: a short random row through both, once a process.

With the model, on the host in fp32, where both have to agree but for the order of sums; and on a GPU in the types that
it computes in, where they have to agree within rounding. What of the two fails stays as it is, and a warning says why.
"""

import copy
import warnings
from typing import Any, NamedTuple

import torch

from vramfit.techniques.fusing.description import Description
from vramfit.techniques.fusing.layer import FusedLayer, compute
from vramfit.techniques.fusing.pieces import PackedRow
from vramfit.techniques.packing.attention import IN_ROWS, register
from vramfit.workload import Workload

LENGTHS = (1, 5, 40, 82)
"""Of the sequences of the row."""
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.006}
"""How far apart, as a share, outputs and gradients may be: of 18 kinds of layers on a CPU, the farthest were 3e-7, 0.01
and 0.0012 apart, by rounding; a wrong sign, gate or mask is far more."""


class Types(NamedTuple):
    """Of a layer's weights and of its products."""

    weights: torch.dtype
    products: torch.dtype

    @classmethod
    def of(cls, workload: Workload) -> "Types":
        """As a workload has them."""
        return cls(workload.weight_dtype, workload.autocast_dtype or workload.weight_dtype)

    @property
    def learn(self) -> bool:
        """Whether layers that have them may learn: with weights in 16 bits, those that do are not fused."""
        return self.weights is torch.float32


_found: dict[Any, str | None] = {}
"""What each kind of layer was found to be, by device and types."""


def why_not(layer: torch.nn.Module, description: Description) -> str | None:
    """Why a layer's own code does something else than its description says; None where it does the same."""
    if next(layer.parameters()).is_meta:
        return None
    return _tried(layer, description, torch.device("cpu"), Types(torch.float32, torch.float32))


def why_no_kernels(layer: torch.nn.Module, description: Description, device: torch.device, types: Types) -> str | None:
    """Why a layer's kernels cannot be run on a GPU; None where they can, and where there are none."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return _tried(layer, description, device, types)


def _tried(layer: torch.nn.Module, description: Description, device: torch.device, types: Types) -> str | None:
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    key = device, types, description.kind
    if key not in _found:
        _found[key] = reason = _try_out(layer, device, types)
        if reason is not None:
            warnings.warn(f"{type(layer).__name__} is not fused: {reason}", stacklevel=5)
    return _found[key]


def _try_out(layer: torch.nn.Module, device: torch.device, types: Types) -> str | None:
    try:
        apart = _apart(layer, device, types)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise  # which says nothing of the layer
        return f"{type(error).__name__}: {error}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None if apart <= ROUNDED[types.products] else f"its answers differ from its own code's by {apart:.1%}"


def _apart(layer: torch.nn.Module, device: torch.device, types: Types) -> float:
    """How far a fused layer's answers are from its own code's.

    Apart from the pass that it may be tried in: hooks on saved tensors are those of a checkpoint, which counts them.
    """
    with torch.inference_mode(False), torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is):
        twin = _twin(layer, device, types.weights)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # for dropout that has no place
            return _difference(_run(twin, types, is_fused=False), _run(twin, types, is_fused=True))


def _as_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _twin(layer: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A layer of the same kind with random weights, in training mode without the dropout that has a place."""
    weights = {id(p): torch.nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device)) for p in layer.parameters()}
    twin = copy.deepcopy(layer, {**weights, id(layer.__dict__.get("forward")): None}).train()
    twin.__dict__.pop("forward", None)
    register()
    for module in twin.modules():
        module._forward_hooks.clear()
        vars(module).update(dict.fromkeys({"p", "attention_dropout"} & vars(module).keys(), 0.0))
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = IN_ROWS
    draw = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.normal_(0, p.shape[1] ** -0.5 if p.dim() > 1 else 0.1, generator=draw)
            if p.dim() == 1 and name.endswith("weight"):
                p.add_(1)
    return twin


def _run(twin: torch.nn.Module, types: Types, *, is_fused: bool) -> list[torch.Tensor]:
    """What a row becomes, less what it was; where the layer learns, the gradients of the row and of all parameters."""
    description = Description(twin)
    read = description.read()
    assert read is not None
    shape, parameters, _ = read
    device = parameters[0].device
    draw = torch.Generator(device).manual_seed(1)
    num_tokens, width = sum(LENGTHS), parameters[0].shape[1]
    hidden, grad = (torch.randn(1, num_tokens, width, generator=draw, device=device).to(types.weights) for _ in "xy")
    angles = torch.randn(1, num_tokens, shape.head_size // 2, generator=draw, device=device).repeat(1, 1, 2)
    turns = tuple(t.to(types.weights) for t in (angles.cos(), angles.sin())) if shape.is_turned else (None, None)
    ends = torch.tensor([sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)], dtype=torch.int32, device=device)
    row = PackedRow(hidden.requires_grad_(types.learn), ends, max(LENGTHS), *turns)
    autocasts = types.weights is not types.products
    with torch.set_grad_enabled(types.learn), torch.autocast(
        device.type, dtype=types.products if autocasts else None, enabled=autocasts, cache_enabled=False
    ):  # fmt: skip
        if not is_fused:
            given = {"cu_seq_lens_q": ends, "max_length_q": row.longest}
            given |= {"position_embeddings": turns} if shape.is_turned else {}
            made = alone = type(twin).forward(twin, hidden, attention_mask=None, **given)
        else:
            with torch.no_grad():
                made = alone = compute(row, shape, types.products, parameters, keeps=False)[0]
            if types.learn:
                made = FusedLayer.apply(*row, shape, types.products, *parameters)  # type: ignore[no-untyped-call]
    changed = (alone - hidden).detach()
    if not types.learn:
        return [changed]
    learned = [p for p in parameters if p is not None]
    to_hidden, *others = torch.autograd.grad(made, [hidden, *learned], grad)
    return [changed, (made - hidden).detach(), to_hidden, torch.cat([t.flatten() for t in others])]


def _difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest, as a share."""
    pairs = [(one.double(), other.double()) for one, other in zip(expected, found, strict=True)]
    return max(float((one - other).norm() / one.norm()) for one, other in pairs)
