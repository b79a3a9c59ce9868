"""`precision`: the types of weights and products."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from vramfit.settings.setting import BF16_CAPABILITY, Estimate, Module, Setting, Technique, Workload
from vramfit.settings.values import Choice, is_text

if TYPE_CHECKING:
    import torch

NAMES = ("fp32", "tf32", "amp-fp16", "amp-bf16", "fp16", "bf16")


def usual_precision(capability: tuple[int, int], *, infers: bool) -> str:
    """The lower precision that is usual on a GPU: autocast, or weights in 16 bits where nothing is learned."""
    if capability >= BF16_CAPABILITY:
        return "bf16" if infers else "amp-bf16"
    return "fp16" if infers else "amp-fp16"


def lowered(given: Mapping[str, Any], capability: tuple[int, int], *, infers: bool) -> dict[str, str]:
    """Keywords of the usual lower precision; none where a precision is given."""
    return {} if given.get("precision") is not None else {"precision": usual_precision(capability, infers=infers)}


R = TypeVar("R")


def exact_problems(request: Any) -> Iterator[str]:
    """What is wrong with a request of inference that asks for `exact` too."""
    if request.exact and request.precision not in (None, "fp32"):
        yield f"exact is fp32, and precision {request.precision} is asked for too: give one"


def decided(request: R, capability: tuple[int, int] | None) -> R:
    """A request of inference with its precision: the one asked for; else bf16 on a GPU that has it, and fp32.

    Args:
        request: with `precision`, None where nothing was asked for, and `exact`: fp32, whatever the GPU has.
        capability: of the GPU; None where there is none.
    """
    asked: Any = request
    if asked.precision is not None:
        return request
    has_bf16 = capability is not None and capability >= BF16_CAPABILITY and not asked.exact
    made: R = replace(asked, precision="bf16" if has_bf16 else "fp32")
    return made


def named(request: Any) -> str:
    """The precision of a request, by name."""
    return str(request.precision)


def _meant(value: object) -> str | None:
    if is_text(value, "int8", "int8-dynamic", "int4"):
        return f"{value} is a quantization: take --quantize {value}, quantize={value!r}"
    return None


def autocasts(w: Workload) -> bool:
    """Whether autocast casts the inputs of products to 16 bits."""
    return w.precision.startswith("amp")


def is_32_bit(w: Workload) -> bool:
    """Whether products have inputs of 32 bits."""
    return w.precision in ("fp32", "tf32")


def has_tf32(w: Workload) -> bool:
    """Whether products round their inputs to TF32."""
    return w.precision == "tf32"


def has_bf16_weights(w: Workload) -> bool:
    """Whether weights, gradients and optimizer state are in bfloat16."""
    return w.precision == "bf16"


def has_fp32_weights(w: Workload) -> bool:
    """Whether weights are in fp32, whatever products are computed in."""
    return w.precision not in ("fp16", "bf16")


def arithmetic(w: Workload) -> str:
    """The precision but for what GPUs differ in: TF32 or not, bfloat16 or float16 under autocast, take as much."""
    return {"tf32": "fp32", "amp-bf16": "amp", "amp-fp16": "amp"}.get(w.precision, w.precision)


def mixed_precision(w: Workload) -> str:
    """The type that autocast casts to, as transformers and accelerate call it: bf16, fp16 or no."""
    return w.precision.removeprefix("amp-") if w.autocasts else "no"


def weight_dtype(w: Workload) -> "torch.dtype":
    """The type of the weights."""
    import torch

    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(w.precision, torch.float32)


def autocast_dtype(w: Workload) -> "torch.dtype | None":
    """The type that autocast casts to; None where it does not run."""
    import torch

    return {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}.get(w.precision)


def name_of(weights: "torch.dtype", autocast: "torch.dtype | None" = None) -> str:
    """The precision of weights of this type, under autocast to another type or without.

    >>> import torch
    >>> name_of(torch.float32), name_of(torch.bfloat16), name_of(torch.float32, torch.float16)
    ('fp32', 'bf16', 'amp-fp16')
    """
    half = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}
    if autocast is not None:
        return f"amp-{half[str(autocast)]}" if str(autocast) in half else "fp32"
    return half.get(str(weights), "fp32")


def scales_loss(w: Workload) -> bool:
    """Whether the loss is scaled, by a `GradScaler`: the range of fp16 is small."""
    return w.precision == "amp-fp16"


class Precision(Setting):
    keyword, order, applied = "precision", 100, 20
    value = Choice(names=NAMES, meant=_meant)
    default = "fp32"
    label, is_basic = "Precision", True
    help = "Number format. amp-*: autocast over fp32 weights; fp16, bf16: weights in that type; tf32: TF32 matmuls."
    in_answers = is_observed = True
    is_planned = in_inference = at_load = of_weights = True
    less_weight = "bf16"
    is_trainers_own = True
    asked = (
        autocasts,
        is_32_bit,
        has_tf32,
        has_bf16_weights,
        has_fp32_weights,
        arithmetic,
        mixed_precision,
        weight_dtype,
        autocast_dtype,
        scales_loss,
    )
    allows = (("bf16", "weights, gradients and optimizer state in bfloat16: small updates are rounded away"),)
    techniques = (
        Technique(
            values=("tf32",),
            kind="numeric",
            does="products round their inputs to 10 bits; takes no less memory, and less time",
            costs="hardly any: sums stay in fp32",
        ),
        Technique(
            values=("amp-bf16", "amp-fp16"),
            kind="numeric",
            does="activations and products in 16 bits over fp32 weights",
            costs="hardly any: fp16 needs its loss scaled and skips steps that overflow",
        ),
        Technique(
            values=("bf16", "fp16"),
            kind="numeric",
            does="weights, gradients and optimizer state in 16 bits too",
            costs="some in training: small updates are rounded away; little in inference",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.precision == "fp16" and w.trains:
            yield (
                "precision fp16 cannot train: fp16 weights overflow without a GradScaler, and GradScaler "
                "refuses fp16 gradients (take amp-fp16, or bf16)"
            )

    def gpu_problems(self, w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
        if w.precision in ("amp-bf16", "bf16") and capability < BF16_CAPABILITY:
            instead = "amp-fp16" if w.precision == "amp-bf16" or w.trains else "fp16"
            yield f"precision {w.precision}: {gpu} has no bfloat16 and would emulate it, slowly; take {instead}"
        if w.has_tf32 and capability < BF16_CAPABILITY:
            yield f"precision tf32: {gpu} has no TF32; take fp32, or amp-fp16"

    def advised(self, now: Estimate) -> Iterator[dict[str, str]]:
        if now.workload.is_32_bit:
            yield {self.keyword: usual_precision(now.compute_capability, infers=now.workload.mode == "infer")}

    def seen_in_trace(self, w: Workload) -> str:
        return "fp32" if w.has_tf32 else w.precision

    def trainer_arguments(self, w: Workload) -> dict[str, bool | None]:
        in_bf16 = w.mixed_precision == "bf16"
        return {"bf16": in_bf16, "fp16": w.mixed_precision == "fp16", "tf32": w.has_tf32 or in_bf16 or None}

    def apply(self, model: Module, w: Workload) -> None:
        if not w.has_fp32_weights:
            model.to(w.weight_dtype)

    def words(self, w: Workload) -> str:
        return w.precision
