"""A pickle read without running it: its opcodes are followed on a stack of plain values and records.

Python's own unpickler imports and calls whatever a file names. This one imports nothing and calls nothing: the
few names that a state dict needs stand for records, and any other name is an error that says which it was.
"""

import pickletools
from collections.abc import Callable
from typing import Any, Protocol

from vramfit.checkpoints.pickle_names import (
    ORDERED_DICT,
    REBUILDS,
    SIZE,
    Name,
    PickleDamaged,
    PickleWantsCode,
    Rebuilt,
    Storage,
    allowed,
)

MAX_OPCODES = 500_000
"""A tensor takes about 40; each may leave an object of some 70 bytes."""
MAX_TEXT_BYTES = 2**24


class Readable(Protocol):
    """What opcodes are read from."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self, size: int = -1, /) -> bytes: ...
    def tell(self) -> int: ...


class _Bounded:
    """A stream whose single reads are small, whatever length an opcode claims."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if size > MAX_TEXT_BYTES:
            raise PickleDamaged(f"one value of {size:,} bytes")
        return self._stream.read(size)

    def readline(self) -> bytes:
        return self._stream.readline(MAX_TEXT_BYTES)


class _Mark:
    """Where a list of values on the stack begins."""


_MARK = _Mark()


class PickleMachine:
    """One pickle, followed to its end."""

    def __init__(self, stream: Readable) -> None:
        self._stream = _Bounded(stream)
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._num_copied = 0

    def load(self) -> Any:
        """The value the pickle describes; the stream stands right behind it.

        Raises:
            PickleWantsCode: it names something outside the allow-list.
            PickleDamaged: it is cut off, makes no sense, or is larger than any state dict.
        """
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(self._stream)):  # type: ignore[arg-type]
                if count > MAX_OPCODES:
                    raise PickleDamaged(f"more than {MAX_OPCODES:,} opcodes")
                self._follow(opcode.name, argument)
            return self._stack.pop()
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
            raise PickleDamaged(" ".join(str(error).split())[:120] or type(error).__name__) from None

    def _follow(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            self._stack.append(argument)
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise PickleDamaged(f"opcode {name}, which torch.save never writes")

    def _name(self, argument: str) -> None:
        path = ".".join(str(argument).split(" ", 1))
        self._stack.append(Name(allowed(path)))

    def _stack_name(self, _: Any) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        self._stack.append(Name(allowed(f"{module}.{attribute}")))

    def _call(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise PickleDamaged("a call of something that is no function")
        if function.path == ORDERED_DICT:
            self._stack.append(_from_pairs(self._items(arguments)))
        elif function.path == SIZE:
            self._stack.append(tuple(self._items(arguments)))
        elif function.path in REBUILDS:
            self._stack.append(Rebuilt(function.path.rpartition(".")[2], arguments))
        else:
            raise PickleWantsCode(f"{function.path}()")

    def _items(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The one list that a call is given, or none; what is copied in all stays bounded."""
        given = list(arguments[0]) if arguments and isinstance(arguments[0], list | tuple) else []
        self._num_copied += len(given)
        if self._num_copied > MAX_OPCODES:
            raise PickleDamaged(f"more than {MAX_OPCODES:,} copies")
        return given

    def _persistent(self, _: Any) -> None:
        values = self._stack.pop()
        if not isinstance(values, tuple) or len(values) not in (5, 6):
            raise PickleDamaged("a storage that is described by no five values")
        self._stack.append(Storage(values))

    def _refuse_instance(self, argument: Any) -> None:
        if isinstance(argument, int):
            raise PickleWantsCode(f"extension {argument} of copyreg")
        raise PickleWantsCode(".".join(argument.split(" ", 1)) if argument else "an object")

    def _build(self, _: Any) -> None:
        """State of an object (`_metadata` of a state dict): of no interest."""
        self._stack.pop()

    def _put(self, argument: Any) -> None:
        self._memo[int(argument)] = self._stack[-1]

    def _get(self, argument: Any) -> None:
        self._stack.append(self._memo[int(argument)])

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _from_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                values = self._stack[place + 1 :]
                del self._stack[place:]
                return values
        raise PickleDamaged("a list without a beginning")

    def _tuple(self, length: int) -> None:
        values = tuple(self._stack[-length:])
        if len(values) != length:
            raise PickleDamaged("a stack that is too short")
        del self._stack[-length:]
        self._stack.append(values)

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise PickleDamaged(f"values appended to a {type(target).__name__}")
        target.extend(values)

    def _fill(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise PickleDamaged(f"keys set in a {type(target).__name__}")
        target.update(_pairs(values))

    def _set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._fill([key, value])


def _from_pairs(pairs: list[Any]) -> dict[Any, Any]:
    """An OrderedDict as Python 2 wrote it, from a list of pairs; Python 3 begins with an empty one."""
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise PickleDamaged("a dict from what are no pairs")
    return _pairs([item for pair in pairs for item in pair])


def _pairs(values: list[Any]) -> dict[Any, Any]:
    """A dict of alternating keys and values; only plain keys, for hashing nested tuples can overrun the C stack."""
    keys = values[::2]
    if not all(isinstance(key, str | int) for key in keys):
        raise PickleDamaged("a key that is neither a text nor a number")
    return dict(zip(keys, values[1::2], strict=True))


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_VALUES = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    }
)
_STEPS: dict[str, Callable[[PickleMachine, Any], None]] = {
    "GLOBAL": PickleMachine._name,
    "STACK_GLOBAL": PickleMachine._stack_name,
    "REDUCE": PickleMachine._call,
    "NEWOBJ": PickleMachine._call,
    "INST": PickleMachine._refuse_instance,
    "OBJ": PickleMachine._refuse_instance,
    "NEWOBJ_EX": PickleMachine._refuse_instance,
    "EXT1": PickleMachine._refuse_instance,
    "EXT2": PickleMachine._refuse_instance,
    "EXT4": PickleMachine._refuse_instance,
    "BINPERSID": PickleMachine._persistent,
    "BUILD": PickleMachine._build,
    "PUT": PickleMachine._put,
    "BINPUT": PickleMachine._put,
    "LONG_BINPUT": PickleMachine._put,
    "MEMOIZE": PickleMachine._memoize,
    "GET": PickleMachine._get,
    "BINGET": PickleMachine._get,
    "LONG_BINGET": PickleMachine._get,
    "POP": lambda machine, _: machine._stack.pop(),
    "POP_MARK": lambda machine, _: machine._from_mark().clear(),
    "DUP": lambda machine, _: machine._stack.append(machine._stack[-1]),
    "TUPLE": lambda machine, _: machine._stack.append(tuple(machine._from_mark())),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "LIST": lambda machine, _: machine._stack.append(machine._from_mark()),
    "DICT": lambda machine, _: machine._stack.append(_pairs(machine._from_mark())),
    "APPEND": lambda machine, _: machine._extend([machine._stack.pop()]),
    "APPENDS": lambda machine, _: machine._extend(machine._from_mark()),
    "SETITEM": PickleMachine._set_item,
    "SETITEMS": lambda machine, _: machine._fill(machine._from_mark()),
}
