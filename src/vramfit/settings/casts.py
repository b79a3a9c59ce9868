"""`casts`: under autocast, a layer's weights cast by one call."""

from collections.abc import Mapping
from typing import Any

from vramfit.settings.fused import Fused
from vramfit.settings.setting import Module, Setting, Technique, Workload
from vramfit.settings.values import Choice


def keeps_copies(*, on_host: bool, in_shards: bool) -> bool:
    """Whether autocast keeps its casts of weights for a pass: not where memory is so short that the optimizer is on the
    host or weights are in shards."""
    return not (on_host or in_shards)


def keeps_casts(w: Workload) -> bool:
    """Whether autocast keeps its casts of weights for a pass."""
    return keeps_copies(on_host=w.steps_on_host, in_shards=w.shards)


def casts_by_layer(w: Workload) -> bool:
    """Whether a layer's weights are cast by one call, where anything is cast."""
    return w.casts == "together"


class Casts(Setting):
    keyword, order, applied = "casts", 240, 80
    value = Choice(names=("each", "together"))
    default = "each"
    planned_default = "together"
    in_run = False
    hidden = True
    label, modes = "Cast weights by layer", ("train",)
    about = "Under amp, a layer’s weights are cast to half precision in one call, and freed when the layer is done."
    help = "In amp-* training, cast the weights of a layer one by one (each) or in one call (together)."
    is_planned = True
    must_match_on_resume = False
    asked = (keeps_casts, casts_by_layer)
    techniques = (
        Technique(
            values=("together",),
            kind="free",
            does="under autocast, a layer's weights are cast by one call and freed when its forward ends",
            costs="none",
        ),
    )

    is_of_steps = is_undone = True

    def settled(self, chosen: Mapping[str, Any]) -> str:
        can_be = chosen["precision"].startswith("amp") and chosen["offload"] is None and not chosen["compile"]
        return str(chosen["casts"]) if can_be and not Fused().settled(chosen) else "each"

    def planned(self, w: Workload, model: Module, capability: tuple[int, int]) -> str:
        from vramfit.techniques import casting

        return "together" if casting.can_be(model) and not w.shards else "each"

    def is_applied_for(self, w: Workload) -> bool:
        """Compiled and fused layers cast by themselves; offloaded layers and shards are gone after their forward."""
        if not w.casts_by_layer or not w.trains or not w.autocasts:
            return False
        return not (w.offload or w.shards or w.compile or w.fused)

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.techniques import casting

        casting.apply(model)

    def undo(self, model: Module) -> None:
        from vramfit.techniques import casting

        casting.undo(model)
