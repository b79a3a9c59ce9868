"""The header of a safetensors file, read with suspicion: every way it can be bad has its own message.

The format (safetensors 0.8, README and `tensor.rs`): 8 bytes with the header's length, little-endian; a JSON
object name → {dtype, shape, data_offsets}; then the data, tensor after tensor, without holes.
"""

import os
from pathlib import Path

from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.header_text import Described, walk
from vramfit.checkpoints.wording import DOWNLOAD_AGAIN, SAVE_AGAIN, bad_file, shown

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_OTHER_FORMATS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the weights", "run `git lfs pull` in the repository"),
    (b"PK\x03\x04", "a zip file, as torch.save writes it, not safetensors", "rename it to pytorch_model.bin"),
    (b"\x80\x02", "a pickle, not safetensors", "rename it to pytorch_model.bin"),
    (b"\x89HDF", "an HDF5 file of TensorFlow, not safetensors", "download model.safetensors of the model"),
    (b"<", "a web page, not weights", "download it with `hf download`, or from the page's download link"),
    (b"GGUF", "a GGUF file of llama.cpp, not safetensors", "download model.safetensors of the model"),
)


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of one safetensors file, in the order of their bytes; reads nothing but the header.

    Raises:
        CheckpointError: the file is damaged or is something else; names file, tensor and what is wrong.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(40), size)
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise bad_file(
            path, f"cannot be read: {(error.strerror or str(error)).lower()}", "check its permissions"
        ) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_file(path, f"has a header that is not UTF-8 (byte {8 + error.start})", DOWNLOAD_AGAIN) from None
    del raw
    described = sorted(walk(path, text), key=lambda d: (d.begin, d.end))
    _check_layout(path, described, size - 8 - length)
    start = 8 + length
    return tuple(
        TensorEntry(name=d.name, dtype=d.dtype, shape=d.shape, begin=start + d.begin, end=start + d.end, file=path)
        for d in described
    )


def _header_length(path: Path, head: bytes, size: int) -> int:
    if size == 0:
        raise bad_file(path, "is empty (0 bytes)", DOWNLOAD_AGAIN)
    for magic, what, fix in _OTHER_FORMATS:
        if head.startswith(magic) and head[8:9] != b"{":
            raise bad_file(path, f"is {what}", fix)
    if size < 8:
        raise bad_file(
            path, f"is {size} bytes; a safetensors file begins with 8 that give its header's length", DOWNLOAD_AGAIN
        )
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise bad_file(
            path,
            f"says its header is {length:,} bytes; the format allows {MAX_HEADER_BYTES:,}: no safetensors",
            DOWNLOAD_AGAIN,
        )
    if length > size - 8:
        raise bad_file(
            path, f"says its header is {length:,} bytes, but only {size - 8:,} follow: it is cut off", DOWNLOAD_AGAIN
        )
    if length < 2:
        raise bad_file(path, f"says its header is {length} bytes, too short for any", DOWNLOAD_AGAIN)
    return length


def _check_layout(path: Path, described: list[Described], num_data_bytes: int) -> None:
    """The tensors must lie one after another and fill the data exactly."""
    position, before = 0, ""
    for d in described:
        if d.begin < position:
            raise bad_file(
                path,
                f"puts tensor {shown(d.name)} over {shown(before)}: their bytes overlap",
                SAVE_AGAIN,
                tensor=d.name,
            )
        if d.begin > position:
            raise bad_file(
                path,
                f"leaves a hole of {d.begin - position:,} bytes before tensor {shown(d.name)}",
                SAVE_AGAIN,
                tensor=d.name,
            )
        if d.end > num_data_bytes:
            raise bad_file(
                path,
                f"is cut off: it holds {num_data_bytes:,} bytes of data, but tensor {shown(d.name)} ends at {d.end:,}",
                DOWNLOAD_AGAIN,
                tensor=d.name,
            )
        position, before = d.end, d.name
    if position < num_data_bytes:
        raise bad_file(
            path, f"has {num_data_bytes - position:,} bytes after its last tensor that belong to none", DOWNLOAD_AGAIN
        )
