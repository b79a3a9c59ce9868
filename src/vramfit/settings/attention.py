"""`attention`: the kernel, padded or packed; and `mask`."""

from collections.abc import Iterator, Mapping
from typing import Any

from vramfit.errors import VramfitError
from vramfit.settings.precision import lowered
from vramfit.settings.setting import BF16_CAPABILITY, Estimate, Module, Setting, Technique, Workload
from vramfit.settings.values import Choice, Switch


def is_packed(w: Workload) -> bool:
    """Whether sequences lie end to end in one row, without padding."""
    return w.attention == "packed"


def has_own_attention(w: Workload) -> bool:
    """Whether no kernel was asked for, so that the model takes its own."""
    return w.attention is None


def is_sdpa(w: Workload) -> bool:
    """Whether torch chooses the kernel."""
    return w.attention == "sdpa"


PACKED = {"attention": "packed"}
"""Keywords with which sequences lie end to end."""


def precision_needed(given: Mapping[str, Any]) -> dict[str, str]:
    """Keywords of a precision that the packed kernel takes, where packing is asked for and no precision is given."""
    if given.get("attention") != "packed" or "precision" in given:
        return {}
    return {"precision": "amp-bf16"}


class Attention(Setting):
    keyword, order, applied = "attention", 110, 10
    value = Choice(names=("sdpa", "eager", "packed"), optional=True)
    label = "Attention"
    labels = (("", "model’s own"), ("packed", "packed: no padding"))
    about = "“eager” writes every score out; “sdpa” does not; “packed” also leaves out padding."
    help = "Attention kernel. Default: sdpa where the model has it, else eager. `packed` computes without padding."
    in_answers = is_observed = True
    is_planned = in_inference = at_load = True
    asked = (is_packed, has_own_attention, is_sdpa)
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

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.is_packed and w.trains and w.loop != "stepper":
            yield "attention packed is for loop 'stepper': a plain loop's loss does not know where sequences begin"

    def gpu_problems(self, w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
        if w.is_packed and capability < BF16_CAPABILITY:
            yield f"attention packed: {gpu} is too old for torch's flash kernel; take sdpa"
        if w.is_packed and w.is_32_bit:
            yield f"attention packed: its kernel computes in 16 bits, not {w.precision}; take amp-bf16, or sdpa"

    def advised(self, now: Estimate) -> Iterator[dict[str, Any]]:
        w = now.workload
        if not w.is_packed and now.has_large_mask:
            lower = lowered({}, now.compute_capability, infers=w.mode == "infer")
            needed = lower if w.is_32_bit else {}  # its kernel computes in 16 bits
            yield {**PACKED, **needed, **({"loop": "stepper"} if w.trains else {})}
        if w.attention == "eager":
            yield {self.keyword: "sdpa"}

    def trainer_arguments(self, w: Workload) -> dict[str, str]:
        if w.is_packed:
            raise VramfitError(
                "the Trainer has nothing like attention packed: it would pad, and need more memory",
                hint="run the plan with vramfit train or Stepper, or plan with attention='sdpa' (--attention sdpa)",
            )
        return {}

    def inferred(self, value: str | None, *, packs: bool) -> str | None:
        return "sdpa" if value == "packed" and not packs else value

    is_of_steps = True

    def is_applied_for(self, w: Workload) -> bool:
        return w.is_packed

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.techniques import packing

        packing.apply(model, w.task)

    def undo(self, model: Module) -> None:
        from vramfit.techniques import packing

        packing.undo(model)

    def words(self, w: Workload) -> str | None:
        return f"{w.attention} attention" if w.attention else None

    def brief(self, w: Workload) -> str | None:
        return "packed" if w.is_packed else None


class Mask(Setting):
    keyword, order = "mask", 120
    value = Choice(names=("none", "ones", "padded"))
    default = "padded"
    label = "Attention mask"
    labels = (("padded", "padded: hides padding"), ("ones", "given, hides nothing"), ("none", "none given"))
    about = "Some kernels can only be used where no token is hidden."
    help = "Attention mask: none, one that hides no token (ones), or one that hides padding (padded)."
    in_inference = True

    def words(self, w: Workload) -> str | None:
        return {"none": "no mask", "ones": "mask of ones"}.get(w.mask)


def may_be_padded(given: Mapping[str, Any]) -> bool:
    """Whether batches may have padding, by the keywords of a job."""
    return bool(given.get(Mask.keyword, Mask.default) == Mask.default)


class Dropout(Setting):
    keyword, order, applied = "dropout", 130, 60
    value = Switch()
    default = True
    help = "Without dropout, modules train as under model.eval(). Inference never uses dropout."
    on_page = False

    def is_applied_for(self, w: Workload) -> bool:
        return True

    def apply(self, model: Module, w: Workload) -> None:
        model.train(w.mode != "infer" and w.dropout)

    def words(self, w: Workload) -> str | None:
        return None if w.dropout else "no dropout"
