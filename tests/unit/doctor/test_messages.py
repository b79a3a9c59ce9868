"""Out-of-memory messages are found in any log, torn or quoted, and no input is too much."""

import io
import re
from collections.abc import Iterator
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.doctor.real_messages import MESSAGES, Reported

from vramfit.doctor import messages
from vramfit.doctor.messages import MAX_LINE, MAX_LINES, MAX_SHOWN, find_messages, most_telling, read_lines

NEW = next(r for r in MESSAGES if "FireRed" in r.where)
OLD = next(r for r in MESSAGES if "GenerativeGraph" in r.where)
KILLED = next(r for r in MESSAGES if "bugbug" in r.where)


def found(text: str) -> list[str]:
    return [m.kind for m in find_messages(text.splitlines())]


@pytest.mark.parametrize("reported", MESSAGES, ids=lambda r: f"{r.year} {r.where.split(' ')[0]}")
def test_figures_of_reported_messages(reported: Reported) -> None:
    message, count = most_telling(find_messages(reported.text.splitlines()))
    assert message is not None
    assert (message.kind, count) == (reported.kind, 1)
    assert {name: getattr(message, name) for name in reported.figures} == reported.figures


def test_eight_years_and_every_kind_are_among_them() -> None:
    assert {r.year for r in MESSAGES} == set(range(2018, 2027))
    assert {r.kind for r in MESSAGES} == {"allocator", "driver", "library", "mps", "host allocator", "host killed"}


@pytest.mark.parametrize("prefix", ["", "# ", "> ", "WARNING:root:", "[rank3]: "])
def test_a_message_torn_into_lines_is_one_message(prefix: str) -> None:
    words = NEW.text.split(" ")
    torn = "\n".join(prefix + " ".join(words[i : i + 12]) for i in range(0, 72, 12))
    message, count = most_telling(find_messages(torn.splitlines()))
    assert message is not None
    assert count == 1
    assert message.requested_bytes == 26 * 2**20
    assert len(message.other_processes) == 2


def test_the_last_of_those_that_say_most_is_explained() -> None:
    log = [OLD.text, "step 2", NEW.text, "DataLoader worker (pid 3) is killed by signal: Killed.", KILLED.text]
    message, count = most_telling(find_messages(log))
    assert message is not None
    assert (message.line, count) == (3, 3), "what two processes say of one killing is one message"


def test_messages_on_neighbouring_lines_keep_their_own_figures() -> None:
    log = [OLD.text.replace("1024.00 KiB", f"{n}.00 MiB") for n in (1, 2, 3)]
    assert [m.requested_bytes for m in find_messages(log)] == [n * 2**20 for n in (1, 2, 3)]


def test_a_driver_that_does_not_say_what_processes_hold_is_not_believed() -> None:
    text = NEW.text.replace("618.00 MiB", "17179869184.00 GiB").replace("9.74 GiB", "17179869184.00 GiB")
    (message,) = find_messages([text])
    assert message.process_bytes is None
    assert [p.pid for p in message.other_processes] == [1493972]


@pytest.mark.parametrize(
    ("text", "requested_bytes"),
    [
        ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 1.50 GiB for an array", 3 * 2**29),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried to "
         "allocate 1981808640 bytes.", 1981808640),
        ("OSError: [Errno 12] Cannot allocate memory", None),
        ("MemoryError", None),
    ],
)  # fmt: skip
def test_the_hosts_own_wordings(text: str, requested_bytes: int | None) -> None:
    (message,) = find_messages([text])
    assert (message.kind, message.requested_bytes) == ("host allocator", requested_bytes)


@pytest.mark.parametrize(
    "text",
    [
        "container exited with code 137",
        "Error: script exited with status 137",
        "./run.sh: line 3: 12345 Killed                  python train.py",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0",
        "srun: error: gpu001: task 0: Out Of Memory",
        "torch.distributed.elastic: failed (exitcode: -9) local_rank: 0 (pid: 178)",
        "Reason: OOMKilled",
    ],
)
def test_the_words_of_kernels_containers_and_schedulers(text: str) -> None:
    assert found(text) == ["host killed"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "the model fits into memory",
        "loss 137 at step -9",
        "allocator settings: expandable_segments",
        "he killed it",
        "memory: 16 GiB total, exit code 0",
    ],
)
def test_what_is_no_message_is_none(text: str) -> None:
    assert found(text) == []


@settings(max_examples=300)
@given(st.text(max_size=400), st.sampled_from(MESSAGES), st.integers(0, 600), st.integers(0, 600), st.text(max_size=30))
def test_no_damage_to_a_message_raises(noise: str, reported: Reported, start: int, end: int, hole: str) -> None:
    text = reported.text[:start] + hole + reported.text[end:] + noise
    for message in find_messages(text.splitlines()):
        assert len(message.text) <= MAX_SHOWN
        assert (message.cached_bytes or 0) >= 0
        assert (message.outside_bytes or 0) >= 0


@pytest.mark.parametrize(
    "line",
    [
        "Tried to allocate " + "9" * 200_000,
        "CUDA out of memory. " + "1.1 " * 50_000,
        "CUDA out of memory. Process 1 has 1 GiB memory in use. " * 4_000,
        "MPS allocated: " + "1.0 GB, other allocations: " * 8_000,
        " " * 200_000 + "MemoryError",
        "exit" + "ed with the status code" * 10_000,
    ],
)
def test_of_hostile_lines_only_so_much_is_looked_at(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    kind_of = messages._kind_of
    monkeypatch.setattr(messages, "_kind_of", lambda line: (looked_at.append(len(line)), kind_of(line))[1])
    list(find_messages([line] * 20))
    assert 20 <= len(looked_at) <= 20 * MAX_LINES  # as it comes, and as what may belong to the messages before it
    assert max(looked_at) <= MAX_LINE


def repetitions_inside_others(tree: Any, *, inside: bool = False) -> Iterator[Any]:
    """Parts of a pattern that are repeated within what is repeated: what makes a search take for ever."""
    if isinstance(tree, tuple) and len(tree) == 3 and isinstance(tree[2], _parser.SubPattern):
        _, most, tree = tree  # a repetition: least, most, and of what
        if most > 1 and inside:
            yield tree
        inside = inside or most > 1
    if isinstance(tree, _parser.SubPattern | tuple | list):
        for part in tree:
            yield from repetitions_inside_others(part, inside=inside)


def test_no_pattern_repeats_what_repeats() -> None:
    patterns = [pattern for _, pattern in messages._ANCHORS] + list(messages._FIGURES.values())
    patterns += [value for value in vars(messages).values() if isinstance(value, re.Pattern)]
    for pattern in patterns:
        assert list(repetitions_inside_others(_parser.parse(pattern.pattern, pattern.flags))) == [], pattern
    for wrong in (r"(a+b?)*", r"(?:x|(\d{1,9}))+", r"(?:a(?:b*)){2,}"):
        assert list(repetitions_inside_others(_parser.parse(wrong)))


def test_a_log_is_streamed_and_an_endless_line_is_cut() -> None:
    def endless() -> Iterator[str]:
        for number in range(200_000):
            yield f"step {number} loss 0.1\n"
        yield OLD.text + "\n"

    message, _ = most_telling(find_messages(endless()))
    assert message is not None
    assert message.line == 200_001
    assert max(map(len, read_lines(io.StringIO("x" * 1_000_000)))) == MAX_LINE
