"""Quantization: weights of linear layers in fewer bits, through torchao; embeddings, norms and the head stay."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from vramfit.errors import MissingExtra, WorkloadError
from vramfit.models.anatomy import backbone, layer_list
from vramfit.quiet import quiet
from vramfit.settings.quantize import LEARNED_THROUGH
from vramfit.techniques import nf4
from vramfit.workload import Workload

OLDEST_TORCHAO = (0, 18)
"""The first whose int8 weights are one tensor class with a scale for each group."""
PIECE_BYTES = 8 * 2**20
"""Rows quantized at once on a GPU, counted in fp32; there are two copies of them for a moment."""
INT8_GROUPS = (64, 32)
"""Weights that share one scale in int8, where they divide a row; else a row does. One scale a row is thrown off by
single large weights: sentence vectors of all-MiniLM-L6-v2 fall to a cosine of 0.995, and with 64 stay above 0.999."""
INT4_GROUP = 128
"""Weights that share one scale in int4; torchao's own default."""
POOLER = "pooler"
"""What transformers calls it in every family; Nomic's model registers it before its layers."""
INT4_CAPABILITY = (8, 0)
"""torch's int4 product (`_weight_int4pack_mm`) is built for sm_80 and newer, in bfloat16."""


def check(w: Workload, device: torch.device) -> None:
    """Refuse what the device or the precision cannot do, and a missing torchao.

    Raises:
        MissingExtra: torchao is not installed.
        WorkloadError: int4 outside a GPU of sm_80 or newer, or beside another type than bf16.
    """
    if not w.is_quantized:
        return
    _torchao()
    if w.quantize != "int4":
        return
    problems = []
    if device.type != "cuda":
        problems.append(f"quantize int4 needs an NVIDIA GPU of sm_80 or newer, not {device.type}")
    elif torch.cuda.get_device_capability(device) < INT4_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        problems.append(f"quantize int4 needs a GPU of sm_80 or newer; this one is sm_{major}{minor}")
    if not w.has_bf16_weights:
        problems.append(f"quantize int4 multiplies in bfloat16: take precision bf16, not {w.precision}")
    if problems:
        raise WorkloadError(problems, hint="quantize int8 and nf4 work everywhere, in every precision")


def apply(model: torch.nn.Module, quantize: str | None, *, trains: bool = False) -> None:
    """Quantize linear layers in place, on the meta device or on a real one.

    The weights' type must be the one they are to be used in, and what learns must be settled: precision, freezing
    and LoRA come first.

    Args:
        trains: leave out layers that learn, and let gradients pass through the others (`FrozenLinear`).

    Raises:
        MissingExtra: torchao is not installed.
        WorkloadError: training through a form that has no gradient.
    """
    if quantize is None:
        return
    if trains and quantize not in LEARNED_THROUGH:
        raise WorkloadError([f"quantize {quantize} has no gradient: take {' or '.join(LEARNED_THROUGH)} to train"])
    chosen = quantizable(model, quantize, frozen_only=trains)
    if not chosen:
        raise WorkloadError(
            [f"quantize {quantize}: {type(model).__name__} has no linear layer that it could take"],
            hint="leave quantize out; the layers of GPT-2 and its kin are transposed (Conv1D), and stay as they are",
        )
    for linear in chosen:
        quantize_linear(linear, quantize)
        if trains:
            linear.__class__ = FrozenLinear


def _form(asked: Workload | str | None) -> str:
    """The form of quantized weights that a workload asks for, or the one of this name; empty for none."""
    return (asked.quantize if isinstance(asked, Workload) else asked) or ""


def quantizable(
    model: torch.nn.Module, asked: Workload | str | None, *, frozen_only: bool = False
) -> list[torch.nn.Linear]:
    """The linear layers to quantize for a workload or a form, in the order of the modules; none for None.

    Left out: what comes after the encoder (the pooler and the head), since a checkpoint often lacks it and what is
    new must learn; weights that a lookup table shares; and sizes that the integer kernels do not take (torchao would
    compute those on the host). With `frozen_only`, layers that learn too.
    """
    quantize = _form(asked)
    if not quantize:
        return []
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    linears = (m for m in _encoder_modules(model) if isinstance(m, torch.nn.Linear))
    columns = INT4_GROUP if quantize == "int4" else 8
    return [
        m
        for m in linears
        if id(m.weight) not in tables
        and m.out_features % 8 == 0
        and m.in_features % columns == 0
        and not (frozen_only and any(p.requires_grad for p in m.parameters()))
    ]


def _encoder_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of the backbone up to its layers; all of them where there is no list of layers to go by."""
    layers = layer_list(model)
    if layers is None:
        yield from model.modules()
        return
    for name, child in backbone(model).named_children():
        inside = list(child.modules())
        if name != POOLER:
            yield from inside
        if any(module is layers for module in inside):
            return


def quantized_model_bytes(model: torch.nn.Module, quantize: str) -> int:
    """Bytes of all parameters of a model on the meta device, tied ones once, after it has been quantized in place.

    Raises:
        MissingExtra: torchao is not installed.
    """
    for linear in quantizable(model, quantize):
        quantize_linear(linear, quantize)
    parts = (part for parameter in model.parameters() for _, part in inner_tensors(parameter))
    return sum(part.numel() * part.element_size() for part in parts)


def quantize_linear(linear: torch.nn.Linear, quantize: str) -> None:
    """Quantize one layer's weight in place, where it lies."""
    linear.weight = quantize_weight(linear.weight, quantize)
    give_product(linear, quantize)


def give_product(linear: torch.nn.Linear, asked: Workload | str) -> None:
    """The product for weights of a form: torchao's own, but for nf4, where that takes several times the weight."""
    if _form(asked) == "nf4":
        linear.__class__ = FrozenLinear


def quantize_weight(weight: torch.Tensor, asked: Workload | str) -> torch.nn.Parameter:
    """A matrix in fewer bits, on the device it lies on."""
    quantize = _form(asked)
    if weight.device.type != "meta":
        return _quantized(weight, quantize)
    layout = _layout(*weight.shape, weight.dtype, quantize)
    return with_inner_tensors(layout, {name: torch.empty_like(part) for name, part in inner_tensors(layout)})


def _quantized(weight: torch.Tensor, quantize: str) -> torch.nn.Parameter:
    ao = _torchao()
    rows, columns = weight.shape
    if quantize == "nf4":
        made = nf4.layout(rows, columns, weight.dtype)
        if weight.device.type == "meta":
            return torch.nn.Parameter(made, requires_grad=False)
        parts = {name: torch.empty_like(part, device=weight.device) for name, part in inner_tensors(made)}
        nf4.fill(parts, [weight])
        return with_inner_tensors(made, parts)
    holder = torch.nn.Linear(columns, rows, bias=False, device="meta")
    holder.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    with _any_gpu() if weight.device.type == "meta" else nullcontext():
        ao.quantize_(holder, _config(ao, quantize, columns))
    # torchao hangs a bound method on the module: a cycle that would keep its weight until the next collection
    holder.__dict__.pop("extra_repr", None)
    return holder.weight


def quantize_rows(
    source: torch.Tensor,
    asked: Workload | str,
    dtype: torch.dtype,
    device: torch.device,
    bring: Callable[[torch.Tensor], torch.Tensor],
) -> torch.nn.Parameter:
    """A host matrix quantized on a device, some rows at a time: it is never there as a whole.

    No two rows share a scale, so the result is that of the whole matrix; int4 packs rows together and is quantized
    at once. What is needed only for a moment comes out of another stream's memory, so that what stays lies as if
    nothing else had been there.

    Args:
        source: the matrix on the host.
        asked: the workload, or the form.
        dtype: the type to quantize from.
        device: where the result is to lie.
        bring: gives rows in `dtype` on the device.
    """
    quantize = _form(asked)
    if device.type != "cuda":
        return quantize_weight(bring(source), quantize)
    rows, columns = source.shape
    layout = _layout(rows, columns, dtype, quantize)
    parts = {name: torch.empty_like(part, device=device) for name, part in inner_tensors(layout)}
    with _apart(device):
        step = max(1, PIECE_BYTES // (4 * columns))
        if quantize == "int4":
            for name, part in inner_tensors(quantize_weight(bring(source), quantize)):
                parts[name].copy_(part)
        elif quantize == "nf4":
            step = -(-step // nf4.ROWS) * nf4.ROWS
            nf4.fill(parts, (bring(source[begin : begin + step]) for begin in range(0, rows, step)))
        else:
            for begin in range(0, rows, step):
                chosen = {name: part[begin : begin + step] for name, part in parts.items()}
                fill_int8(bring(source[begin : begin + step]), chosen)
    return with_inner_tensors(layout, parts)


def fill_int8(weight: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
    """Write the int8 form of some rows where it is to lie.

    What `Int8Tensor.from_hp` computes, with one temporary in place of four and without its wrapping; torchao
    chooses the scales.
    """
    primitives = import_module("torchao.quantization.quant_primitives")
    lowest, highest = -128, 127
    rows, columns = weight.shape
    group = columns // parts["scale"].shape[1]
    scale, zero_point = primitives.choose_qparams_affine(
        weight,
        primitives.MappingType.SYMMETRIC,
        (1, group),
        torch.int8,
        lowest,
        highest,
        eps=torch.finfo(torch.float32).eps,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int8,
        keepdim=True,
    )
    values = weight.view(rows, -1, group) * (1.0 / scale)[..., None]
    parts["qdata"].copy_(values.round_().clamp_(lowest, highest).view(rows, columns))
    parts["scale"].copy_(scale)
    if "zero_point" in parts:
        parts["zero_point"].copy_(zero_point)


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype, quantize: str) -> torch.nn.Parameter:
    """What a matrix of this size becomes, without data."""
    made = _quantized(torch.empty(rows, columns, dtype=dtype, device="meta"), quantize)
    # where a GPU is present torchao may make the scales there; a prediction holds no data
    parts = {name: torch.empty_like(part, device="meta") for name, part in inner_tensors(made)}
    return with_inner_tensors(made, parts)


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """On a stream of its own, whose memory the allocator keeps apart; in order with what comes before and after."""
    stream, current = _side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a quantized one is made of, by name; a plain tensor itself, without a name."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield "", tensor
        return
    for name in flatten()[0]:
        yield name, getattr(tensor, name)


def with_inner_tensors(like: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.nn.Parameter:
    """A parameter like another one, made of other plain tensors."""
    if "" in parts:
        return torch.nn.Parameter(parts[""], requires_grad=like.requires_grad)
    kind: Any = type(like)
    context = like.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    if nf4.is_nf4(like):  # it says for itself where it lies
        place = next(iter(parts.values())).device
        context = {**context, "tensor_meta": replace(context["tensor_meta"], device=place)}
    made = kind.__tensor_unflatten__(parts, context, like.shape, like.stride())
    return torch.nn.Parameter(made, requires_grad=False)


def _config(ao: Any, quantize: str, columns: int) -> Any:
    if quantize == "int8":
        size = next((group for group in INT8_GROUPS if columns % group == 0), None)
        granularity = ao.PerRow() if size is None else ao.PerGroup(size)
        return ao.Int8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
    if quantize == "int8-dynamic":
        return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    return ao.Int4WeightOnlyConfig(
        group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


def _any_gpu() -> AbstractContextManager[Any]:
    """torchao looks at the GPU before it packs int4; on the meta device there is none, and none is needed."""
    return patch.object(torch.cuda, "get_device_capability", lambda *_: INT4_CAPABILITY)


@cache
def _torchao() -> Any:
    """torchao's quantization, imported without its remarks on extensions that this machine has no use for."""
    needed = MissingExtra("quantize", extra="train", package=f"torchao {'.'.join(map(str, OLDEST_TORCHAO))} or newer")
    try:
        with quiet("torchao", "torch.utils._pytree"):
            module, version = import_module("torchao.quantization"), import_module("torchao").__version__
    except ImportError:
        raise needed from None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCHAO:
        raise needed
    return module


class FrozenLinear(torch.nn.Linear):
    """A linear layer whose quantized weight, and bias, do not learn, and which gradients pass through.

    torchao multiplies by the dequantized weight, which autograd keeps until backward: every weight would be there
    twice, quantized and in full, and training would take more than without quantization. Here the weight is dequantized
    for the product and let go of, and once more in backward.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return product


def dequantized(weight: Any) -> torch.Tensor:
    """A weight in full, in the type it was quantized from; of int8, each group of a row times its scale.

    The zero points of int8 are all zero: the weights are quantized symmetrically.
    """
    if nf4.is_nf4(weight):
        return nf4.dequantized(weight)
    rows, num_groups = weight.scale.shape
    full: torch.Tensor = weight.qdata.view(rows, num_groups, -1) * weight.scale.unsqueeze(-1)
    return full.view(weight.qdata.shape).to(weight.dtype)


class _Product(torch.autograd.Function):
    """x·Wᵀ + b; the gradient of x only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
        ctx.weight, ctx.dtype = linear.weight, x.dtype
        return F.linear(x, dequantized(linear.weight), linear.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        weight = dequantized(ctx.weight).to(gradient.dtype)
        return torch.matmul(gradient, weight).to(ctx.dtype), None
