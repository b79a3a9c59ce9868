"""All tensors of a checkpoint, whatever its kind and however many its files: described, opened, scanned for NaN.

The layers of a head that pools have a file each beside the encoder's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vramfit.checkpoints.files import (
    DOWNLOAD_AGAIN,
    SAVE_AGAIN,
    CheckpointFiles,
    Kind,
    bad_file,
    find_checkpoint,
    one_line,
    shown,
    sizes,
    some,
)
from vramfit.checkpoints.pickle_file import load_state_dict, read_bin
from vramfit.checkpoints.safetensors_file import FLOATS, TORCH_DTYPES, TensorEntry, read_header
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel
from vramfit.models.sentence_folder import find_prompt
from vramfit.records.finding import Finding
from vramfit.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

CHUNK_BYTES = 16 * 2**20
MAX_LISTED = 20


def read_entries(files: CheckpointFiles) -> tuple[TensorEntry, ...]:
    """Every tensor of a checkpoint, from headers only.

    Raises:
        CheckpointError: a damaged file, a tensor that two shards hold, or one that its shard lacks.
    """
    read = read_header if files.kind == "safetensors" else read_bin
    found: dict[str, TensorEntry] = {}
    for path in files.paths:
        for entry in read(path):
            if entry.name in found:
                raise bad_file(
                    path,
                    f"holds tensor {shown(entry.name)}, and so does {found[entry.name].file.name}",
                    SAVE_AGAIN,
                    tensor=entry.name,
                )
            found[entry.name] = entry
    _check_index(files, found)
    return tuple(found.values())


def _check_index(files: CheckpointFiles, found: dict[str, TensorEntry]) -> None:
    """Every tensor that the index promises must lie in the shard it names."""
    for name, shard in files.shard_of.items():
        if name not in found:
            raise bad_file(
                files.folder / shard,
                f"lacks tensor {shown(name)}, which {files.index.name if files.index else 'the index'} puts there",
                DOWNLOAD_AGAIN,
                tensor=name,
            )
        if found[name].file.name != shard:
            raise bad_file(
                found[name].file,
                f"holds tensor {shown(name)}, which the index puts into {shown(shard)}",
                SAVE_AGAIN,
                tensor=name,
            )


@contextmanager
def opened(path: Path, kind: Kind) -> "Iterator[Callable[[str], torch.Tensor]]":
    """Inside, the tensors of a file by name, as views of the mapped file; a view keeps its mapping.

    Raises:
        CheckpointError: the file is damaged.
    """
    if kind == "bin":
        yield load_state_dict(path).__getitem__
        return
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise bad_file(path, f"is damaged: {one_line(error)}", DOWNLOAD_AGAIN) from None
    with file:
        yield file.get_tensor


class Scanned(NamedTuple):
    """What was seen in one tensor."""

    num_nan: int
    num_infinite: int
    all_zero: bool


def check_values(entries: Sequence[TensorEntry], kind: Kind) -> list[Finding]:
    """Read every floating-point tensor once; a finding for each that is not sound, at most 20.

    Raises:
        CheckpointError: a file that has changed since its header was read.
    """
    findings: list[Finding] = []
    for path, of_file in groupby(entries, key=lambda entry: entry.file):
        with opened(path, kind) as tensor_of:
            for entry in of_file:
                if entry.dtype in FLOATS and entry.dtype in TORCH_DTYPES and entry.num_elements:
                    findings += _judge(entry, scan_tensor(tensor_of(entry.name)))
                if len(findings) >= MAX_LISTED:
                    return findings
    return findings or [Finding.ok("scan", "every number is finite, no weight is all zero")]


def scan_tensor(tensor: "torch.Tensor") -> Scanned:
    """Count what is not a number in one tensor; 16 MiB of it are looked at at a time."""
    import torch

    num_nan = num_infinite = 0
    all_zero = True
    for chunk in torch.split(tensor.detach().reshape(-1), CHUNK_BYTES // tensor.element_size()):
        values = chunk.to(torch.float32) if chunk.element_size() == 1 else chunk
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            nan = int(torch.isnan(values).sum())
            num_nan += nan
            num_infinite += values.numel() - int(finite.sum()) - nan
        all_zero = all_zero and not bool(values.any())
    return Scanned(num_nan=num_nan, num_infinite=num_infinite, all_zero=all_zero)


def _judge(entry: TensorEntry, scanned: Scanned) -> Iterator[Finding]:
    where = f"tensor {shown(entry.name)} in {entry.file.name}"
    if scanned.num_nan or scanned.num_infinite:
        count, word = (scanned.num_nan, "NaN") if scanned.num_nan else (scanned.num_infinite, "infinite")
        yield Finding.error(
            "scan.not_finite",
            f"{where}: {count:,} of {entry.num_elements:,} numbers are {word}",
            "every output will be NaN; the training run that saved it had diverged",
            "take an earlier checkpoint, or download the file again",
            fatal=True,
        )
    elif scanned.all_zero and _should_not_be_zero(entry):
        yield Finding.warning(
            "scan.all_zero",
            f"{where}: all {entry.num_elements:,} numbers are 0",
            "no training leaves a weight like that; the file may have been cut and filled up",
            "compare the file's sha256 with the one on its page",
        )


def _should_not_be_zero(entry: TensorEntry) -> bool:
    """Biases start at zero and may stay there; a matrix or the weight of a norm may not."""
    return len(entry.shape) > 1 or entry.name.endswith((".weight", ".gamma"))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFiles:
    """Where the tensors of a head lie."""

    files: tuple[CheckpointFiles, ...] = ()
    entries: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Model name → the tensor for it; every tensor that the head has."""


def find_head_files(resolved: ResolvedModel, model: "nn.Module") -> HeadFiles:
    """The tensors of the layers after pooling; none for a model without such a head.

    Args:
        model: on the meta device, made of the same parts.

    Raises:
        CheckpointError: a file that is absent or damaged, a tensor that it lacks, has in another shape, or has no
            place for.
    """
    from vramfit.tasks.parts.pooling import NAME, head_of

    head = head_of(model)
    if head is None or resolved.parts is None:
        return HeadFiles()
    files: list[CheckpointFiles] = []
    entries: dict[str, TensorEntry] = {}
    for place, layer in enumerate(head.layers):
        folder = resolved.parts.layers[place].folder
        shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        if not shapes or folder is None:
            continue
        files.append(find_checkpoint(folder))
        found = {entry.name: entry for entry in read_entries(files[-1])}
        _check(files[-1], found, shapes)
        entries |= {f"{NAME}.layers.{place}.{name}": found[name] for name in shapes}
    return HeadFiles(files=tuple(files), entries=entries)


def _check(files: CheckpointFiles, found: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    path = files.paths[0]
    if lost := [name for name in shapes if name not in found]:
        raise bad_file(path, f"lacks {some(lost)}, which its config.json asks for", SAVE_AGAIN, tensor=lost[0])
    if surplus := [name for name in found if name not in shapes]:
        what = f"holds {some(surplus)}, which its config.json has no place for"
        raise bad_file(path, what, SAVE_AGAIN, tensor=surplus[0])
    for name, shape in shapes.items():
        entry = found[name]
        if entry.shape != shape:
            what = f"has {shown(name)} in shape {sizes(entry.shape)}, and its config.json says {sizes(shape)}"
            raise bad_file(path, what, "use the config.json that belongs to these weights", tensor=name)
        if entry.dtype not in FLOATS:
            raise bad_file(path, f"has {shown(name)} in {entry.dtype}, not in floating point", SAVE_AGAIN, tensor=name)


def check_head(resolved: ResolvedModel, head: HeadFiles) -> Iterator[Finding]:
    """What a folder says of its head."""
    parts = resolved.parts
    if parts is None:
        return
    what = f"vectors are pooled by {parts.pooling}"
    if parts.layers:
        what += f", then go through {', '.join(layer.kind for layer in parts.layers)}"
    if head.entries:
        num_bytes = sum(entry.num_bytes for entry in head.entries.values())
        what += f" ({len(head.entries)} tensors, {format_bytes(num_bytes)})"
    yield Finding.ok("embedding.head", what)
    try:
        prompt = find_prompt(parts)
    except CheckpointError as error:
        yield Finding.warning("embedding.prompt", str(error), "vramfit makes no vectors with it", error.hint or "")
        return
    if prompt:
        yield Finding.ok("embedding.prompt", f"{shown(prompt)!r} goes before every text, as the folder says")


def check_head_values(head: HeadFiles) -> Sequence[Finding]:
    """Findings about numbers that are not sound, where data is read."""
    found = [f for files in head.files for f in check_values(read_entries(files), files.kind)]
    return [finding for finding in found if finding.severity != "ok"]
