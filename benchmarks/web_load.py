"""200 readers at once, each moving sliders of its own: does `vramfit web` answer all of them, and what does it hold?

    python benchmarks/web_load.py --clients 200 --seconds 30 --output benchmarks/results/web_load_DATE.json

Every client asks estimates of a random model at random batches and lengths, one after another; one question in a
hundred is a largest batch or a plan. Whoever waits when the time is over still gets an answer.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlencode, urlsplit

MODELS = ("bert-base-uncased", "distilbert-base-uncased", "roberta-base", "bert-small", "electra-small-discriminator")
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SEQS = (64, 128, 256, 512)
SHARE_OF_SLOW = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    command = [sys.executable, "-m", "vramfit", "web", "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        result = asyncio.run(load(address_of(server), server.pid, given.clients, given.seconds))
    finally:
        server.terminate()
        server.wait(20)
    text = json.dumps(result, indent=2)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    sys.exit(any(status != "200" for status in result["statuses"]))


def address_of(server: "subprocess.Popen[str]") -> str:
    """Where the server is, once it is ready.

    Raises:
        RuntimeError: it has ended before.
    """
    assert server.stdout is not None
    text = ""
    for line in server.stdout:
        text += line
        if line.startswith("}"):
            break
    else:
        raise RuntimeError(f"the server ended with exit code {server.wait()}, before it was ready")
    url: str = json.loads(text)["url"]
    return url


async def load(address: str, pid: int, num_clients: int, seconds: float) -> dict[str, Any]:
    """Let clients ask for a while; what they were answered, when, and what the server held."""
    netloc = urlsplit(address).netloc
    statuses: Counter[str] = Counter()
    times_s: list[float] = []
    held_before, held = resident_bytes(pid), [resident_bytes(pid)]
    load_before = os.getloadavg()[0]
    until = time.monotonic() + seconds

    async def watch() -> None:
        while True:
            held.append(resident_bytes(pid))
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    began = time.monotonic()
    await asyncio.gather(*(client(netloc, random.Random(n), until, statuses, times_s) for n in range(num_clients)))
    took_s = time.monotonic() - began
    watching.cancel()
    cuts = quantiles(times_s, n=100)
    return {
        "clients": num_clients,
        "seconds": round(took_s, 1),
        "cores": os.cpu_count(),
        "load_average_before": round(load_before, 1),
        "requests": len(times_s),
        "statuses": dict(statuses),
        "median_s": round(cuts[49], 3),
        "p95_s": round(cuts[94], 3),
        "longest_s": round(max(times_s), 3),
        "resident_before_bytes": held_before,
        "resident_most_bytes": max(held),
    }


async def client(
    netloc: str, draw: random.Random, until: float, statuses: "Counter[str]", times_s: list[float]
) -> None:
    """One reader: a connection, and question after question on it; one at least."""
    host, _, port = netloc.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = 0.0
    while began < until:
        began = time.monotonic()
        writer.write(f"GET {question(draw)} HTTP/1.1\r\nHost: {netloc}\r\n\r\n".encode())
        await writer.drain()
        status = await answer(reader)
        times_s.append(time.monotonic() - began)
        statuses[status] += 1
    writer.close()
    await writer.wait_closed()


def question(draw: random.Random) -> str:
    asked: dict[str, Any] = {"model": draw.choice(MODELS), "seq": draw.choice(SEQS), "gpu": draw.choice(("t4", "a10g"))}
    if draw.random() < SHARE_OF_SLOW:
        return f"/api/{draw.choice(('max-batch', 'plan'))}?{urlencode(asked)}"
    return f"/api/estimate?{urlencode({**asked, 'batch': draw.choice(BATCHES)})}"


async def answer(reader: asyncio.StreamReader) -> str:
    """The status of one answer, its body read."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length"))
    await reader.readexactly(length)
    return head.split()[1]


def resident_bytes(pid: int) -> int:
    """What a process and all that it started hold in memory, shared pages counted once in each (Linux)."""
    total = 0
    for one in [pid, *descendants(pid)]:
        try:
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have (Linux)."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has just ended
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


if __name__ == "__main__":
    main()
