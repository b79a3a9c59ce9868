"""All tensors of a checkpoint, whatever its kind and however many its files: described, opened, scanned for NaN."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vramfit.checkpoints.files import DOWNLOAD_AGAIN, SAVE_AGAIN, CheckpointFiles, Kind, bad_file, one_line, shown
from vramfit.checkpoints.pickle_file import load_state_dict, read_bin
from vramfit.checkpoints.safetensors_file import FLOATS, TORCH_DTYPES, TensorEntry, read_header
from vramfit.records.finding import Finding

if TYPE_CHECKING:
    import torch

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
