"""`optimizer`: what takes the step."""

from collections.abc import Iterator

from vramfit.settings.setting import TRITON_CAPABILITY, Estimate, Setting, Technique, Workload
from vramfit.settings.values import Choice

IN_PLACE = ("adamw-fused", "adamw-8bit")
STATE_COPIES = {"adamw": 2, "adamw-fused": 2, "adamw-single": 2}
"""Optimizer → moments of the size and type of what learns; others may keep next to nothing."""
STATE_BYTES = {"adamw-8bit": 2}
"""Optimizer → bytes of its moments for each weight, at the least."""


def steps_in_place(w: Workload) -> bool:
    """Whether the optimizer's step needs no temporaries (`step.commit.needs_temporaries` asks an optimizer)."""
    return w.optimizer in IN_PLACE


def has_8_bit_state(w: Workload) -> bool:
    """Whether the optimizer keeps its state in 8 bits."""
    return w.optimizer == "adamw-8bit"


def state_copies(w: Workload) -> int:
    """Moments of the size and type of what learns, at the least."""
    return STATE_COPIES.get(w.optimizer, 0)


def state_bytes(w: Workload) -> int:
    """Bytes of moments for each weight that learns, beside `state_copies`, at the least."""
    return STATE_BYTES.get(w.optimizer, 0)


class Optimizer(Setting):
    keyword, order = "optimizer", 160
    value = Choice(
        names=("adamw", "adamw-fused", "adamw-single", "adamw-8bit", "sgd", "adafactor"), hidden=("adamw-single",)
    )
    default = "adamw"
    label, modes, is_basic = "Optimizer", ("train",), True
    help = "Optimizer; `adamw` is torch's default implementation (foreach)."
    is_observed = True
    is_planned = True
    in_trace = "step"
    asked = (steps_in_place, has_8_bit_state, state_copies, state_bytes)
    allows = (
        ("adafactor", "another optimizer, which keeps its second moment in factors"),
        ("sgd", "another optimizer, which keeps no moments"),
    )
    techniques = (
        Technique(
            values=("adamw-fused", "adamw-single"),
            kind="free",
            does="the step makes no temporaries for all weights at once",
            costs="none",
            why="the same AdamW in one kernel: its step makes no copy of the weights' size",
        ),
        Technique(
            values=("adamw-8bit",),
            kind="numeric",
            does="both moments in a byte a weight, with a scale for each block of 256",
            costs="little: moments are rounded at every step, weights in bf16 by chance, which is fair on average",
        ),
        Technique(
            values=("sgd", "adafactor"),
            kind="different training",
            does="no moments, or one in factors, in place of AdamW's two",
            costs="other learning rates are needed, and often more steps",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.shards and w.optimizer in ("adamw-8bit", "adafactor"):
            yield f"optimizer {w.optimizer} steps whole matrices, which fsdp has cut: take adamw-fused"

    def gpu_problems(self, w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
        if capability < TRITON_CAPABILITY and w.has_8_bit_state and w.trains:
            yield f"optimizer adamw-8bit: its step is compiled by Triton, which {gpu} is too old for; take adafactor"

    def advised(self, now: Estimate) -> Iterator[dict[str, str]]:
        if now.workload.trains and now.workload.optimizer == "adamw":
            yield {self.keyword: "adamw-fused"}

    def words(self, w: Workload) -> str | None:
        return w.optimizer if w.trains else None
