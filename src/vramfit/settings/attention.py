"""`attention`: the kernel, padded or packed; and `mask`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramfit.settings.setting import BF16_CAPABILITY, Setting, Technique
from vramfit.settings.values import Choice, Switch

if TYPE_CHECKING:
    import torch

    from vramfit.workload import Workload


class Attention(Setting):
    """The kernel of attention."""

    keyword, order, applied = "attention", 110, 10
    value = Choice(("sdpa", "eager", "packed"), optional=True)
    help = "Attention kernel: sdpa where the model has it, else eager, unless given; `packed` has no padding."
    is_planned = in_inference = at_load = True
    techniques = (
        Technique(
            values=("sdpa",),
            kind="free",
            does="attention scores are computed in tiles and never written out",
            costs="none",
        ),
        Technique(
            values=("packed",),
            kind="free",
            does="sequences lie end to end, so that padding takes nothing",
            costs="none: a sequence sees only itself",
        ),
    )

    def contradictions(self, w: "Workload") -> Iterator[str]:
        """Packed losses need the Stepper."""
        if w.attention == "packed" and w.trains and w.loop != "stepper":
            yield "attention packed is for loop 'stepper': a plain loop's loss does not know where sequences begin"

    def gpu_problems(self, w: "Workload", capability: tuple[int, int], gpu: str) -> Iterator[str]:
        """Packed attention is torch's flash kernel."""
        if w.attention == "packed" and capability < BF16_CAPABILITY:
            yield f"attention packed: {gpu} is too old for torch's flash kernel; take sdpa"
        if w.attention == "packed" and w.precision in ("fp32", "tf32"):
            yield f"attention packed: its kernel computes in 16 bits, not {w.precision}; take amp-bf16, or sdpa"

    def is_applied_for(self, w: "Workload") -> bool:
        """Other kernels are the configuration's."""
        return bool(w.attention == "packed")

    def apply(self, model: "torch.nn.Module", w: "Workload") -> None:
        """Sequences end to end."""
        from vramfit.techniques import packing

        packing.apply(model, w.task)

    def undo(self, model: "torch.nn.Module") -> None:
        """Padded again."""
        from vramfit.techniques import packing

        packing.undo(model)

    def words(self, w: "Workload") -> str | None:
        """With its noun."""
        return f"{w.attention} attention" if w.attention else None

    def brief(self, w: "Workload") -> str | None:
        """Padded is what everyone has."""
        return "packed" if w.attention == "packed" else None


class Mask(Setting):
    """The attention mask."""

    keyword, order = "mask", 120
    value = Choice(("none", "ones", "padded"))
    default = "padded"
    help = "Whether an attention mask is given, and whether it hides anything."
    in_inference = True

    def words(self, w: "Workload") -> str | None:
        """With its noun."""
        return {"none": "no mask", "ones": "mask of ones"}.get(w.mask)


class Dropout(Setting):
    """Dropout."""

    keyword, order, applied = "dropout", 130, 60
    value = Switch()
    default = True
    help = "Without dropout, modules are as under model.eval(). Inference never drops."
    on_page = False

    def is_applied_for(self, w: "Workload") -> bool:
        """Modules have a mode in any case."""
        return True

    def apply(self, model: "torch.nn.Module", w: "Workload") -> None:
        """Modules in training or evaluation mode."""
        model.train(w.mode != "infer" and w.dropout)

    def words(self, w: "Workload") -> str | None:
        """Where there is none."""
        return None if w.dropout else "no dropout"
