"""`fused`: a layer as one function, with kernels of vramfit's own."""

from collections.abc import Iterator, Mapping
from typing import Any

from vramfit.settings.setting import TRITON_CAPABILITY, Module, Setting, Technique, Workload
from vramfit.settings.values import Switch


def is_fused(w: Workload) -> bool:
    """Whether a layer is one function, with kernels of vramfit's own."""
    return bool(w.fused)


class Fused(Setting):
    keyword, order, applied = "fused", 220, 90
    value = Switch()
    default = False
    planned_default = True
    label, modes = "Fused layers", ("train", "infer")
    about = "vramfit’s own kernels; for packed attention under amp."
    help = (
        "In packed amp-* training and packed inference, run each layer as one fused function; plans use it for "
        "BERT-type models."
    )
    is_planned = in_inference = True
    own_kernels = True
    if_possible = (
        "layers are not fused: that is for packed rows of models whose layers are known, in amp-bf16 or amp-fp16, on "
        "one GPU of sm_80 or newer, with lengths given, and without compile, lora, quantize and offload"
    )
    not_exact = "sums of gradients are rounded otherwise"
    is_measured = False
    asked = (is_fused,)
    must_match_on_resume = False
    techniques = (
        Technique(
            values=("True",),
            kind="free",
            does="a layer is one function, which keeps and copies less between its products",
            costs="none: sums of gradients are rounded less often",
        ),
    )

    is_of_steps = is_undone = True

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.mode == "forward" or not w.is_packed:
            yield "fused is for packed training and inference: take attention packed"
        if w.trains and not w.autocasts:
            yield f"fused is for training in precision amp-bf16 or amp-fp16, not {w.precision}"
        if w.compile:
            yield "fused and compile do not go together: either makes a layer's kernels"
        if w.lora is not None:
            yield "fused and lora do not go together: adapters are other products"
        if w.is_quantized:
            yield f"fused and quantize {w.quantize} do not go together"
        if w.offloads:
            yield f"fused and offload {w.offload} do not go together yet"
        if w.num_gpus > 1:
            yield "fused is for one GPU yet"

    def settled(self, chosen: Mapping[str, Any]) -> bool:
        plain = chosen["lora"] is None and chosen["quantize"] is None and chosen["offload"] is None
        is_packed = chosen["attention"] == "packed" and chosen["precision"].startswith("amp")
        return bool(chosen["fused"] and plain and is_packed and not chosen["compile"])

    def planned(self, w: Workload, model: Module, capability: tuple[int, int]) -> bool:
        from vramfit.techniques import fusing

        return w.num_gpus == 1 and capability >= TRITON_CAPABILITY and fusing.was_measured(model)

    def wished(self, w: Workload, model: Module, capability: tuple[int, int]) -> bool:
        from vramfit.techniques import fusing

        return w.num_gpus == 1 and capability >= TRITON_CAPABILITY and fusing.can_be(model)

    def inferred(self, value: bool, *, packs: bool) -> bool:
        return value and packs

    def gpu_problems(self, w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
        if capability < TRITON_CAPABILITY:
            yield f"fused: Triton does not compile for {gpu}"

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.techniques import fusing

        fusing.require(model)

    def apply_to_steps(self, model: Module, w: Workload) -> None:
        from vramfit.techniques import fusing

        fusing.apply(model)

    def undo(self, model: Module) -> None:
        from vramfit.techniques import fusing

        fusing.undo(model)
