"""`inspect_checkpoint`: what a checkpoint holds and what is wrong with it, from headers and configuration only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramfit.checkpoints.checks import check_config, check_dtypes, check_fit, check_names, check_shapes, summarize
from vramfit.checkpoints.files import CheckpointFiles, find_checkpoint
from vramfit.checkpoints.key_checks import (
    check_family,
    check_missing,
    check_unexpected,
    fresh_names,
    refuse_absurd_depth,
)
from vramfit.checkpoints.matching import Matching, Subject, match, without_other_head
from vramfit.checkpoints.reading import (
    HeadFiles,
    check_head,
    check_head_values,
    check_values,
    find_head_files,
    read_entries,
)
from vramfit.checkpoints.safetensors_file import TensorEntry
from vramfit.checkpoints.tokenizer import check_tokenizer
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel, build_meta, resolve
from vramfit.models.configuration import read_config_file
from vramfit.records.finding import SEVERITIES, Finding
from vramfit.tasks import DEFAULT

if TYPE_CHECKING:
    from torch import nn

CHECKS = (check_missing, check_shapes, check_unexpected, check_names, check_dtypes, check_tokenizer, summarize)
"""Every check of weights that are of the architecture which the configuration names, in this order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection(Matching):
    """Everything known of a checkpoint before it is loaded: what is in it, where that goes, and what is wrong."""

    name: str
    """What the model was asked for by."""
    files: CheckpointFiles
    """The weight files."""
    findings: tuple[Finding, ...]
    """All findings, most severe first."""
    entries: tuple[TensorEntry, ...]
    """Every tensor of the checkpoint."""
    fresh: tuple[str, ...] = ()
    """Model names to be initialised: a new head, a pooler, what has another size; never a part of the encoder."""
    head: HeadFiles = field(default_factory=HeadFiles)
    """The tensors of a head that has files of its own."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, in the dtypes they are saved in."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def renamed(self) -> dict[str, str]:
        """Checkpoint name → model name, for the targets whose name changes."""
        return {old: new for old, new in self.targets.items() if old != new}

    @property
    def fatal(self) -> bool:
        """Whether loading must not be tried."""
        return any(finding.fatal for finding in self.findings)

    def check(self) -> None:
        """Raise all fatal findings as one `CheckpointError`, with the first one's hint; nothing when there is none."""
        fatal = [finding for finding in self.findings if finding.fatal]
        if fatal:
            what = "; ".join(finding.what for finding in fatal)
            hint = next((finding.fix for finding in fatal if finding.fix), None)
            raise CheckpointError(what, file=str(self.files.paths[0]), hint=hint)


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
    config_data = _config_data(resolved)
    early = check_config(resolved.config, config_data)
    files = find_checkpoint(resolved.folder)
    entries = read_entries(files)
    refuse_absurd_depth(resolved, entries)
    meta = _build(resolved, early)
    head = find_head_files(resolved, meta)
    matching = match(entries, meta)
    matching = replace(matching, missing=tuple(name for name in matching.missing if name not in head.entries))
    subject = Subject(
        resolved=resolved,
        config_data=config_data,
        model=meta,
        files=files,
        entries=entries,
        matching=matching,
        num_labels_asked=num_labels,
    )
    subject = replace(subject, matching=(matching := without_other_head(subject)))
    findings = [*early, *(list(check_family(subject)) or [f for check in CHECKS for f in check(subject)])]
    findings += [*check_head(resolved, head), *check_fit(_num_parameters(meta), gpu_free_bytes)]
    if scan:
        findings += [*check_values(entries, files.kind), *check_head_values(head)]
    return Inspection(
        **{part.name: getattr(matching, part.name) for part in fields(matching)},
        name=resolved.name,
        files=files,
        findings=_by_severity(findings),
        entries=entries,
        fresh=fresh_names(subject),
        head=head,
    )


def inspect_config(resolved: ResolvedModel, *, gpu_free_bytes: int | None = None) -> tuple[Finding, ...]:
    """What can be said of a model that has no weights here: its configuration, and whether it would fit.

    Raises:
        CheckpointError: no model can be built from the configuration.
    """
    early = check_config(resolved.config, _config_data(resolved))
    meta = _build(resolved, early)
    num_parameters = _num_parameters(meta)
    good = f"the configuration of {resolved.name} gives a {type(meta).__name__} of {num_parameters:,} parameters"
    return _by_severity([*early, *check_fit(num_parameters, gpu_free_bytes), Finding.ok("config", good)])


def _num_parameters(model: "nn.Module") -> int:
    return sum(p.numel() for p in model.parameters())


def _by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda f: (not f.fatal, -SEVERITIES.index(f.severity))))


def _config_data(resolved: ResolvedModel) -> Mapping[str, Any]:
    """The content of `config.json`; without a file, the configuration as transformers writes it."""
    if resolved.folder is not None and (resolved.folder / "config.json").is_file():
        return read_config_file(resolved.folder / "config.json")
    return resolved.config.to_dict() if resolved.config is not None else {}


def _build(resolved: ResolvedModel, early: list[Finding]) -> "nn.Module":
    """The model on the meta device; where it cannot be built, a fatal finding of its configuration is the error."""
    try:
        return build_meta(resolved)
    except CheckpointError as error:
        known = next((f for f in early if f.fatal), None)
        if known is None:
            raise
        raise CheckpointError(known.what, file=error.file, hint=known.fix) from None
