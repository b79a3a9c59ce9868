"""The cases of a well-known study of BERT's memory, with the figures it printed; shared by `bert_memory_study.py`.

The study (September 2019, PyTorch 1.2, `pytorch_transformers`, a card with 11.17 GiB) printed `memory_allocated` in MiB
after a forward pass whose outputs were still held, and tried batches that are powers of two until one ran out. Its
models were as `from_pretrained` leaves them, in eval mode, and attention was computed step by step (`eager`).
"""

from dataclasses import dataclass
from typing import Any

GIB = 2**30
MEMORY = int(11.17 * GIB)
GPU, TORCH = "h200", "2.11"
MODELS = {"base": "bert-base-uncased", "large": "bert-large-uncased"}
HEADS = {"classification": "sequence-classification", "pretraining": "pretraining"}
LENGTHS = (128, 256, 512)
STATES: dict[str, dict[str, Any]] = {
    "train": {"mode": "forward", "dropout": True},
    "eval": {"mode": "forward", "dropout": False},
    "no-grad": {"mode": "infer"},
}
"""`eval` keeps what a backward pass would need, as the study found; only `no-grad` does not."""
PLANNED_BATCH = 256
"""Samples a step that plans are made for: whatever fits at once, this many are learned from together."""

ORIGINAL_MIB: dict[tuple[str, str, int, int, str], int] = {
    **{("base", "classification", seq, 1, "eval"): mib for seq, mib in {128: 572, 256: 745, 512: 1237}.items()},
    **{("base", "classification", 512, batch, "eval"): mib for batch, mib in {4: 3610, 8: 6803}.items()},
    ("base", "classification", 128, 4, "eval"): 1009,
    ("base", "classification", 128, 8, "eval"): 1582,
    ("base", "classification", 128, 16, "eval"): 2747,
    ("base", "classification", 128, 32, "eval"): 5075,
    ("base", "classification", 128, 64, "eval"): 9731,
    ("base", "classification", 512, 8, "no-grad"): 418,
    ("large", "classification", 512, 4, "eval"): 9759,
    ("large", "classification", 128, 4, "eval"): 2823,
    ("large", "classification", 128, 8, "eval"): 4367,
    ("large", "classification", 128, 16, "eval"): 7455,
    ("large", "classification", 512, 8, "no-grad"): 1279,
    ("base", "pretraining", 512, 4, "eval"): 3906,
    ("base", "pretraining", 512, 8, "eval"): 7370,
    ("large", "pretraining", 512, 4, "eval"): 10058,
}
"""(model, head, length, batch, state) → MiB allocated after the forward pass."""

ORIGINAL_BATCH: dict[tuple[str, str, int, bool], int] = {
    ("base", "classification", 512, True): 8,
    ("base", "classification", 128, True): 64,
    ("base", "classification", 512, False): 256,
    ("large", "classification", 512, True): 4,
    ("large", "classification", 128, True): 16,
    ("large", "classification", 512, False): 128,
    ("base", "pretraining", 512, True): 8,
    ("large", "pretraining", 512, True): 4,
}
"""(model, head, length, with grad) → the largest power of two that ran."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the results."""

    kind: str
    """forward | largest | training | one-pass | inference."""
    model: str
    head: str
    seq: int
    batch: int = 1
    state: str = "eval"
    attention: str = "eager"
    frozen_input: bool = False
    """`x.requires_grad = False` before the pass, as the study tried."""

    @property
    def name(self) -> str:
        """What tells it from the others."""
        note = " x.requires_grad=False" if self.frozen_input else ""
        batch = f"x{self.batch}" if self.kind == "forward" else ""
        return f"{self.kind} {self.model} {self.head} {self.seq}{batch} {self.state} {self.attention}{note}"

    @property
    def original(self) -> int | None:
        """The study's figure: MiB of a forward pass, or a batch."""
        if self.kind == "forward":
            key = (self.model, self.head, self.seq, self.batch, self.state)
            return ORIGINAL_MIB.get(key) if self.attention == "eager" else None
        if self.kind == "largest":
            return ORIGINAL_BATCH.get((self.model, self.head, self.seq, self.state != "no-grad"))
        return None

    def keywords(self) -> dict[str, Any]:
        """The workload as `estimate` and `max_batch` take it, without a batch."""
        return {
            "task": HEADS[self.head],
            "seq": self.seq,
            "attention": self.attention,
            "mask": "none",
            "gpu": GPU,
            "memory": MEMORY,
            "torch_version": TORCH,
            **STATES[self.state],
        }


def cases() -> list[Case]:
    """Every case: forward passes, the largest batches, then what plans reach on the same card."""
    found = [
        Case(kind="forward", model=model, head="classification", seq=seq, state=state, attention=attention)
        for model in MODELS
        for attention in ("eager", "sdpa")
        for seq in LENGTHS
        for state in STATES
    ]
    for model, head, seq, batch, state in ORIGINAL_MIB:
        case = Case(kind="forward", model=model, head=head, seq=seq, batch=batch, state=state)
        if case not in found:
            found.append(case)
    found.append(Case(kind="forward", model="base", head="classification", seq=512, frozen_input=True))
    found += _each("largest", states=("eval", "no-grad"), attention="eager")
    found += _each("training", states=("train",), attention="sdpa")
    found += _each("one-pass", states=("train",), attention="sdpa")
    found += _each("inference", states=("no-grad",), attention="sdpa")
    return found


def _each(kind: str, *, states: tuple[str, ...], attention: str) -> list[Case]:
    return [
        Case(kind=kind, model=model, head=head, seq=seq, state=state, attention=attention)
        for model in MODELS
        for head in HEADS
        for seq in (128, 512)
        for state in states
    ]
