"""A running `vramfit web`, asked by many and asked nonsense (more: scripts/fuzz_api.py, benchmarks/web_load.py)."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.integration.command import vramfit
from tests.unit.checkpoints.broken import load_script
from tests.waiting import LIMIT_S, ended_in_time, stop, wait_until

ROOT = Path(__file__).parent.parent.parent
fuzz = load_script(ROOT / "scripts" / "fuzz_api.py")
web_load = load_script(ROOT / "benchmarks" / "web_load.py")


@pytest.fixture(scope="module")
def server() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "vramfit", "web", "--port", "0", "--json", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        stop(process)


@pytest.fixture(scope="module")
def address(server: "subprocess.Popen[str]") -> str:
    with ended_in_time(server):
        found: str = web_load.address_of(server)
    return found


@pytest.mark.filterwarnings("ignore")
def test_nothing_that_the_schema_knows_or_does_not_know_is_a_servers_error(address: str) -> None:
    statuses: Counter[str] = Counter()
    schema = fuzz.schemathesis.openapi.from_url(f"{address}openapi.json")
    for operation in (operation.ok() for operation in schema.get_all_operations()):
        is_quick = operation.path in ("/api/estimate", "/api/catalogue")
        fuzz.ask(operation, fuzz.schemathesis.GenerationMode.POSITIVE, 12 if is_quick else 1, 1, statuses)
        fuzz.ask(operation, fuzz.schemathesis.GenerationMode.NEGATIVE, 34, 1, statuses)
    assert sum(statuses.values()) > 100
    assert statuses["/api/estimate 200"] > 0
    assert statuses["/api/plan 422"] > 0


def test_many_readers_are_answered_and_memory_stays_bounded(
    address: str, server: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_load, "MODELS", ("bert-tiny",))
    monkeypatch.setattr(web_load, "SHARE_OF_SLOW", 0.0)
    result = asyncio.run(web_load.load(address, server.pid, 100, 2.0))
    assert set(result["statuses"]) == {"200"}
    assert result["requests"] >= 100
    assert result["resident_most_bytes"] < result["resident_before_bytes"] + 500 * 2**20


def test_a_port_that_is_taken_is_all_that_is_said(address: str) -> None:
    done = vramfit("web", "--port", str(urlsplit(address).port))
    assert done.code == 1
    assert done.err.startswith("Error: cannot listen on 127.0.0.1")


def test_it_ends_with_a_signal_and_leaves_no_process(address: str, server: "subprocess.Popen[str]") -> None:
    assert address  # the last test of this module: the server is gone afterwards
    inside = web_load.descendants(server.pid)
    assert len(inside) >= 4
    server.terminate()
    assert server.wait(LIMIT_S) in (0, -signal.SIGTERM)
    wait_until(lambda: not any(map(_is_running, inside)), f"the processes {inside} of the server end")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
