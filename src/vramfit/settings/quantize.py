"""`quantize`: linear weights that do not learn, in fewer bits."""

from collections.abc import Iterator

from vramfit.settings.precision import NAMES as PRECISIONS
from vramfit.settings.setting import BF16_CAPABILITY, Module, Setting, Technique, Workload, given
from vramfit.settings.values import Choice, is_text

LEARNED_THROUGH = ("int8", "nf4")
"""Forms that gradients pass through."""


def _meant(value: object) -> str | None:
    if is_text(value, *PRECISIONS):
        return f"{value} is a precision: take --precision {value}, precision={value!r}"
    return None


def weights_in_words(w: Workload) -> str:
    """The type of the weights for people, such as "fp32 with int8 linear layers"."""
    return f"{w.precision} with {w.quantize} linear layers" if w.is_quantized else w.precision


class Quantize(Setting):
    keyword, order, applied = "quantize", 190, 50
    value = Choice(names=("int8", "int8-dynamic", "int4", "nf4"), optional=True, meant=_meant)
    label = "Weights in fewer bits"
    labels = (("", "none"),)
    about = "Quantized linear layers take less. In training only those that do not learn can be, with int8 or nf4."
    help = "Quantize linear weights that are not trained; nf4 with --lora is QLoRA."
    is_planned = in_inference = at_load = of_weights = True
    less_weight = "int8"
    not_fitted = "which a Trainer cannot save"
    asked = (
        given("quantize", "is_quantized", "Whether linear weights that do not learn are in fewer bits."),
        weights_in_words,
    )
    allows = (("int8", "frozen weights in 8 bits"), ("nf4", "frozen weights in 4 bits"))
    techniques = (
        Technique(
            values=("int8", "int8-dynamic", "int4", "nf4"),
            kind="numeric",
            does="linear weights that do not learn, in 8 or 4 bits",
            costs="little in int8, more in nf4 and int4: weights are rounded once",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.trains and not w.has_adapters and not w.freezes_layers:
            yield f"quantize {w.quantize} weights cannot learn: freeze 'backbone' or 'encoder', or add lora"
        if w.quantize not in LEARNED_THROUGH and w.trains:
            yield f"quantize {w.quantize} cannot train: no gradient passes its product (take int8, or nf4 for 4 bits)"
        if w.shards:
            yield f"quantize {w.quantize} weights cannot be cut: take parallel ddp"

    def gpu_problems(self, w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
        if w.quantize != "int4":
            return
        if not w.has_bf16_weights:
            yield f"quantize int4 multiplies in bfloat16: take precision bf16, not {w.precision}"
        if capability < BF16_CAPABILITY:
            yield f"quantize int4: {gpu} has no product with int4 weights; take int8"

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.techniques import quantization

        quantization.apply(model, w.quantize, trains=w.trains)
