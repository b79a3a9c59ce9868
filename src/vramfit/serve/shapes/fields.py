"""Fields of a body, read with a sentence for everything else."""

from collections.abc import Collection
from typing import Any

from vramfit.serve.requests import MODEL, Known, Refused, kind_of, parse
from vramfit.tasks import encoder_alone
from vramfit.units import shown


def read_object(body: bytes, names: Collection[str], hint: str) -> dict[str, Any]:
    """A body that is an object with no other fields than these, and `model`; those that are null are left out.

    Raises:
        Refused: it is something else.
    """
    data = parse(body, hint)
    if not isinstance(data, dict):
        raise Refused(400, f"the body is {kind_of(data)}, not an object", hint)
    others = [name for name in data if name not in names and name != MODEL]
    if others:
        raise Refused(400, f"{shown(others[0])} is not known; there are {', '.join(names)}", hint)
    return {name: value for name, value in data.items() if value is not None}


def switch(data: dict[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false."""
    value = data.get(name, default)
    if not isinstance(value, bool):
        raise Refused(400, f"{name} is {kind_of(value)}, not true or false")
    return value


def choice(data: dict[str, Any], name: str, values: tuple[str, ...]) -> str:
    """A field with one of a few values, the first one where it is missing."""
    value = data.get(name, values[0])
    if not isinstance(value, str) or value not in values:
        raise Refused(400, f"{name} is {shown(value)}, not {' or '.join(values)}")
    return value


def read_texts(value: Any, name: str, hint: str) -> list[Any]:
    """A text or a list of inputs, as a list; token ids are refused by name.

    >>> read_texts("a", "input", "")
    ['a']
    """
    given = value if isinstance(value, list) else [value]
    for one in (*given[:1], *(inner for inner in given[:1] if isinstance(inner, list) for inner in inner[:1])):
        if isinstance(one, int) and not isinstance(one, bool):
            raise Refused(400, f"{name} has token ids; texts are taken here", hint)
    wrong = next((n for n, one in enumerate(given) if not isinstance(one, str)), None)
    if wrong is not None:
        where = f"{name}[{wrong}]" if isinstance(value, list) else name
        raise Refused(400, f"{where} is {kind_of(given[wrong])}, not a text", hint)
    return given


def read_dims(data: dict[str, Any], known: Known) -> int | None:
    """How many numbers of a vector are wanted; None for all of them."""
    num_dims = data.get("dimensions")
    if num_dims is None:
        return None
    if not isinstance(num_dims, int) or isinstance(num_dims, bool) or not 1 <= num_dims <= known.num_dims:
        raise Refused(400, f"dimensions is {shown(num_dims)}; vectors of this model have {known.num_dims:,}")
    return num_dims


def need_vectors(known: Known, status: int) -> None:
    """Raises Refused where the model gives no vectors."""
    if not known.gives_vectors:
        what = f"the model gives no vectors: its task is {known.task}"
        raise Refused(status, what, f"serve an embedding model, or this one with --task {encoder_alone().name}")
