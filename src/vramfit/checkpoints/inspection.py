"""`inspect_checkpoint`: what a checkpoint holds and what is wrong with it, from headers and configuration only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramfit.checkpoints.config_checks import check_config
from vramfit.checkpoints.files import CheckpointFiles, find_checkpoint
from vramfit.checkpoints.key_checks import (
    check_family,
    check_missing,
    check_unexpected,
    fresh_names,
    refuse_absurd_depth,
)
from vramfit.checkpoints.matching import ShapeMismatch, Subject, match
from vramfit.checkpoints.reading import check_values, read_entries
from vramfit.checkpoints.safetensors_file import TensorEntry
from vramfit.checkpoints.tokenizer import check_tokenizer
from vramfit.checkpoints.weight_checks import (
    check_dtypes,
    check_fit,
    check_names,
    check_shapes,
    summary,
    weights_against_gpu,
)
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel, build_meta, resolve
from vramfit.models.configuration import read_config_file
from vramfit.records.finding import SEVERITIES, Finding
from vramfit.tasks import DEFAULT

if TYPE_CHECKING:
    from torch import nn


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
    task: str = DEFAULT,
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
        num_labels: size of the head that was asked for; None keeps the configuration's. Give it also with a
            resolved model whose head was resized, so that another size in the checkpoint means a new head.

    Raises:
        CheckpointError: files that are damaged, unsafe or absent; names file and tensor.
        UnknownModel, WorkloadError: as `models.resolve` raises them.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve(model, task=task, num_labels=num_labels)
    if resolved.folder is None:
        raise CheckpointError(
            f"{resolved.name} has no weights on this machine",
            hint="give a folder with config.json and model.safetensors; `hf download` makes one",
        )
    early = check_config(resolved.config, _config_data(resolved))
    subject = _gather(resolved, resolved.folder, early, num_labels)
    findings = [*early, *_judge(subject), *check_fit(subject, gpu_free_bytes)]
    if scan:
        findings += check_values(subject.entries, subject.files.kind)
    return _inspection(subject, findings)


def _gather(resolved: ResolvedModel, folder: Path, early: list[Finding], num_labels: int | None) -> Subject:
    """The files, their tensors and the model, laid side by side."""
    files = find_checkpoint(folder)
    entries = read_entries(files)
    refuse_absurd_depth(resolved, entries)
    model = _build(resolved, early)
    return Subject(
        resolved=resolved,
        config_data=_config_data(resolved),
        model=model,
        files=files,
        entries=entries,
        matching=match(entries, model),
        num_labels_asked=num_labels,
    )


def inspect_config(resolved: ResolvedModel, *, gpu_free_bytes: int | None = None) -> tuple[Finding, ...]:
    """What can be said of a model that has no weights here: its configuration, and whether it would fit.

    Raises:
        CheckpointError: no model can be built from the configuration.
    """
    early = check_config(resolved.config, _config_data(resolved))
    meta = _build(resolved, early)
    num_parameters = sum(p.numel() for p in meta.parameters())
    findings = [*early, *weights_against_gpu(num_parameters, gpu_free_bytes)]
    good = f"the configuration of {resolved.name} gives a {type(meta).__name__} of {num_parameters:,} parameters"
    return _by_gravity([*findings, Finding(check="config", severity="ok", what=good)])


def _judge(subject: Subject) -> list[Finding]:
    """Every check of the weights; when they are of another architecture, only that."""
    strange = check_family(subject)
    if strange:
        return strange
    return [
        *check_missing(subject),
        *check_shapes(subject),
        *check_unexpected(subject),
        *check_names(subject),
        *check_dtypes(subject),
        *check_tokenizer(subject),
        *summary(subject),
    ]


def _inspection(subject: Subject, findings: list[Finding]) -> Inspection:
    matching = subject.matching
    return Inspection(
        name=subject.resolved.name,
        files=subject.files,
        findings=_by_gravity(findings),
        entries=tuple(subject.entries),
        num_bytes=sum(entry.num_bytes for entry in subject.entries),
        targets=matching.targets,
        missing=matching.missing,
        unexpected=matching.unexpected,
        fresh=fresh_names(subject),
        renamed={old: new for old, new in matching.targets.items() if old != new},
        mismatched=matching.mismatched,
        converted=matching.converted,
    )


def _by_gravity(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda f: (not f.fatal, -SEVERITIES.index(f.severity))))


def _config_data(resolved: ResolvedModel) -> Mapping[str, Any]:
    """The configuration as its file has it; where there is no file, as transformers tells it."""
    if resolved.folder is not None and (resolved.folder / "config.json").is_file():
        return read_config_file(resolved.folder / "config.json")
    return resolved.config.to_dict() if resolved.config is not None else {}


def _build(resolved: ResolvedModel, early: list[Finding]) -> "nn.Module":
    """The model on the meta device; where it cannot be built, what the checks already know explains it best."""
    try:
        return build_meta(resolved)
    except CheckpointError as error:
        known = next((f for f in early if f.fatal), None)
        if known is None:
            raise
        raise CheckpointError(known.what, file=error.file, hint=known.fix) from None
