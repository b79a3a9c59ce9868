"""`lora`: adapters learn in place of weights."""

from collections.abc import Iterator

from vramfit.settings.setting import Module, Setting, Technique, Workload, given
from vramfit.settings.values import Count


def learns_in_layers(w: Workload) -> bool:
    """Whether layers keep anything for backward."""
    return w.has_adapters or w.freeze not in ("encoder", "backbone")


class Lora(Setting):
    keyword, order, applied = "lora", 180, 40
    value = Count(optional=True, metavar="RANK")
    label, modes, is_basic = "LoRA rank", ("train",), True
    labels = (("", "none"), *((str(rank), str(rank)) for rank in (4, 8, 16, 32, 64)))
    help = "Rank of LoRA adapters on the attention projections. Default: no adapters."
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
            does="only thin matrices beside the attention projections learn, and the head",
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

        lora.apply(model, w.lora)
