"""The catalogue: every technique with its keyword, its class, what it does and what it costs; and what does not go.

Three classes: `free` changes no result beyond the order of sums, `numeric` computes the same training in fewer bits,
`different training` learns something else. It is read without torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from vramfit.records.estimate import Kind
from vramfit.workload import Precision, Workload

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The mildest first."""
BF16_CAPABILITY = (8, 0)
"""The first with bfloat16 and TF32 arithmetic, and the first that torch's int4 product is built for."""
TRITON_CAPABILITY = (7, 0)
"""The first that Triton compiles for."""


def usual_precision(capability: tuple[int, int], *, infers: bool) -> Precision:
    """The lower precision that is usual on a GPU: autocast, or weights in 16 bits where nothing is learned."""
    if capability >= BF16_CAPABILITY:
        return "bf16" if infers else "amp-bf16"
    return "fp16" if infers else "amp-fp16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """One way to take less memory, as a keyword of `Workload`."""

    keyword: str
    values: tuple[str, ...]
    """What the keyword may be; a name in capitals stands for a value of the user's."""
    kind: Kind
    does: str
    """What it does to memory, in one line."""
    costs: str
    """What it costs in quality, in one line."""

    @property
    def name(self) -> str:
        """As people write it: the keyword and its values."""
        return f"{self.keyword} {' | '.join(self.values)}"

    def covers(self, value: Any) -> bool:
        """Whether a value of the keyword is this technique."""
        return str(value) in self.values or (value is not None and any(v.isupper() for v in self.values))


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        keyword="attention",
        values=("sdpa",),
        kind="free",
        does="attention scores are computed in tiles and never written out",
        costs="none",
    ),
    Technique(
        keyword="attention",
        values=("packed",),
        kind="free",
        does="sequences lie end to end, so that padding takes nothing",
        costs="none: a sequence sees only itself",
    ),
    Technique(
        keyword="checkpointing",
        values=("full", "K"),
        kind="free",
        does="a layer keeps only its input and is computed again in backward",
        costs="none: time, up to a third of a step",
    ),
    Technique(
        keyword="accumulate",
        values=("N",),
        kind="free",
        does="the batch goes through in micro-batches, whose gradients are summed",
        costs="none: other dropout masks, and smaller products",
    ),
    Technique(
        keyword="optimizer",
        values=("adamw-fused", "adamw-single"),
        kind="free",
        does="the step makes no temporaries for all weights at once",
        costs="none",
    ),
    Technique(
        keyword="offload",
        values=("weights", "optimizer", "activations"),
        kind="free",
        does="what is not needed at the moment waits in host memory",
        costs="none: time, where copies do not hide behind computing",
    ),
    Technique(
        keyword="casts",
        values=("together",),
        kind="free",
        does="under autocast, a layer's weights are cast by one call and let go of when its forward ends",
        costs="none",
    ),
    Technique(
        keyword="fused",
        values=("True",),
        kind="free",
        does="a layer of BERT's kind is one function, which keeps and copies less between its products",
        costs="none: sums of gradients are rounded less often",
    ),
    Technique(
        keyword="allocator",
        values=("expandable",),
        kind="free",
        does="segments grow in place, so that less is lost between blocks",
        costs="none",
    ),
    Technique(
        keyword="graphs",
        values=("True",),
        kind="free",
        does="passes are recorded once and replayed: the host waits less; takes more memory",
        costs="none: sums in another order, since passes are filled up to a few sizes",
    ),
    Technique(
        keyword="compile",
        values=("True",),
        kind="numeric",
        does="fused kernels keep fewer intermediate results, and read and write less",
        costs="hardly any: fused kernels round less often",
    ),
    Technique(
        keyword="precision",
        values=("tf32",),
        kind="numeric",
        does="products round their inputs to 10 bits; takes no less memory, and less time",
        costs="hardly any: sums stay in fp32",
    ),
    Technique(
        keyword="precision",
        values=("amp-bf16", "amp-fp16"),
        kind="numeric",
        does="activations and products in 16 bits over fp32 weights",
        costs="hardly any: fp16 needs its loss scaled and skips steps that overflow",
    ),
    Technique(
        keyword="precision",
        values=("bf16", "fp16"),
        kind="numeric",
        does="weights, gradients and optimizer state in 16 bits too",
        costs="some in training: small updates are rounded away; little in inference",
    ),
    Technique(
        keyword="optimizer",
        values=("adamw-8bit",),
        kind="numeric",
        does="both moments in a byte a weight, with a scale for each block of 256",
        costs="little: moments are rounded at every step, weights in bf16 by chance, which is fair on average",
    ),
    Technique(
        keyword="quantize",
        values=("int8", "int8-dynamic", "int4"),
        kind="numeric",
        does="linear weights that do not learn, in 8 or 4 bits",
        costs="little in int8, more in int4: weights are rounded once",
    ),
    Technique(
        keyword="optimizer",
        values=("sgd", "adafactor"),
        kind="different training",
        does="no moments, or one in factors, in place of AdamW's two",
        costs="other learning rates are needed, and often more steps",
    ),
    Technique(
        keyword="freeze",
        values=("embeddings", "encoder", "backbone", "K", "PATTERNS"),
        kind="different training",
        does="parameters that do not learn need no gradient, no state and often no activations",
        costs="little for the embeddings, much for the whole backbone",
    ),
    Technique(
        keyword="lora",
        values=("RANK",),
        kind="different training",
        does="only thin matrices beside the attention projections learn, and the head",
        costs="often little; hard tasks need a higher rank or the full model",
    ),
)


def find(keyword: str, value: Any) -> Technique | None:
    """The technique that a keyword's value stands for; None for what is no technique, such as fp32.

    >>> find("precision", "amp-bf16").kind
    'numeric'
    """
    return next((t for t in TECHNIQUES if t.keyword == keyword and t.covers(value)), None)


def used_by(workload: Workload) -> tuple[Technique, ...]:
    """The techniques that a workload asks for, in the order of the catalogue."""
    asked = [t for t in TECHNIQUES if t.keyword != "accumulate" and t.covers(getattr(workload, t.keyword))]
    accumulate = find("accumulate", workload.accumulate)
    if accumulate is not None and (workload.accumulate or 1) > 1:
        asked.append(accumulate)
    return tuple(sorted(asked, key=TECHNIQUES.index))


def conflicts(workload: Workload, capability: tuple[int, int], gpu: str) -> list[str]:
    """Why a workload cannot run on a GPU, one sentence a problem; empty where it can.

    What contradicts itself on any GPU is refused by `Workload`, and what a model does not have by the techniques.

    Args:
        capability: the GPU's compute capability.
        gpu: its name, for the sentences.
    """
    which = f"{gpu} (sm_{capability[0]}{capability[1]})"
    return list(_problems(workload, capability, which))


def _problems(w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
    if w.quantize == "int4" and w.precision != "bf16":
        yield f"quantize int4 multiplies in bfloat16: take precision bf16, not {w.precision}"
    if w.precision in ("amp-bf16", "bf16") and capability < BF16_CAPABILITY:
        instead = "amp-fp16" if w.precision == "amp-bf16" or w.trains else "fp16"
        yield f"precision {w.precision}: {gpu} has no bfloat16 and would emulate it, slowly; take {instead}"
    if w.attention == "packed" and capability < BF16_CAPABILITY:
        yield f"attention packed: {gpu} is too old for torch's flash kernel; take sdpa"
    if w.attention == "packed" and w.precision in ("fp32", "tf32"):
        yield f"attention packed: its kernel computes in 16 bits, not {w.precision}; take amp-bf16, or sdpa"
    if w.precision == "tf32" and capability < BF16_CAPABILITY:
        yield f"precision tf32: {gpu} has no TF32; take fp32, or amp-fp16"
    if w.quantize == "int4" and capability < BF16_CAPABILITY:
        yield f"quantize int4: {gpu} has no product with int4 weights; take int8"
    if capability < TRITON_CAPABILITY:
        if w.optimizer == "adamw-8bit" and w.trains:
            yield f"optimizer adamw-8bit: its step is compiled by Triton, which {gpu} is too old for; take adafactor"
        for name in ("compile", "fused"):
            if getattr(w, name):
                yield f"{name}: Triton does not compile for {gpu}"
