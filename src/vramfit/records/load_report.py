"""`LoadReport`: what a load read, what it took on the way, what it left behind; and logits compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vramfit.records.display import Displayed
from vramfit.records.finding import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitComparison:
    """Outputs of a model beside those of the same model in full precision."""

    num_sentences: int
    """Samples that both saw."""
    inputs: str
    """`sentences`, or `random ids` where the folder has no tokenizer."""
    max_abs_difference: float
    """The largest difference of two outputs."""
    max_abs_output: float
    """The largest output of the full-precision model, to compare it with."""
    cosine: float
    """The smallest cosine of a sample's outputs: 1 where they point the same way."""
    label_agreement: float | None
    """Share of samples (or tokens) whose highest output is the same; None for an encoder alone."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LoadReport(Displayed):
    """One load, finished."""

    model: str
    """What the model was asked for by."""
    model_class: str
    """The transformers class that was built."""
    task: str
    """The head."""
    device: str
    """Where it lies."""
    precision: str
    """The weights' precision, as a workload names it."""
    quantize: str | None = None
    """How linear weights are kept in fewer bits."""
    num_quantized: int = 0
    """Linear layers that were quantized."""
    files: tuple[str, ...] = ()
    """Weight files, by name; empty for random weights."""
    num_tensors: int = 0
    """Tensors taken from the files."""
    num_bytes: int = 0
    """Bytes taken from the files."""
    time_s: float
    """Seconds from the first look at the checkpoint to the model; imports are left out."""
    final_device_bytes: int | None = None
    """Allocated on the GPU by the load once it was done; None elsewhere."""
    peak_device_bytes: int | None = None
    """The most it had allocated on the GPU on the way; None elsewhere."""
    largest_tensor_bytes: int = 0
    """The largest tensor as it lies on the device."""
    host_anonymous_bytes: int | None = None
    """The most the process's own (not file-backed) memory had grown; None where the system does not say."""
    num_layers: int = 0
    """Layers that have weights of their own."""
    num_resident_layers: int = 0
    """Those that stay on the device; the others come for their turn."""
    fresh: tuple[str, ...] = ()
    """Tensors that the checkpoint does not have, initialised here: they have learned nothing yet."""
    dropped: tuple[str, ...] = ()
    """Tensors of the checkpoint that the model has no place for."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old name → the name the model knows, where they differ."""
    findings: tuple[Finding, ...] = ()
    """What the inspection before the load had to say."""
    comparison: LogitComparison | None = None
    """Outputs beside those of full precision, where that was asked for."""
