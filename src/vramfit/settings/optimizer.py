"""`optimizer`: what takes the step."""

from collections.abc import Iterator

from vramfit.settings.setting import TRITON_CAPABILITY, Estimate, Setting, Technique, Workload
from vramfit.settings.values import Choice

IN_PLACE = ("adamw-fused", "adamw-8bit")
IN_TRAINER = {
    "adamw": "adamw_torch",
    "adamw-fused": "adamw_torch_fused",
    "adamw-single": "adamw_torch",
    "adamw-8bit": "adamw_torch_8bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
}


def steps_in_place(w: Workload) -> bool:
    """Whether the optimizer's step needs no temporaries (`step.commit.needs_temporaries` asks an optimizer)."""
    return w.optimizer in IN_PLACE


def has_8_bit_state(w: Workload) -> bool:
    """Whether the optimizer keeps its state in 8 bits."""
    return w.optimizer == "adamw-8bit"


def name_in_trainer(w: Workload) -> str:
    """What transformers' `TrainingArguments.optim` calls it."""
    return IN_TRAINER[w.optimizer]


def is_adamw(w: Workload) -> bool:
    """Whether it is torch's AdamW."""
    return w.optimizer in ("adamw", "adamw-fused", "adamw-single")


def state_copies(w: Workload) -> int:
    """Moments of the size and type of what learns; other optimizers than AdamW may keep next to nothing."""
    return 2 if w.is_adamw else 0


def state_bytes(w: Workload) -> int:
    """Bytes of moments for each weight that learns, beside `state_copies`, at the least."""
    return 2 if w.has_8_bit_state else 0


class Optimizer(Setting):
    keyword, order = "optimizer", 160
    is_trainers_own = True
    value = Choice(
        names=("adamw", "adamw-fused", "adamw-single", "adamw-8bit", "sgd", "adafactor"), hidden=("adamw-single",)
    )
    default = "adamw"
    label, modes, is_basic = "Optimizer", ("train",), True
    help = "Optimizer; `adamw` is torch's default implementation (foreach)."
    is_observed = True
    is_planned = True
    in_trace = "step"
    asked = (steps_in_place, has_8_bit_state, is_adamw, name_in_trainer, state_copies, state_bytes)
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

    def gpu_problems(self, w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
        if capability < TRITON_CAPABILITY and w.has_8_bit_state and w.trains:
            yield f"optimizer adamw-8bit: its step is compiled by Triton, which {gpu} is too old for; take adafactor"

    def advised(self, now: Estimate) -> Iterator[dict[str, str]]:
        if now.workload.trains and now.workload.optimizer == "adamw":
            yield {self.keyword: "adamw-fused"}

    def trainer_arguments(self, w: Workload) -> dict[str, str]:
        return {"optim": w.name_in_trainer}

    def words(self, w: Workload) -> str | None:
        return w.optimizer if w.trains else None
