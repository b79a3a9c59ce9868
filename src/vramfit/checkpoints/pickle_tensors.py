"""From what a pickle describes to tensors: names, dtypes, shapes and the place of their bytes, all checked."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vramfit.checkpoints.entry import DTYPE_BITS, TORCH_DTYPES, TensorEntry
from vramfit.checkpoints.pickle_names import STORAGES, Name, PickleDamaged, Rebuilt, Storage
from vramfit.checkpoints.wording import DOWNLOAD_AGAIN, bad_file, shown

MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**62
_DTYPES = {f"torch.{attribute}": name for name, attribute in TORCH_DTYPES.items()}
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "net")
"""Where a training checkpoint keeps the model."""


class StoragePlace(NamedTuple):
    """Where a storage's bytes lie."""

    begin: int
    num_bytes: int


Locate = Callable[[str, int], StoragePlace]
"""Key and size in bytes of a storage → its place; raises `PickleDamaged` where there is none."""


class _View(NamedTuple):
    """A tensor as a view of a storage, in elements."""

    dtype: str
    key: str
    num_storage_elements: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def find_tensors(path: Path, root: Any, locate: Locate) -> Iterator[TensorEntry]:
    """The tensors of a state dict that a pickle described.

    Raises:
        CheckpointError: it is no state dict, or a tensor does not lie inside its storage.
    """
    if not isinstance(root, dict) or not root:
        raise bad_file(path, f"holds {_kind(root)}, not a state dict", "save model.state_dict() with torch.save")
    for name, value in root.items():
        if not isinstance(value, Rebuilt):
            raise _no_tensor(path, name, value, root)
        if not isinstance(name, str) or not _is_text(name):
            raise bad_file(path, f"names a tensor {shown(name)}, which is no text", DOWNLOAD_AGAIN, tensor=str(name))
        try:
            yield _entry(path, name, _view(value), locate)
        except (PickleDamaged, TypeError, ValueError, IndexError, AttributeError) as error:
            raise bad_file(path, f"has a damaged tensor {shown(name)}: {error}", DOWNLOAD_AGAIN, tensor=name) from None


def _no_tensor(path: Path, name: object, value: object, root: dict[Any, Any]) -> Exception:
    inside = next((key for key in _INSIDE if isinstance(root.get(key), dict)), None)
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
        tensor=str(name)[:200],
    )


def _view(value: Rebuilt) -> _View:
    """What `_rebuild_tensor*` was given; a parameter is its tensor."""
    for _ in range(4):
        if value.function != "_rebuild_parameter":
            break
        value = value.arguments[0]
    storage, offset, shape, stride = value.arguments[:4]
    if not isinstance(storage, Storage):
        raise PickleDamaged("its storage is none")
    _, kind, key, _, num_elements, *view = storage.values
    dtype = STORAGES.get(kind.path.rpartition(".")[2] if isinstance(kind, Name) else "")
    if value.function == "_rebuild_tensor_v3":
        named = value.arguments[6]
        dtype = _DTYPES.get(named.path) if isinstance(named, Name) else None
        num_elements = num_elements * 8 // DTYPE_BITS[dtype] if dtype else 0
    if dtype is None:
        raise PickleDamaged("its dtype is none that vramfit knows")
    if view and view[0] is not None:  # before torch 1.6 a storage could be a part of another
        offset += view[0][1]
    counts = (num_elements, offset, *shape, *stride)
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, counts)):
        raise PickleDamaged("its shape is none")
    return _View(dtype, str(key), num_elements, offset, tuple(shape), tuple(stride))


def _entry(path: Path, name: str, view: _View, locate: Locate) -> TensorEntry:
    num_elements = math.prod(view.shape)
    if num_elements > MAX_ELEMENTS:
        raise PickleDamaged("its shape has more elements than any tensor")
    item_bytes = DTYPE_BITS[view.dtype] // 8
    place = locate(view.key, view.num_storage_elements * item_bytes)
    reach = sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True)) + 1 if num_elements else 0
    if (view.offset + reach) * item_bytes > place.num_bytes:
        raise PickleDamaged(
            f"it reaches to byte {(view.offset + reach) * item_bytes:,} of a storage of {place.num_bytes:,}"
        )
    begin = place.begin + view.offset * item_bytes
    return TensorEntry(
        name=name,
        dtype=view.dtype,
        shape=view.shape,
        begin=begin,
        end=begin + reach * item_bytes,
        file=path,
        stride=None if _is_row_major(view) else view.stride,
    )


def _is_row_major(view: _View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeError:
        return False
    return True


def _kind(value: object) -> str:
    if isinstance(value, Rebuilt):
        return "one tensor"
    if isinstance(value, dict):
        return "a dict" if value else "an empty dict"
    return f"a {type(value).__name__}"


def find_storages(root: Any) -> dict[str, int]:
    """Bytes an element takes, for every storage that the tensors of a state dict lie in."""
    found: dict[str, int] = {}
    for value in root.values() if isinstance(root, dict) else ():
        try:
            view = _view(value)
        except (PickleDamaged, TypeError, ValueError, IndexError, AttributeError):
            continue  # find_tensors says what is wrong with it
        found[view.key] = DTYPE_BITS[view.dtype] // 8
    return found
