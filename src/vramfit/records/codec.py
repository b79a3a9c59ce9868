"""Records ↔ JSON: one generic codec for frozen dataclasses, and files that are never half written."""

import dataclasses
import errno
import json
import os
import secrets
import shutil
import types
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vramfit.errors import VramfitError
from vramfit.units import format_bytes

SCHEMA_VERSION = 1
"""Raised when a saved record can no longer be read as it is."""

T = TypeVar("T")
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class RecordError(VramfitError, ValueError):
    """A JSON text that is not the record it should be."""


def to_data(record: Any) -> Any:
    """Plain JSON-ready data for a record, a list of records or any mix of them."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_data(getattr(record, f.name)) for f in dataclasses.fields(record) if _is_saved(f)}
    if isinstance(record, Mapping):
        return {str(key): to_data(value) for key, value in record.items()}
    if isinstance(record, list | tuple | set | frozenset):
        return [to_data(value) for value in record]
    return record


def _is_saved(field: "dataclasses.Field[Any]") -> bool:
    """Fields marked `metadata={"saved": False}` live in memory only."""
    return bool(field.metadata.get("saved", True))


def to_json(record: Any, *, indent: int | None = 2) -> str:
    """JSON text of one record, with `schema_version` and `record` (its class) in front."""
    head = {"schema_version": SCHEMA_VERSION, "record": type(record).__name__}
    return json.dumps(head | to_data(record), indent=indent, ensure_ascii=False)


def from_json(cls: type[T], text: str) -> T:
    """The record that `to_json` wrote.

    Raises:
        RecordError: not JSON, another record, a newer schema, or a field that is missing or of a wrong type.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"a {cls.__name__} is a JSON object, not {type(data).__name__}")
    version = data.pop("schema_version", None)
    kind = data.pop("record", cls.__name__)
    if kind != cls.__name__:
        raise RecordError(f"this is a {kind}, not a {cls.__name__}")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RecordError(
            f"schema_version {version!r} is not one this vramfit reads (it reads up to {SCHEMA_VERSION})",
            hint="upgrade vramfit, or write the file again with this version",
        )
    return from_data(cls, data)


def from_data(cls: type[T], data: Any, *, where: str = "") -> T:
    """One record of class `cls` from plain data, checked field by field."""
    name = where or cls.__name__
    if not isinstance(data, dict):
        raise RecordError(f"{name}: expected an object, found {_kind(data)}")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and _is_saved(f)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise RecordError(f"{name}: unknown field {unknown[0]!r}")
    values = {}
    for key, field in fields.items():
        if key in data:
            values[key] = _decode(hints[key], data[key], f"{name}.{key}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{name}: field {key!r} is missing")
    return cls(**values)


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(args, value, where)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return from_data(hint, value, where=where)
    if origin is tuple:
        items = _expect(list, value, where)
        if args[-1] is Ellipsis:
            args = (args[0],) * len(items)
        if len(items) != len(args):
            raise RecordError(f"{where}: expected {len(args)} items, found {len(items)}")
        return tuple(_decode(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, items, strict=True)))
    if origin in (dict, Mapping):
        pairs = _expect(dict, value, where)
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in pairs.items()}
    if origin is Literal:
        if value not in args:
            raise RecordError(f"{where}: {value!r} is not one of {', '.join(map(repr, args))}")
        return value
    return _expect(hint, value, where)


def _decode_union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    failures: list[RecordError] = []
    for arg in args:
        if arg is not type(None):
            try:
                return _decode(arg, value, where)
            except RecordError as error:
                failures.append(error)
    raise failures[0]


def _expect(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, float)):
        raise RecordError(f"{where}: expected {kind.__name__}, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


MODEL_FILES = (
    "model*",
    "pytorch_model*",
    "*config*.json",
    "tokenizer*",
    "vocab*",
    "merges*",
    "*tokens*.json",
    "modules.json",
)
"""What a folder's model is loaded from; anything else in it may be written again."""


def check_place(path: Path, *read: Any, what: str = "this") -> None:
    """Refuse a place that no file can be written to, or whose file is read here.

    Args:
        read: files, and folders of models, by name; what is neither is passed over.
        what: is written, in words.

    Raises:
        VramfitError: it is a folder, in one that is not there, or one of the files.
    """
    if path.is_dir():
        raise VramfitError(f"cannot write {path}: it is a folder", hint="name a file in it, such as my-card.json")
    if not path.absolute().parent.is_dir():
        raise VramfitError(f"cannot write {path}: there is no such folder", hint="make it first")
    is_of_model = any(fnmatch(path.name, pattern) for pattern in MODEL_FILES)
    for source in (name for name in read if isinstance(name, str | Path) and path.exists()):
        if os.path.isdir(source) and is_of_model and path.resolve().is_relative_to(os.path.realpath(source)):
            raise VramfitError(f"{path} is a file of {source}: {what} would overwrite it", hint="choose another place")
        if os.path.isfile(source) and path.samefile(source):
            raise VramfitError(f"{path} is the data: {what} would overwrite it", hint="choose another place")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a full disk or a kill leaves the old one; what is no file, such as a pipe, is written to.

    Raises:
        VramfitError: the place cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
            return
        final = Path(os.path.realpath(path))  # where a link leads
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
            os.replace(temporary, final)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error, num_bytes=len(content)) from None


def cannot_write(path: Path, error: OSError, *, num_bytes: int | None = None) -> VramfitError:
    """The error for a file that could not be written, with what it needs where the disk is full."""
    what = f"cannot write {path}: {error.strerror or error}"
    if error.errno not in FULL_DISK:
        return VramfitError(what, hint="choose a folder you can write to")
    needed = "" if num_bytes is None else f" ({format_bytes(num_bytes)} to write{_free(path)})"
    return VramfitError(f"{what}{needed}", hint="make room on the disk, or write to another one")


def _free(path: Path) -> str:
    """How much is free where a file would be; a quota may leave less."""
    try:
        return f", {format_bytes(shutil.disk_usage(path.parent).free)} free" if not path.is_char_device() else ""
    except OSError:
        return ""
