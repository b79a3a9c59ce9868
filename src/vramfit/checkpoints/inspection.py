"""`inspect_checkpoint`: what a checkpoint holds and what is wrong with it, from headers and configuration only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.files import CheckpointFiles
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel
from vramfit.records.finding import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeMismatch:
    """A tensor that the checkpoint has in another shape than the model."""

    name: str
    """The model's name of it."""
    entry: TensorEntry
    """The tensor in the checkpoint."""
    expected: tuple[int, ...]
    """The model's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Everything known of a checkpoint before it is loaded."""

    name: str
    """What the model was asked for by."""
    files: CheckpointFiles
    """The weight files."""
    findings: tuple[Finding, ...]
    """What there is to say, gravest first."""
    entries: tuple[TensorEntry, ...]
    """Every tensor of the checkpoint."""
    num_bytes: int
    """Bytes of all tensors, in the dtypes they are saved in."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint name → model name, for every tensor that the model takes with the right shape."""
    missing: tuple[str, ...] = ()
    """Model names that the checkpoint lacks, as transformers counts them (tied ones are there if one is)."""
    unexpected: tuple[str, ...] = ()
    """Checkpoint names that the model has no place for."""
    fresh: tuple[str, ...] = ()
    """Model names to be initialised: a new head, a pooler; never a part of the encoder."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint name → model name, for the targets whose name changes."""
    mismatched: tuple[ShapeMismatch, ...] = ()
    """Tensors of another shape than the model's; those also in `fresh` are replaced, the others are fatal."""
    converted: tuple[str, ...] = ()
    """Checkpoint names that transformers splits or joins on the way in; they are in no `targets`."""

    @property
    def fatal(self) -> bool:
        """Whether loading must not be tried."""
        return any(finding.fatal for finding in self.findings)

    def check(self) -> None:
        """Raise the first fatal finding as a `CheckpointError`; nothing when there is none."""
        for finding in self.findings:
            if finding.fatal:
                raise CheckpointError(finding.what, file=str(self.files.paths[0]), hint=finding.fix or None)


def inspect_checkpoint(
    model: "str | Path | ResolvedModel",
    *,
    task: str = "sequence-classification",
    scan: bool = False,
    gpu_free_bytes: int | None = None,
    num_labels: int | None = None,
) -> Inspection:
    """Inspect a folder's checkpoint against the model its configuration describes; loads no weights.

    Args:
        model: a folder with `config.json` and weights, or what `models.resolve` made of one.
        task: the head wanted; ignored when `model` is already resolved.
        scan: also read the data, in bounded chunks, for NaN, infinite and all-zero tensors.
        gpu_free_bytes: free memory of the GPU at hand; None to leave that check out.
        num_labels: size of the head wanted; None keeps the configuration's.

    Raises:
        CheckpointError: files that are damaged, unsafe or absent; names file and tensor.
        UnknownModel, WorkloadError: as `models.resolve` raises them.
    """
    raise NotImplementedError
