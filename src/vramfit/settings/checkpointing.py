"""`checkpointing`: layers computed again in backward."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vramfit.settings.setting import Setting, Technique
from vramfit.settings.values import is_count, is_text, number_or_text
from vramfit.units import plain, shown

if TYPE_CHECKING:
    import torch

    from vramfit.workload import Workload


@dataclass(frozen=True, slots=True)
class Layers:
    """`full`, or a number of layers."""

    metavar: str | None = "full|K"
    annotation: ClassVar[Any] = Literal["full"] | int | None
    option_type: ClassVar[type] = str

    def normal(self, value: Any) -> Any:
        """numpy's integers as Python's."""
        return plain(value)

    def problems(self, name: str, value: Any) -> list[str]:
        """Anything else."""
        if value is None or is_text(value, "full") or is_count(value):
            return []
        return [f"{name} {shown(value)} is not 'full' or a number of layers"]

    def parse(self, text: str) -> int | str:
        """A number where the text is one."""
        return number_or_text(text)


class Checkpointing(Setting):
    """Layers computed again in backward."""

    keyword, order, applied = "checkpointing", 140, 70
    value = Layers()
    help = "Recompute all layers in backward, or the first K."
    is_planned = True
    must_match_on_resume = is_kept_on_resume = False
    techniques = (
        Technique(
            values=("full", "K"),
            kind="free",
            does="a layer keeps only its input and is computed again in backward",
            costs="none: time, up to a third of a step",
        ),
    )

    def contradictions(self, w: "Workload") -> Iterator[str]:
        """Nothing is kept in inference."""
        if w.checkpointing is not None and w.mode == "infer":
            yield "checkpointing keeps nothing: mode is infer"

    def is_applied_for(self, w: "Workload") -> bool:
        """Not in inference; a model that was checkpointed before is set right."""
        return bool(w.mode != "infer")

    def apply(self, model: "torch.nn.Module", w: "Workload") -> None:
        """As transformers does it."""
        from vramfit.techniques import checkpointing

        checkpointing.apply(model, w.checkpointing)
