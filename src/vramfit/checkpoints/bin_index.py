"""The tensors of a `pytorch_model.bin`, found without running a line of it.

torch.save writes a zip with `data.pkl` and one raw member a storage; before torch 1.6 it wrote five pickles, then
the raw storages. Both are read through `PickleMachine`, which imports and calls nothing.
"""

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.pickle_machine import PickleMachine
from vramfit.checkpoints.pickle_names import PickleDamaged, PickleWantsCode
from vramfit.checkpoints.pickle_tensors import StoragePlace, find_storages, find_tensors
from vramfit.checkpoints.wording import DOWNLOAD_AGAIN, bad_file, shown

MAX_PICKLE_BYTES = 32 * 10**6
"""Enough to describe 100,000 tensors; the raw storages lie outside."""
MAX_DIRECTORY_BYTES = 32 * 10**6
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error, ValueError, KeyError)
_OTHER_FORMATS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the weights", "run `git lfs pull` in the repository"),
    (b"<", "a web page, not weights", "download it with `hf download`, or from the page's download link"),
    (b"\x89HDF", "an HDF5 file of TensorFlow, not PyTorch weights", "download model.safetensors of the model"),
)


def read_bin(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of one `.bin` file, in its order; nothing in the file is run, no storage is read.

    Raises:
        CheckpointError: it asks for code (names the global), is damaged, or is no state dict.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(512)
            _check_format(path, head, size)
            file.seek(0)
            if head.startswith(b"PK"):
                return _read_zip(path, file, size)
            return _read_legacy(path, file, size)
    except PickleWantsCode as wanted:
        raise bad_file(
            path,
            f"holds a pickle that asks for {shown(str(wanted))}: loading it would run code",
            "save model.state_dict() instead of the model, where you trust it"
            if str(wanted).startswith(("transformers.", "torch."))
            else "do not load it; take model.safetensors of the model, or ask whoever made it for a plain state dict",
        ) from None
    except PickleDamaged as error:
        raise bad_file(path, f"holds a damaged pickle: {error}", DOWNLOAD_AGAIN) from None
    except _BAD_ZIP as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise bad_file(path, f"is a damaged zip file: {reason}", DOWNLOAD_AGAIN) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise bad_file(path, f"cannot be read: {reason}", "check its permissions") from None


def _check_format(path: Path, head: bytes, size: int) -> None:
    if size == 0:
        raise bad_file(path, "is empty (0 bytes)", DOWNLOAD_AGAIN)
    for magic, what, fix in _OTHER_FORMATS:
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


def _read_zip(path: Path, file: BinaryIO, size: int) -> tuple[TensorEntry, ...]:
    if _directory_bytes(file, size) > MAX_DIRECTORY_BYTES:
        raise bad_file(path, f"has a zip directory beyond {MAX_DIRECTORY_BYTES:,} bytes", DOWNLOAD_AGAIN)
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if len(members) != len(archive.infolist()):
            raise bad_file(path, "is a zip file with two members of one name", DOWNLOAD_AGAIN)
        pickled = next((name for name in members if name.endswith("data.pkl") and name.count("/") <= 1), None)
        if pickled is None:
            raise bad_file(path, "is a zip file without data.pkl: torch.save did not write it", DOWNLOAD_AGAIN)
        prefix = pickled.removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in members:
            raise bad_file(
                path, "is a TorchScript program, not weights", "save model.state_dict() with torch.save instead"
            )
        if members[pickled].file_size > MAX_PICKLE_BYTES:
            raise bad_file(path, f"has a data.pkl of {members[pickled].file_size:,} bytes, too large", DOWNLOAD_AGAIN)
        with archive.open(pickled) as stream:
            content = stream.read(MAX_PICKLE_BYTES + 1)
        byteorder = members.get(f"{prefix}byteorder")
        if byteorder is not None and byteorder.file_size < 16 and archive.read(byteorder).strip() == b"big":
            raise bad_file(path, "is big-endian, which nothing here reads", "save it again on a little-endian machine")
    root = PickleMachine(io.BytesIO(content)).load()

    def locate(key: str, num_bytes: int) -> StoragePlace:
        return _member_place(file, size, members.get(f"{prefix}data/{key}"), key, num_bytes)

    return tuple(find_tensors(path, root, locate))


def _member_place(file: BinaryIO, size: int, member: zipfile.ZipInfo | None, key: str, num_bytes: int) -> StoragePlace:
    """Where a storage's raw bytes lie; its local header says how far behind it they begin."""
    if member is None:
        raise PickleDamaged(f"its storage data/{shown(key)} is not in the file")
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
        raise PickleDamaged(f"its storage data/{shown(key)} is compressed, which torch.save never does")
    if member.file_size < num_bytes:
        raise PickleDamaged(f"its storage has {member.file_size:,} bytes and should have {num_bytes:,}")
    file.seek(member.header_offset)
    local = file.read(30)
    if len(local) < 30 or local[:4] != b"PK\x03\x04":
        raise PickleDamaged(f"its storage data/{shown(key)} has no header")
    name_bytes, extra_bytes = struct.unpack_from("<HH", local, 26)
    begin = member.header_offset + 30 + name_bytes + extra_bytes
    if begin + num_bytes > size:
        raise PickleDamaged(f"its storage ends at byte {begin + num_bytes:,} of a file of {size:,}")
    return StoragePlace(begin, num_bytes)


def _directory_bytes(file: BinaryIO, size: int) -> int:
    """What the zip's end record says of its directory: asked before zipfile reads all of that."""
    start = max(size - 65557, 0)
    file.seek(start)
    tail = file.read()
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + 22 > len(tail):
        raise zipfile.BadZipFile("it has no directory at its end; the file is cut off")
    (num_bytes,) = struct.unpack_from("<I", tail, place + 12)
    locator = tail.rfind(b"PK\x06\x07", 0, place)
    if num_bytes == 0xFFFFFFFF and locator >= 0:
        (offset,) = struct.unpack_from("<Q", tail, locator + 8)
        file.seek(min(offset, size))
        record = file.read(56)
        num_bytes = struct.unpack_from("<Q", record, 40)[0] if len(record) == 56 else size
    return int(num_bytes)


def _read_legacy(path: Path, file: BinaryIO, size: int) -> tuple[TensorEntry, ...]:
    """Magic number, protocol, byte order, state dict, storage keys; then each storage with its length before it."""
    magic = PickleMachine(file).load()
    if magic != _LEGACY_MAGIC:
        raise bad_file(path, "is a pickle that torch.save did not write", "save model.state_dict() with torch.save")
    PickleMachine(file).load()
    system: Any = PickleMachine(file).load()
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise bad_file(path, "is big-endian, which nothing here reads", "save it again on a little-endian machine")
    root = PickleMachine(file).load()
    keys = PickleMachine(file).load()
    item_bytes = find_storages(root)
    places: dict[str, StoragePlace] = {}
    for key in keys if isinstance(keys, list) else ():
        length = file.read(8)
        if len(length) < 8 or str(key) not in item_bytes:
            break
        num_bytes = int.from_bytes(length, "little") * item_bytes[str(key)]
        places[str(key)] = StoragePlace(file.tell(), min(num_bytes, max(size - file.tell(), 0)))
        file.seek(min(file.tell() + num_bytes, size))

    def locate(key: str, num_bytes: int) -> StoragePlace:
        if key not in places:
            raise PickleDamaged(f"its storage {shown(key)} is not in the file: it is cut off")
        return places[key]

    return tuple(find_tensors(path, root, locate))
