"""What a pickled state dict may name, the records that stand for it, and the errors for anything else."""

from dataclasses import dataclass
from typing import Any

REBUILDS = {
    f"torch._utils.{name}"
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
}
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
ORDERED_DICT = "collections.OrderedDict"
SIZE = "torch.Size"
_ALLOWED = {
    *REBUILDS,
    ORDERED_DICT,
    SIZE,
    *(f"torch.{name}" for name in STORAGES),
    "torch.storage.UntypedStorage",
}
_DTYPES = ("float", "bfloat", "int", "uint", "bool", "complex", "double", "half", "long", "short")


class PickleDamaged(Exception):
    """Opcodes that make no sense together; the text says which."""


class PickleWantsCode(Exception):
    """A name outside the allow-list; the text is that name, such as `posix.system`."""


@dataclass(frozen=True, slots=True)
class Name:
    """A global that the pickle names and nobody imports."""

    path: str


@dataclass(frozen=True, slots=True)
class Storage:
    """What a persistent id stands for: the five or six values that torch.save wrote."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A call that was not made: the function's name and its arguments."""

    function: str
    arguments: tuple[Any, ...]


def allowed(path: str) -> str:
    """The same path, if a state dict may name it; dtypes are `torch.float32` and the like."""
    if path in _ALLOWED:
        return path
    module, _, attribute = path.rpartition(".")
    if module == "torch" and attribute.startswith(_DTYPES) and attribute.replace("_", "").isalnum():
        return path
    raise PickleWantsCode(path)
