"""`Finding`: one thing a check has to say; `LoadReport`: one load; and how records show themselves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

_find: Callable[[], Any] | None = None


def use_renderer(find: Callable[[], Any]) -> None:
    """Have records shown by the module that `find` gives: by its `text_of` and `html_of`.

    It is asked for when a record is shown: until then nothing need be imported.
    """
    global _find
    _find = find


class Displayed:
    """A record as a prompt shows it, and a notebook where there is a drawing of it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return object.__repr__(self) if _find is None else str(_find().text_of(self))

    def _repr_html_(self) -> str | None:
        made: str | None = None if _find is None else _find().html_of(self)
        return made


Severity = Literal["ok", "info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One result of one check."""

    check: str
    """Which check found it: a stable, dotted name such as `environment.driver`."""
    severity: Severity
    """`ok` nothing to do; `info` good to know; `warning` will cost something; `error` will fail."""
    what: str
    """One line: what was found, with numbers."""
    why: str = ""
    """One line: why it matters."""
    fix: str = ""
    """One line: what to do; a command where there is one."""
    fatal: bool = False
    """Work must not go on."""

    @staticmethod
    def ok(check: str, what: str) -> "Finding":
        """Nothing to do."""
        return Finding(check=check, severity="ok", what=what)

    @staticmethod
    def info(check: str, what: str, why: str = "", fix: str = "") -> "Finding":
        """Good to know."""
        return Finding(check=check, severity="info", what=what, why=why, fix=fix)

    @staticmethod
    def warning(check: str, what: str, why: str = "", fix: str = "") -> "Finding":
        """Will cost something."""
        return Finding(check=check, severity="warning", what=what, why=why, fix=fix)

    @staticmethod
    def error(check: str, what: str, why: str = "", fix: str = "", *, fatal: bool = False) -> "Finding":
        """Will fail."""
        return Finding(check=check, severity="error", what=what, why=why, fix=fix, fatal=fatal)


def worst(findings: "list[Finding] | tuple[Finding, ...]") -> Severity:
    """The gravest severity among findings; `ok` when there are none."""
    return max((f.severity for f in findings), key=SEVERITIES.index, default="ok")


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

    @property
    def weights_in_words(self) -> str:
        """The type of the weights for people, such as "fp32 with 12 linear layers in int8"."""
        quantized = f" with {self.num_quantized} linear layers in {self.quantize}" if self.quantize else ""
        return f"{self.precision}{quantized}"
