"""`lora`: adapters learn in place of weights; and `lora_targets`: which layers have them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vramfit.settings.setting import Module, Setting, Technique, Workload, given
from vramfit.settings.values import Count, Value

ALL_LINEAR = "all-linear"
"""Stands for every linear layer of the model's layers."""


def learns_in_layers(w: Workload) -> bool:
    """Whether layers keep anything for backward."""
    return w.has_adapters or w.freeze not in ("encoder", "backbone")


class Lora(Setting):
    keyword, order, applied = "lora", 180, 40
    value = Count(optional=True, metavar="RANK")
    label, modes, is_basic = "LoRA rank", ("train",), True
    labels = (("", "none"), *((str(rank), str(rank)) for rank in (4, 8, 16, 32, 64)))
    help = (
        "Rank of LoRA adapters, on the query and value projections unless --lora-targets names others. Default: none."
    )
    is_planned = True
    not_fitted = "which a Trainer cannot save"
    asked = (
        given("lora", "has_adapters", "Whether LoRA adapters learn in place of the weights beside them."),
        learns_in_layers,
    )
    allows = (("lora", "only adapters and the head learn"),)
    techniques = (
        Technique(
            values=("RANK",),
            kind="different training",
            does="only thin matrices added to the attention projections (or lora_targets) learn, and the head",
            costs="often little; hard tasks need a higher rank or the full model",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.mode != "train":
            yield f"lora is for mode train, not {w.mode}"
        frozen = w.freeze if isinstance(w.freeze, tuple) else (w.freeze,)
        if w.freezes_layers or any(str(f).isdecimal() for f in frozen):
            yield (
                f"lora {w.lora} adapts layers that freeze {w.freeze!r} takes out of training: drop freeze, "
                "since LoRA freezes all but its adapters and the head"
            )
        if w.shards:
            yield "lora learns little, and fsdp has little to cut: take parallel ddp"

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.techniques import lora

        lora.apply(model, w.lora, w.lora_targets)


@dataclass(frozen=True, kw_only=True)
class Targets(Value):
    """`all-linear`, or names of layers."""

    optional: bool = True
    metavar: str | None = "NAME,…"
    kind: ClassVar[Any] = tuple[str, ...]

    def normal(self, value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            return value
        return tuple(part.strip() for part in parts if part.strip())

    def is_right(self, value: Any) -> bool:
        return isinstance(value, tuple) and bool(value) and all(isinstance(part, str) for part in value)

    def wanted(self, value: Any) -> str:
        return f"{ALL_LINEAR!r} or names of linear layers such as 'q_proj,v_proj'"

    def parse(self, text: str) -> Any:
        return self.normal(text)


class LoraTargets(Setting):
    keyword, order = "lora_targets", 181
    value = Targets()
    label, modes = "Layers with adapters", ("train",)
    labels = (("", "attention projections"), (ALL_LINEAR, "all linear layers"))
    pattern = rf"^{ALL_LINEAR}$"  # names of layers are not for strangers
    help = (
        "Which layers have LoRA adapters: all-linear, or names such as q_proj,v_proj. Default: query and value "
        "projections."
    )
    is_planned = True
    not_fitted = "which a Trainer cannot save"
    techniques = (
        Technique(
            values=("NAMES",),
            kind="different training",
            does="adapters on other linear layers than the attention projections",
            costs="none in addition to lora's own: more adapted layers learn more, and take more memory",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not w.has_adapters:
            yield f"lora_targets {self.shown(w.lora_targets)} says where adapters go: give lora too, such as 16"

    def settled(self, chosen: Mapping[str, Any]) -> Any:
        return chosen[self.keyword] if chosen["lora"] is not None else None
