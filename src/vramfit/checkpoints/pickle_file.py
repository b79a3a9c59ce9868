"""The tensors of a `pytorch_model.bin`, mapped by `torch.load` with `weights_only`, which runs nothing of the file.

torch.save writes a zip with `data.pkl` and one raw member a storage; before torch 1.6 it wrote five pickles, then
the raw storages. torch.load runs out of memory or ends the process on some files that were made to do so, so their
opcodes are counted, and the names in them looked at, before.
"""

import io
import os
import pickletools
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vramfit.checkpoints.files import DOWNLOAD_AGAIN, bad_file, one_line, ran_out, reason, shown
from vramfit.checkpoints.safetensors_file import OTHER_FORMATS, TORCH_DTYPES, TensorEntry
from vramfit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

MAX_PICKLE_BYTES = 4 * 10**6
"""A tensor takes about 130 bytes and 32 opcodes; the raw storages lie outside."""
MAX_OPCODES = 500_000
MAX_TUPLES = 60_000
"""Four a tensor. Python overruns the C stack when it hashes some 100,000 tuples that lie in each other."""
MAX_DIRECTORY_BYTES = 32 * 10**6
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_NUM_LEGACY_PICKLES = 5
"""Magic number, protocol, byte order, state dict, storage keys."""

_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat")
_NAMES = {
    "collections.OrderedDict",
    "torch.Size",
    *(f"torch.{name}Storage" for name in (*_STORAGES, "Untyped")),
    "torch.storage.UntypedStorage",
    *(f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "parameter")),
    *(f"torch.{name}" for name in TORCH_DTYPES.values()),
}
"""What the pickle of a state dict may name; `torch.load` allows more, such as `bytearray`, which takes any memory."""
_CALLS = ("INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")
"""Opcodes that make objects and that torch.save never writes."""

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "net")
"""Where a training checkpoint keeps the model."""


def read_bin(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of one `.bin` file, in its order; nothing in the file is run.

    Raises:
        CheckpointError: it asks for code (names the global), is damaged, or is no state dict.
    """
    path = Path(path)
    names = {f"torch.{attribute}": name for name, attribute in TORCH_DTYPES.items()}
    state = load_state_dict(path, reads=False)
    return tuple(
        TensorEntry(name=name, dtype=names[str(tensor.dtype)], shape=tuple(tensor.shape), file=path)
        for name, tensor in state.items()
    )


def load_state_dict(path: Path, *, reads: bool = True) -> "dict[str, torch.Tensor]":
    """The tensors of one `.bin` file by name, as views of the mapped file.

    Args:
        reads: whether a file older than torch 1.6, which cannot be mapped, is read; its tensors have no data otherwise.

    Raises:
        CheckpointError: as `read_bin`.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(512)
            _check_format(path, head, size)
            file.seek(0)
            is_zip = head.startswith(b"PK")
            num_bytes = _check_zip(path, file, size) if is_zip else _check_legacy(path, file, size)
    except OSError as error:
        raise bad_file(path, f"cannot be read: {reason(error)}", "check its permissions") from None
    state = _checked(path, _load(path, is_zip=is_zip, reads=reads))
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in state.values()}
    if sum(storages.values()) > num_bytes:
        what = f"is damaged: its tensors take {sum(storages.values()):,} bytes, its storages {num_bytes:,}"
        raise bad_file(path, what, DOWNLOAD_AGAIN)
    return state


def _load(path: Path, *, is_zip: bool, reads: bool) -> Any:
    import torch

    device = "cpu" if is_zip or reads else "meta"  # without data nobody checks that a tensor lies inside its storage

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the pickle's protocol
            return torch.load(path, map_location=device, weights_only=True, mmap=is_zip)
    except Exception as error:  # torch.load has no error of its own: a damaged file raises whatever it meets
        if reads and ran_out(error):
            raise
        raise bad_file(path, f"is damaged: {one_line(error)}", DOWNLOAD_AGAIN) from None


def _check_format(path: Path, head: bytes, size: int) -> None:
    if size == 0:
        raise bad_file(path, "is empty (0 bytes)", DOWNLOAD_AGAIN)
    for magic, what, fix in OTHER_FORMATS:
        if head.startswith(magic):
            raise bad_file(path, f"is {what}", fix)
    if head[257:262] == b"ustar":
        raise bad_file(
            path,
            "is a tar file, as torch before 0.1.11 wrote it",
            "load it with torch.load(file, weights_only=True) and save the state dict again with torch.save",
        )
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size:
        raise bad_file(path, "is a safetensors file by its content", "rename it to model.safetensors")


def _check_zip(path: Path, file: BinaryIO, size: int) -> int:
    """The bytes of its storages, where the archive and its pickle are such as torch.save writes."""
    try:
        if _directory_bytes(file, size) > MAX_DIRECTORY_BYTES:
            raise bad_file(path, f"has a zip directory beyond {MAX_DIRECTORY_BYTES:,} bytes", DOWNLOAD_AGAIN)
        with zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist()}
            folder = next(iter(members), "").partition("/")[0]
            pickled, byteorder = (members.get(f"{folder}/{name}") for name in ("data.pkl", "byteorder"))
            if pickled is None:
                raise bad_file(path, "is a zip file without data.pkl: torch.save did not write it", DOWNLOAD_AGAIN)
            if f"{folder}/constants.pkl" in members:
                raise bad_file(
                    path, "is a TorchScript program, not weights", "save model.state_dict() with torch.save instead"
                )
            if pickled.file_size > MAX_PICKLE_BYTES:
                raise bad_file(path, f"has a data.pkl of {pickled.file_size:,} bytes, too large", DOWNLOAD_AGAIN)
            storages = [info for name, info in members.items() if name.startswith(f"{folder}/data/")]
            if len(members) != len(archive.infolist()) or any(info.compress_type for info in storages):
                raise bad_file(path, "has members twice or compressed, which torch.save never writes", DOWNLOAD_AGAIN)
            content = archive.read(pickled)
            is_big = byteorder is not None and byteorder.file_size < 16 and archive.read(byteorder) != b"little"
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise bad_file(path, f"is a damaged zip file: {one_line(error)}", DOWNLOAD_AGAIN) from None
    if is_big:
        raise bad_file(path, "is big-endian, which nothing here reads", "save it again on a little-endian machine")
    _check_opcodes(path, io.BytesIO(content))
    return sum(info.file_size for info in storages)


def _directory_bytes(file: BinaryIO, size: int) -> int:
    """What the zip's end record says of its directory: asked before zipfile reads all of that."""
    file.seek(max(size - 65557, 0))
    tail = file.read()
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + 22 > len(tail):
        raise zipfile.BadZipFile("it has no directory at its end; the file is cut off")
    (num_bytes,) = struct.unpack_from("<I", tail, place + 12)
    locator = tail.rfind(b"PK\x06\x07", 0, place)
    if locator >= 0:  # more than 4 GiB
        (offset,) = struct.unpack_from("<Q", tail, locator + 8)
        file.seek(min(offset, size))
        record = file.read(56)
        num_bytes = struct.unpack_from("<Q", record, 40)[0] if len(record) == 56 else size
    return int(num_bytes)


def _check_legacy(path: Path, file: BinaryIO, size: int) -> int:
    """The bytes behind its pickles, where those are such as torch.save writes."""
    stream = io.BytesIO(file.read(MAX_PICKLE_BYTES))
    magic = _check_opcodes(path, stream)
    if magic != [_LEGACY_MAGIC]:
        raise bad_file(path, "is a pickle that torch.save did not write", "save model.state_dict() with torch.save")
    for _ in range(_NUM_LEGACY_PICKLES - 1):
        _check_opcodes(path, stream)
    return size - stream.tell()


def _check_opcodes(path: Path, stream: io.BytesIO) -> list[Any]:
    """Follow one pickle to its end without doing what it says; the values in it."""
    values: list[Any] = []
    num_opcodes = num_tuples = 0
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            num_opcodes += 1
            num_tuples += opcode.name.startswith("TUPLE")
            if num_opcodes > MAX_OPCODES or num_tuples > MAX_TUPLES:
                raise ValueError(f"more than {num_opcodes - 1:,} opcodes, too many for a state dict")
            if opcode.name in ("GLOBAL", "STACK_GLOBAL"):
                parts = str(argument).split(" ", 1) if opcode.name == "GLOBAL" else values[-2:]
                name = ".".join(map(str, parts))
                if name not in _NAMES:
                    raise _wants_code(path, name)
            elif opcode.name in _CALLS:
                raise _wants_code(path, str(argument or opcode.name).replace(" ", "."))
            elif argument is not None and opcode.name not in ("PROTO", "FRAME"):
                values.append(argument)
    except (ValueError, IndexError, OverflowError, struct.error) as error:
        cut = "it is cut off: " if stream.tell() == len(stream.getbuffer()) else ""
        raise bad_file(path, f"holds a damaged pickle: {cut}{one_line(error)}", DOWNLOAD_AGAIN) from None
    return values


def _wants_code(path: Path, name: str) -> CheckpointError:
    ours = name.startswith(("transformers.", "torch."))
    return bad_file(
        path,
        f"holds a pickle that asks for {shown(name)}: loading it would run code",
        "save model.state_dict() instead of the model, where you trust it"
        if ours
        else "do not load it; take model.safetensors of the model, or ask whoever made it for a plain state dict",
    )


def _checked(path: Path, state: Any) -> "dict[str, torch.Tensor]":
    """The same, if it is a state dict of plain tensors."""
    import torch

    if not isinstance(state, dict) or not state:
        raise bad_file(path, f"holds {_kind(state)}, not a state dict", "save model.state_dict() with torch.save")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise _no_tensor(path, name, value, state)
        if not isinstance(name, str) or any("\ud800" <= c <= "\udfff" for c in name):
            raise bad_file(path, f"names a tensor {shown(name)}, which is no text", DOWNLOAD_AGAIN, tensor=shown(name))
    return state


def _no_tensor(path: Path, name: object, value: object, state: dict[Any, Any]) -> CheckpointError:
    inside = next((key for key in _INSIDE if isinstance(state.get(key), dict)), None)
    if inside is not None:
        return bad_file(
            path,
            f"is a whole training checkpoint: the model lies under {inside!r}",
            f"load it where you trust it, and save torch.load(file)[{inside!r}] as pytorch_model.bin",
            tensor=inside,
        )
    return bad_file(
        path,
        f"holds {_kind(value)} under the name {shown(name)}, not a tensor",
        "save model.state_dict() alone with torch.save, or model.save_pretrained(folder)",
        tensor=shown(name),
    )


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "a dict" if value else "an empty dict"
    return "one tensor" if hasattr(value, "untyped_storage") else f"a {type(value).__name__}"
