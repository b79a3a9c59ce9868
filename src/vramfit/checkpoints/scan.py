"""The data itself, read in bounded pieces: NaN, infinite and all-zero tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vramfit.checkpoints.entry import DTYPE_BITS, FLOATS, TORCH_DTYPES, TensorEntry
from vramfit.checkpoints.wording import DOWNLOAD_AGAIN, bad_file, shown
from vramfit.records.finding import Finding

CHUNK_BYTES = 16 * 2**20
MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Scanned:
    """What was seen in one tensor."""

    num_nan: int
    num_infinite: int
    all_zero: bool


def check_values(entries: Sequence[TensorEntry]) -> list[Finding]:
    """Read every floating-point tensor once; a finding for each that is not sound, at most 20.

    Raises:
        CheckpointError: a file that ends before its tensors do.
    """
    findings: list[Finding] = []
    for entry in entries:
        if entry.dtype in FLOATS and entry.dtype in TORCH_DTYPES and entry.num_elements:
            findings += _judge(entry, scan_tensor(entry))
        if len(findings) >= MAX_LISTED:
            break
    return findings or [Finding(check="scan", severity="ok", what="every number is finite, no weight is all zero")]


def scan_tensor(entry: TensorEntry) -> Scanned:
    """Count what is not a number in one tensor; at most 16 MiB of it are in memory at a time."""
    import torch

    dtype = getattr(torch, TORCH_DTYPES[entry.dtype])
    num_nan = num_infinite = 0
    all_zero = True
    for chunk in _chunks(entry):
        values = torch.frombuffer(chunk, dtype=dtype)
        if values.element_size() == 1:
            values = values.to(torch.float32)
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            nan = int(torch.isnan(values).sum())
            num_nan += nan
            num_infinite += values.numel() - int(finite.sum()) - nan
        all_zero = all_zero and not bool(values.any())
    return Scanned(num_nan=num_nan, num_infinite=num_infinite, all_zero=all_zero)


def _chunks(entry: TensorEntry) -> Iterator[bytearray]:
    item_bytes = DTYPE_BITS[entry.dtype] // 8
    step = CHUNK_BYTES // item_bytes * item_bytes
    path = Path(entry.file)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(entry.begin)
            left = entry.end - entry.begin
            while left:
                chunk = bytearray(min(step, left))
                if file.readinto(chunk) != len(chunk):
                    raise bad_file(path, f"ends inside tensor {shown(entry.name)}", DOWNLOAD_AGAIN, tensor=entry.name)
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise bad_file(
            path, f"cannot be read: {(error.strerror or str(error)).lower()}", DOWNLOAD_AGAIN, tensor=entry.name
        ) from None


def _judge(entry: TensorEntry, scanned: Scanned) -> list[Finding]:
    where = f"tensor {shown(entry.name)} in {entry.file.name}"
    for count, word in ((scanned.num_nan, "NaN"), (scanned.num_infinite, "infinite")):
        if count:
            return [
                Finding(
                    check="scan.not_finite",
                    severity="error",
                    what=f"{where}: {count:,} of {entry.num_elements:,} numbers are {word}",
                    why="every output will be NaN; the training run that saved it had diverged",
                    fix="take an earlier checkpoint, or download the file again",
                    fatal=True,
                )
            ]
    if scanned.all_zero and _should_not_be_zero(entry):
        return [
            Finding(
                check="scan.all_zero",
                severity="warning",
                what=f"{where}: all {entry.num_elements:,} numbers are 0",
                why="no training leaves a weight like that; the file may have been cut and filled up",
                fix="compare the file's sha256 with the one on its page",
            )
        ]
    return []


def _should_not_be_zero(entry: TensorEntry) -> bool:
    """Biases start at zero and may stay there; a matrix or the weight of a norm may not."""
    return len(entry.shape) > 1 or entry.name.endswith((".weight", ".gamma"))
