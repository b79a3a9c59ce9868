"""A toy technique in one file: what the house finds by itself when it lies beside the real ones."""

from collections.abc import Iterator

from vramfit.settings.setting import Module, Setting, Technique, Workload
from vramfit.settings.values import Switch


class Calm(Setting):
    keyword, order, applied = "calm", 235, 95
    value = Switch()
    default = False
    help = "Keep the layers calm."
    label, is_basic = "Calm layers", True
    is_planned = True
    proposes = (True,)
    techniques = (Technique(values=("True",), kind="free", does="layers are calm", costs="none"),)

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.calm and w.compile:
            yield "calm and compile do not go together: compiled layers hurry"

    def apply(self, model: Module, w: Workload) -> None:
        model.register_buffer(
            "calmness", model.get_parameter(next(iter(dict(model.named_parameters())))).new_empty(1 << 20)
        )
