"""Tensors in a safetensors file, written one after another from wherever they lie, hashed on the way.

The library's own writer takes all tensors on the host at once and reports a full disk as an error of its own kind.
Here a tensor is on the host only while it is written, and the disk's error is the system's.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the format (safetensors 0.8)."""
ALIGNMENT = 8
READ_BYTES = 2**22


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write plain tensors, and see them on the disk.

    Raises:
        OSError: as the system says it: a full disk, a folder that is gone.
    """
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    # out of sight of an emulated GPU, which would take host memory for its own
    with path.open("wb") as file, _disable_current_modes(), torch.no_grad():
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            if tensor.numel():
                file.write(_bytes(tensor))
        sync(file)


def write_text(path: Path, text: str) -> None:
    """Write text, and see it on the disk."""
    with path.open("wb") as file:
        file.write(text.encode())
        sync(file)


def sync(file: object) -> None:
    """Wait until the disk has a file."""
    file.flush()  # type: ignore[attr-defined]
    os.fsync(file.fileno())  # type: ignore[attr-defined]


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's entries; systems that cannot are let be."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    made = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            made.update(chunk)
    return made.hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
