"""Out-of-memory messages found in a log of any length: every wording of PyTorch since 2018, and of what lies below.

A log is read line by line, and no more of it is kept than one message can be long. The patterns have no nested
repetition: a line costs time in proportion to its length, whatever is in it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import IO, Any

from vramfit.records.watch import MessageKind, OutOfMemoryMessage, ProcessShare
from vramfit.units import MAX_BYTES

MAX_LINE = 8192
"""Characters looked at of a line; what is beyond is another line."""
MAX_LINES = 8
"""Lines a message may be torn into by a terminal or a mail."""
MAX_MESSAGE = 4096
MAX_SHOWN = 600
WORDS_BEFORE = 100
"""Characters shown of what stands before a message that says little by itself."""

_UNITS = {"": 1, "bytes": 1, "b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
_SIZE = r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]i?B|bytes|B)\b"

_ANCHORS: tuple[tuple[MessageKind, re.Pattern[str]], ...] = (
    ("mps", re.compile(r"MPS backend out of memory", re.IGNORECASE)),
    ("host allocator", re.compile(r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)")),
    ("allocator", re.compile(r"(?:CUDA|HIP|XPU|NPU|MUSA) out of memory", re.IGNORECASE)),
    ("allocator", re.compile(r"\bTried to allocate [0-9]", re.IGNORECASE)),
    ("library", re.compile(r"(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT|HIPBLAS)_STATUS_\w{0,40}ALLOC\w{0,20}_?FAILED")),
    ("library", re.compile(r"Triton Error \[CUDA\]: out of memory", re.IGNORECASE)),
    ("library", re.compile(r"Cuda failure (?:2\b|'out of memory')", re.IGNORECASE)),
    ("driver", re.compile(r"(?:CUDA|HIP)(?: driver| runtime)? error ?(?:\(2\))? ?:? ?out of memory", re.IGNORECASE)),
    ("driver", re.compile(r"cuda runtime error ?\(2\)|error=2 : out of memory|cudaErrorMemoryAllocation")),
    ("host allocator", re.compile(r"\[Errno 12\] Cannot allocate memory|numpy\.\S{0,40}ArrayMemoryError")),
    ("host allocator", re.compile(r"^\s{0,8}(?:\w{1,20}: )?MemoryError\b")),
    ("host killed", re.compile(r"OOMKilled|oom-kill|oom_kill|[Mm]emory cgroup out of memory|Out of memory: Kill")),
    (
        "host killed",
        re.compile(r"exit(?:ed)?(?: with)?(?: the)?(?: status| code| status code)?[ :=]{1,3}(?:137\b|-9\b)"),
    ),
    ("host killed", re.compile(r"exitcode ?: ?-9\b|is killed by signal: ?Killed|signal 9 \(SIGKILL\)", re.IGNORECASE)),
    ("host killed", re.compile(r"error: \S{1,60}: task \d{1,6}: Out Of Memory")),
    ("host killed", re.compile(r"^(?:\S{0,80}: line \d{1,6}: +\d{1,9} )?Killed\b")),
)
_RANK: dict[MessageKind, int] = {
    "allocator": 3,
    "mps": 3,
    "host allocator": 2,
    "library": 1,
    "driver": 1,
    "host killed": 0,
}
"""Which message says more about one and the same event."""
_QUICK = re.compile(
    r"memory|alloc|oom|137|-9|killed|cuda failure|cuda runtime|cuda error|mps backend|sigkill", re.IGNORECASE
)
_FIGURES = {
    "requested_bytes": re.compile(rf"(?:[Tt]ried to|Unable to) allocate {_SIZE}"),
    "total_bytes": re.compile(rf"{_SIZE} total capacity"),
    "free_bytes": re.compile(rf"{_SIZE} (?:is )?free\b"),
    "allocated_bytes": re.compile(rf"{_SIZE} (?:already allocated|is allocated by PyTorch)", re.IGNORECASE),
    "allowed_bytes": re.compile(rf"(?:max allowed: )?{_SIZE} allowed;"),
    "private_pool_bytes": re.compile(rf"{_SIZE} allocated in private pools"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "reserved_bytes": re.compile(rf"{_SIZE} reserved in total by PyTorch", re.IGNORECASE),
}
_CAPACITY = re.compile(rf"total capac(?:i)?ty of {_SIZE}")
_CACHED = re.compile(rf"{_SIZE} (?:cached\b|is reserved by PyTorch but unallocated)")
_DEVICE = re.compile(r"\bGPU ([0-9]{1,3})\b")
_PROCESS = re.compile(rf"\bProcess ([0-9]{{1,10}}) has {_SIZE} memory in use")
_MPS = re.compile(
    rf"MPS allocated: {_SIZE}, other allocations: {_SIZE}, max allowed: {_SIZE}\)?\. Tried to allocate {_SIZE}"
)
_KILLED_RSS = re.compile(r"anon-rss:([0-9]{1,15})kB")
_QUOTE_MARKS = " \t#>|*\r\n"
_PREFIX = re.compile(r"\[rank[0-9]{1,4}\]: ?|[A-Z]{4,8}:[\w.]{1,30}: ?")
"""What launchers and loggers put before every line."""
_SPACES = re.compile(r"\s+")


def find_messages(lines: Iterable[str]) -> Iterator[OutOfMemoryMessage]:
    """Every message of a log, in its order.

    >>> log = ["step 7", "RuntimeError: CUDA error: out of memory"]
    >>> [(m.kind, m.line) for m in find_messages(log)]
    [('driver', 2)]
    """
    open_messages: list[tuple[MessageKind, int, list[str]]] = []
    for number, line in enumerate(lines, start=1):
        line = line[:MAX_LINE]
        kind = _kind_of(line)
        for _, _, parts in open_messages:
            parts.append(line)
        if kind is not None and not _continues(open_messages, kind, line):
            open_messages.append((kind, number, [line]))
        while open_messages and len(open_messages[0][2]) >= MAX_LINES:
            yield _read(*open_messages.pop(0))
    for kind, number, parts in open_messages:
        yield _read(kind, number, parts)


def read_lines(stream: IO[str]) -> Iterator[str]:
    """The lines of a stream; one without an end is handed out in pieces."""
    while True:
        line = stream.readline(MAX_LINE)
        if not line:
            return
        yield line


def most_telling(messages: Iterable[OutOfMemoryMessage]) -> tuple[OutOfMemoryMessage | None, int]:
    """The last message among those that say most, and how many there are."""
    best: OutOfMemoryMessage | None = None
    count = 0
    for message in messages:
        count += 1
        if best is None or _weight(message) >= _weight(best):
            best = message
    return best, count


def _weight(message: OutOfMemoryMessage) -> tuple[bool, int]:
    return message.requested_bytes is not None and message.kind != "host allocator", _RANK[message.kind]


def _kind_of(line: str) -> MessageKind | None:
    if _QUICK.search(line) is None:
        return None
    return next((kind for kind, pattern in _ANCHORS if pattern.search(line)), None)


def _continues(open_messages: list[tuple[MessageKind, int, list[str]]], kind: MessageKind, line: str) -> bool:
    """Whether an anchor belongs to the message before it: its figures on a line of their own."""
    if not open_messages:
        return False
    before, _, parts = open_messages[-1]
    starts_anew = "out of memory" in line.lower()
    return before == kind and not starts_anew and "Tried to allocate" not in "".join(parts[:-1])


def _read(kind: MessageKind, number: int, parts: list[str]) -> OutOfMemoryMessage:
    """One message from its first line and those after it, up to where the next begins."""
    start = next(m.start() for k, pattern in _ANCHORS if k == kind and (m := pattern.search(parts[0])))
    before = 0 if kind in ("allocator", "mps") else WORDS_BEFORE
    own = [parts[0][max(start - before, 0) :], *_until_next(parts[1:])]
    text = _SPACES.sub(" ", " ".join(map(_bare, own)))[:MAX_MESSAGE]
    message = OutOfMemoryMessage(kind=kind, text=_shorten(text), line=number)
    if kind == "mps":
        return _with_mps(message, text)
    if kind == "host killed":
        rss = _KILLED_RSS.search(text)
        return replace(message, process_bytes=int(rss[1]) * 1024) if rss else message
    return _with_figures(message, text)


def _bare(part: str) -> str:
    part = part.strip(_QUOTE_MARKS)
    prefix = _PREFIX.match(part)
    return part[prefix.end() :] if prefix else part


def _until_next(parts: list[str]) -> Iterator[str]:
    for part in parts:
        if _kind_of(part) is not None and "out of memory" in part.lower():
            return
        yield part


def _shorten(text: str) -> str:
    """The sentence itself: what follows the advice of PyTorch is not part of it."""
    for end in ("If reserved", "See documentation", "CUDA kernel errors", "Traceback (most recent"):
        head, mark, _ = text.partition(end)
        text = head if mark and head.strip() else text
    text = text.strip(" `'\".")
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _with_figures(message: OutOfMemoryMessage, text: str) -> OutOfMemoryMessage:
    found: dict[str, Any] = {
        name: _bytes(match[1], match[2]) for name, p in _FIGURES.items() if (match := p.search(text))
    }
    if capacity := _CAPACITY.search(text):
        found["total_bytes"] = _bytes(capacity[1], capacity[2])
    cached, allocated = _CACHED.search(text), found.get("allocated_bytes")
    if cached and allocated is not None and "reserved_bytes" not in found:
        found["reserved_bytes"] = allocated + _bytes(cached[1], cached[2])
    device = _DEVICE.search(text)
    processes = [ProcessShare(pid=int(m[1]), used_bytes=_bytes(m[2], m[3])) for m in _PROCESS.finditer(text)]
    message = replace(message, device=int(device[1]) if device else None, **found)
    return _own_process(message, processes)


def _own_process(message: OutOfMemoryMessage, processes: list[ProcessShare]) -> OutOfMemoryMessage:
    """In a container PyTorch does not know its own number: the one process that can hold what it reserved is it.

    A driver that does not say what a process holds (WSL, some containers) shows as 17179869184 GiB.
    """
    total_bytes = message.total_bytes or MAX_BYTES
    processes = [p for p in processes if p.used_bytes <= total_bytes]
    if message.process_bytes is not None and message.process_bytes > total_bytes:
        message = replace(message, process_bytes=None)
    if message.process_bytes is None and message.reserved_bytes is not None:
        able = [p for p in processes if p.used_bytes * 1.01 >= message.reserved_bytes]
        if len(able) == 1 and message.reserved_bytes:
            message = replace(message, process_bytes=able[0].used_bytes)
            processes = [p for p in processes if p is not able[0]]
    return replace(message, other_processes=tuple(processes))


def _with_mps(message: OutOfMemoryMessage, text: str) -> OutOfMemoryMessage:
    """MPS writes GB and means GiB (MPSAllocator.mm, `format_size`)."""
    match = _MPS.search(text)
    if match is None:
        return message
    allocated, other, allowed, asked = (_bytes(match[i], match[i + 1]) for i in (1, 3, 5, 7))
    return replace(
        message,
        requested_bytes=asked,
        allocated_bytes=allocated,
        reserved_bytes=allocated,
        allowed_bytes=allowed,
        process_bytes=allocated + other,
    )


def _bytes(number: str, unit: str) -> int:
    """All of these messages count in powers of 1024, whatever they write."""
    return int(float(number) * _UNITS[unit.lower().replace("i", "")])
