"""What records say in words: whether a job fits, and how people call phases, parts of a step, operators and modules."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from vramfit.records.estimate import ATTENTION_MODULES, Estimate, PeakMoment, TensorGroup
from vramfit.records.measurement import Comparison
from vramfit.records.plan import Plan
from vramfit.records.run import RunRecord
from vramfit.settings import in_words
from vramfit.settings.setting import Kind
from vramfit.units import format_bytes
from vramfit.workload import Workload

NO_BREAK = "\N{NO-BREAK SPACE}"
LONGEST_NAME = 60
"""Characters of a model's name that a headline shows; a longer one would be broken in the middle of a word."""

Tone = Literal["good", "tight", "bad", "open"]
TIGHT_SHARE = 0.03
"""Less than this share of the capacity to spare is called tight."""
OUTSIDE = "Outside what is promised: PyTorch 1.x takes more than is predicted here. Keep a quarter spare."
COLD = "Only where cuBLAS was used before: run one small matrix product before the model comes to the GPU."
HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """How one kind of memory is drawn."""

    light: str
    """Its colour on a light ground."""
    dark: str
    """On a dark one."""
    terminal: str = "default"
    """Its colour on a terminal."""
    glyph: str = "?"
    """The character that stands for it where there are no colours."""


MEMORY: Mapping[str, MemoryKind] = {
    "weights": MemoryKind("#3f74e0", "#5b8ef5", "blue", "█"),
    "gradients": MemoryKind("#8a5fd6", "#a07ae8", "magenta", "▓"),
    "optimizer": MemoryKind("#e0952b", "#d9942f", "yellow", "▒"),
    "activations": MemoryKind("#2aa37c", "#2fa57d", "green", "░"),
    "temporaries": MemoryKind("#35a6c8", "#41aecd", "cyan", "▚"),
    "workspaces": MemoryKind("#7d8796", "#7b8698", "bright_black", "≡"),
    "inputs": MemoryKind("#d0608c", "#d96b98", "default", "·"),
    "unused": MemoryKind("#c9cfd8", "#3d4858"),
    "CUDA context": MemoryKind("#a9b2bf", "#5b687a"),
}
"""Kinds of memory, in the order in which they are drawn: for the terminal, notebooks, the report and the page."""


def memory_css() -> str:
    """The colours of all kinds as style: `--weights` and so on, for light and dark grounds."""
    light, dark = (
        "".join(f"--{name.split()[-1]}:{getattr(kind, ground)};" for name, kind in MEMORY.items())
        for ground in ("light", "dark")
    )
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"


KIND_WORDS: dict[Kind, str] = {"free": "same maths", "numeric": "fewer bits", "different training": "other training"}
"""What a change does to the training, in two words."""

_SIZE = re.compile(r"(?<=[0-9]) (?=[KMGT]?i?B\b)")
"""The space between a number and its unit."""

_STEP_PHASES = {"load": "load", "first_step": "first step", "steady_step": "steady step"}
_BATCH_PHASES = {"load": "load", "first_step": "first batch", "steady_step": "later batches"}
_OF_PHASE = {
    "first step": "of the first step",
    "steady step": "of a steady step",
    "first batch": "of the first batch",
    "later batches": "of a later batch",
}
_PARTS = {
    "load": "while the weights move to the GPU",
    "inputs": "while a batch moves to the GPU",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
}

_OPERATORS = {
    "_flash_attention_backward": "gradient of attention",
    "_flash_attention_forward": "outputs of attention",
    "_foreach_norm": "norms of the gradients",
    "_foreach_sqrt": "square roots of AdamW's moments",
    "_log_softmax": "the loss's log-softmax",
    "_log_softmax_backward_data": "gradient of the loss",
    "_softmax": "attention probabilities",
    "_softmax_backward_data": "gradient of the attention scores",
    "_to_copy": "copies in another precision",
    "addmm": "outputs of linear layers",
    "clone": "copies in another layout",
    "cublas_workspace": "cuBLAS workspace",
    "cublaslt_workspace": "cuBLASLt workspace",
    "embedding": "embeddings",
    "embedding_dense_backward": "gradient of an embedding table",
    "empty_like": "filled by fused kernels",
    "gelu": "GELU outputs",
    "gelu_backward": "gradient of GELU",
    "masked_fill": "masked attention scores",
    "mm": "matrix products",
    "native_dropout": "dropout and its masks",
    "native_dropout_backward": "gradient of dropout",
    "native_layer_norm": "layer norm outputs",
    "native_layer_norm_backward": "gradient of a layer norm",
    "new_empty": "filled by fused kernels",
    "sum": "sums over tokens",
    "tanh": "tanh outputs",
}
_IN_ATTENTION = {
    "add": "attention scores, or rotary sums",
    "bmm": "attention scores, context",
    "div": "scaled attention scores",
    "mul": "scaled attention scores",
    "native_dropout": "attention dropout, masks",
    "native_dropout_backward": "gradient of attention dropout",
    "where": "attention mask",
}
_OUTSIDE_ATTENTION = {"add": "sums", "bmm": "batched products", "mul": "products"}
_BY_CATEGORY = {"weights": "weights", "gradients": "gradients", "inputs": "the batch itself"}


def size(num_bytes: int) -> str:
    """A byte count with a no-break space before its unit."""
    return format_bytes(num_bytes).replace(" ", NO_BREAK)


def sentence(text: str) -> str:
    """A remark with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def unbroken(text: str) -> str:
    """A sentence whose byte counts have no-break spaces before their units."""
    return _SIZE.sub(NO_BREAK, text)


def percent(part: int, whole: int) -> str:
    """A share as people read it: whole percents, and `<1 %` for what is there but small."""
    share = 100 * part / whole if whole else 0.0
    text = "<1" if 0 < share < 0.5 else f"{share:.0f}"
    return f"{text}{NO_BREAK}%"


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> [duration(seconds).replace(NO_BREAK, " ") for seconds in (0.0123, 12.34, 3470, 348_120)]
    ['12.3 ms', '12.3 s', '3,470 s', '96.7 h']
    """
    if seconds >= HOUR_S:
        text = f"{seconds / HOUR_S:,.1f} h"
    elif seconds >= 1:
        text = f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    else:
        text = f"{1e3 * seconds:.3g} ms"
    return text.replace(" ", NO_BREAK)


def phase_name(phase: str, workload: Workload) -> str:
    """A phase in two words; without training, steps are batches."""
    return (_STEP_PHASES if workload.trains else _BATCH_PHASES).get(phase, phase.replace("_", " "))


def target(estimate: Estimate) -> str:
    """What is predicted for: the GPU, or the architecture that stands for one, and torch."""
    major, minor = estimate.compute_capability
    device = estimate.gpu or f"a GPU of sm_{major}{minor}"
    release = estimate.torch_version.partition("+")[0]  # the build here (+cpu) is not the one predicted for
    return f"{device}, torch {release}"


def model_name(name: str) -> str:
    """A model's name for a headline: of a long path, the last parts.

    >>> model_name("bert-base-uncased"), model_name("/a-very-long" * 6 + "/models/mine")
    ('bert-base-uncased', '…/a-very-long/a-very-long/a-very-long/models/mine')
    """
    parts = name.split("/")
    while len("/".join(parts)) > LONGEST_NAME and len(parts) > 2:
        parts = ["…", *parts[2:]]
    return "/".join(parts)


def job(workload: Workload, *, batch: bool = True, seq: bool = True) -> list[str]:
    """The job in short phrases: what runs, on what, and every setting that is not the default."""
    w = workload
    shape = " × ".join(
        ([f"batch {w.batch:,}"] if batch else []) + ([f"{w.seq:,} tokens"] if seq else []),
    )
    phrases = [shape] if shape else []
    if w.num_passes > 1:
        each = f" of {w.micro_batch}" if batch else ""
        phrases.append(f"in {w.num_passes} micro-batches{each}")
    return phrases + in_words(w)


def group_name(group: TensorGroup) -> str:
    """What a group of blocks holds."""
    if group.category in _BY_CATEGORY:
        return _BY_CATEGORY[group.category]
    if group.category == "optimizer":
        return "optimizer state"
    return operator_name(group.operator, group.module)


def operator_name(operator: str, module: str) -> str:
    """What an operator makes, in words; the operator itself where no words are better."""
    if operator.startswith("_scaled_dot_product"):
        return "gradients of attention" if operator.endswith("_backward") else "attention outputs"
    special = _IN_ATTENTION if module.rpartition(".")[2] in ATTENTION_MODULES else _OUTSIDE_ATTENTION
    return special.get(operator) or _OPERATORS.get(operator) or operator.lstrip("_").replace("_", " ")


def peak_moment(peak: PeakMoment, workload: Workload) -> str:
    """When the peak comes: `in the backward pass of a steady step`."""
    where = _PARTS.get(peak.part, f"in {peak.part}")
    of_phase = _OF_PHASE.get(phase_name(peak.phase, workload), "")
    return where if peak.part == "load" else f"{where} {of_phase}".rstrip()


def peak_place(peak: PeakMoment) -> str:
    """What makes the peak, and in which module; empty where nothing is known."""
    if not peak.operator:
        return f"Reached in {peak.module}." if peak.module else ""
    name = operator_name(peak.operator, peak.module).removeprefix("the ")
    of_operator = "" if name == peak.operator else f" ({peak.operator})"
    of_module = f" in {peak.module}" if peak.module else ""
    return f"Reached by the {name}{of_operator}{of_module}."


def shorten_path(path: str, width: int) -> str:
    """A module path in at most `width` characters; its end says most, so the beginning goes."""
    if len(path) <= width:
        return path
    parts = path.split(".")
    while len(parts) > 1 and len(".".join(parts)) + 1 > width:
        parts.pop(0)
    short = "…" + ".".join(parts)
    return short if len(short) <= width else "…" + path[-(width - 1) :] if width > 1 else "…"


def reserved_peak(r: RunRecord) -> str:
    """What a run reserved, what was predicted, and what it was allowed."""
    is_emulated = r.device == "emulated"
    said = [format_bytes(r.measured_reserved_bytes or 0) + (" with the CPU's kernels" if is_emulated else "")]
    if r.budget_bytes is not None:
        said.append(f"budget {format_bytes(r.budget_bytes)}")
    if r.predicted_reserved_bytes is not None:
        predicted = f"predicted {format_bytes(r.predicted_reserved_bytes)}"
        if is_emulated:
            said.append(f"{predicted} with a GPU's, which need other temporaries: the two are not to be compared")
        else:
            said.insert(1, predicted)
            if r.most_reserved_bytes is not None:
                said[1] += f", at most {format_bytes(r.most_reserved_bytes)}"
    return "; ".join(said)


def best_words(r: RunRecord) -> str:
    """The best score of a run, behind a comma; empty where there is none."""
    return "" if r.best_value is None else f", {r.best_metric} {r.best_value:.4f}"


def agreement(c: Comparison) -> str:
    """Whether a prediction agrees with its measurement."""
    return f"Prediction and measurement {'agree' if c.agrees else 'do not agree'}"


def reserved_words(p: Plan) -> str:
    """What a run of a plan reserves: with batches of full length, and at most."""
    predicted, most = (format_bytes(n) for n in (p.predicted_reserved_bytes, p.most_reserved_bytes))
    return f"{predicted} with batches of full length, at most {most} of {format_bytes(p.budget_bytes)} with any lengths"


def run_time(r: RunRecord) -> str:
    """How long a run took; where the CPU computed for a GPU, whose seconds they are."""
    if r.device == "emulated":
        return f"{duration(r.time_s)}, in which the CPU computed for the emulated GPU"
    return f"{duration(r.time_s)}, {r.tokens_per_s:,.0f} tokens/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer, in one line and a few more."""

    tone: Tone
    headline: str
    facts: tuple[str, ...]
    """What the answer rests on."""
    warnings: tuple[str, ...] = ()
    """What it depends on, or costs."""

    @property
    def details(self) -> tuple[str, ...]:
        """Every line below the headline."""
        return (*self.facts, *self.warnings)


def verdict_of(estimate: Estimate, what: str = "Does not fit") -> Verdict:
    """Whether it fits, by how much, and in what; `what` words that it does not."""
    free, capacity = estimate.free_bytes, estimate.capacity_bytes
    most = format_bytes(estimate.safe_reserved_bytes)
    if free is None or capacity is None or estimate.fits is None:
        text = f"At most {most} reserved. No GPU and no amount of memory is given, so whether it fits is left open."
        return Verdict(tone="open", headline=f"Takes {format_bytes(estimate.peak_process_bytes)}", facts=(text,))
    host, limit = estimate.host_bytes, estimate.workload.host_memory
    if limit is not None and host > limit:
        why = f"{format_bytes(host - limit)} too much for the host's memory"
        fact = f"{format_bytes(host)} wait there, of {format_bytes(limit)}."
        return Verdict(tone="bad", headline=f"{what}: {why}", facts=(fact,))
    capacity_words = f"{format_bytes(capacity)}{_on_gpu(estimate)}"
    if not estimate.fits:
        why = f"{format_bytes(-free)} too much" if free < 0 else "memory is too fragmented"
        return Verdict(tone="bad", headline=f"{what}: {why}", facts=(f"{most} to reserve in {capacity_words}.",))
    facts = [f"At most {most} reserved of {capacity_words}."]
    facts += [f"{format_bytes(host)} wait in host memory."] if host else []
    warnings = list(_warnings(estimate))
    is_tight = bool(warnings) or free < TIGHT_SHARE * capacity
    spare = f"{format_bytes(free)} to spare" if free > 0 else "nothing to spare"
    return Verdict(
        tone="tight" if is_tight else "good",
        headline=f"Fits, with {spare}",
        facts=tuple(facts),
        warnings=tuple(warnings),
    )


def _warnings(estimate: Estimate) -> Iterator[str]:
    if estimate.basis == "outside":
        yield OUTSIDE
    if estimate.num_retries:
        times = "once" if estimate.num_retries == 1 else f"{estimate.num_retries} times"
        yield f"The allocator must empty its cache {times} to stay inside, which costs time."
    if estimate.fits_cold is False:
        yield COLD


def _on_gpu(estimate: Estimate) -> str:
    if estimate.total_memory_bytes is None or estimate.workload.memory is not None:
        return ""
    context = format_bytes(estimate.context_bytes, digits=0)
    bound = "≤ " if estimate.context_basis == "bounded" else ""
    return f" ({estimate.gpu}: {format_bytes(estimate.total_memory_bytes)}, CUDA takes {bound}{context})"
