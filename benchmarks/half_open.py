"""1,200 connections that never finish a request, beside 64 clients that do: are all of the 64 answered?

    python benchmarks/half_open.py serve --model FOLDER --output benchmarks/results/half_open_serve_DATE.json
    python benchmarks/half_open.py web --output benchmarks/results/half_open_web_DATE.json

The server may have 1,024 file handles. A hostile connection sends the beginning of a request and a byte every few
seconds (`--hold headers`, or `bodies`: whole headers, and a body that trickles); one that the server closes is opened
again. They have a process of their own, so that the clients' is not late because of them. An honest client asks the
server's smallest question over and over, every second time on a new connection. All traffic is to 127.0.0.1.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HANDLES = 1024
"""That the server may have."""
START_S = 300
ANSWER_S = 60
"""An answer that has not come by then is lost."""
TRICKLE_S = 3.0
PAUSE_S = 0.2
"""Between two questions of a client."""
AGAIN_S = 0.5
"""Before a hostile connection that was closed is opened again."""
GATHER_S = 60
"""Until all hostile connections have been opened once."""
QUESTIONS = {
    "serve": ("POST", "/invocations", b'{"inputs": "the film was great"}'),
    "web": ("GET", "/api/catalogue", b""),
}
MAX_LOG_BYTES = 10**6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=list(QUESTIONS))
    parser.add_argument("--model", default="bert-tiny", help="for serve: a folder with a model and its tokenizer")
    parser.add_argument("--hold", choices=["headers", "bodies"], default="headers")
    parser.add_argument("--hostile", type=int, default=1200)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    extra = [given.model, "--device", "cpu"] if given.verb == "serve" else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        server = start([given.verb, *extra], log, HANDLES)
        try:
            result = asyncio.run(attack(server[1], given))
        finally:
            server[0].send_signal(signal.SIGTERM)
            server[0].wait(60)
        result |= {"handles": HANDLES, "log_bytes": log.stat().st_size, "log_begins": log.read_text()[:400]}
    result["held"] = set(result["statuses"]) == {"200"} and result["log_bytes"] < MAX_LOG_BYTES
    text = json.dumps(result, indent=2)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n", encoding="utf-8")
    return 0 if result["held"] else 1


def start(arguments: list[str], log: Path, num_handles: int) -> tuple["subprocess.Popen[str]", str]:
    """A server with so many file handles, and its address once it is ready."""
    command = [sys.executable, "-m", "vramfit", *arguments, "--port", "0", "--json"]
    limits = (num_handles, num_handles)
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
        )
    assert process.stdout is not None
    alarm = threading.Timer(START_S, process.kill)
    alarm.start()
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("}"):
            break
    alarm.cancel()
    if not said:
        raise SystemExit(f"the server did not start: {log.read_text()}")
    return process, urlsplit(json.loads(said)["url"]).netloc


async def attack(address: str, given: argparse.Namespace) -> dict[str, Any]:
    """Hold connections while clients ask; what the clients were told."""
    statuses: Counter[str] = Counter()
    times_s: list[float] = []
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    hostile = context.Process(target=hold_all, args=(address, given.hold, given.hostile, theirs), daemon=True)
    hostile.start()
    if not ours.poll(GATHER_S):
        raise SystemExit(f"{given.hostile:,} connections could not be opened within {GATHER_S} s")
    ours.recv()
    until = time.monotonic() + given.seconds
    await asyncio.gather(*(ask(address, QUESTIONS[given.verb], until, statuses, times_s) for _ in range(given.clients)))
    ours.send("enough")
    seen = ours.recv() if ours.poll(GATHER_S) else Counter()
    hostile.join(5)
    return {
        "verb": given.verb,
        "hold": given.hold,
        "hostile": given.hostile,
        "hostile_opened": seen["opened"],
        "hostile_closed_by_the_server": seen["closed"],
        "clients": given.clients,
        "seconds": given.seconds,
        "statuses": dict(statuses),
        "longest_s": round(max(times_s, default=0.0), 2),
    }


def hold_all(address: str, what: str, number: int, pipe: Any) -> None:
    """Hostile connections, in a process of their own, until the pipe says that it is enough."""
    asyncio.run(_hold_all(address, what, number, pipe))


async def _hold_all(address: str, what: str, number: int, pipe: Any) -> None:
    seen: Counter[str] = Counter()
    enough = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), enough.set)
    holding = [asyncio.ensure_future(hold(address, what, seen)) for _ in range(number)]
    while seen["opened"] < number:
        await asyncio.sleep(0.05)
    pipe.send("opened")
    await enough.wait()
    for one in holding:
        one.cancel()
    pipe.send(seen)


async def hold(address: str, what: str, seen: "Counter[str]") -> None:
    """One hostile connection: never a whole request, opened again where it is closed."""
    host, _, port = address.rpartition(":")
    begun = f"POST /invocations HTTP/1.1\r\nHost: {address}\r\n"
    if what == "bodies":
        begun += "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            seen["opened"] += 1
            writer.write(begun.encode() if what == "bodies" else f"{begun}X-Slow: ".encode())
            while await still_open(reader):
                writer.write(b"a")
            seen["closed"] += 1
            writer.close()
        except OSError:
            seen["closed"] += 1
        await asyncio.sleep(AGAIN_S)


async def still_open(reader: asyncio.StreamReader) -> bool:
    """Whether the server has left a connection open for a while; what it says is thrown away."""
    try:
        async with asyncio.timeout(TRICKLE_S):
            return bool(await reader.read(1000))
    except TimeoutError:
        return True


async def ask(
    address: str, question: tuple[str, str, bytes], until: float, statuses: "Counter[str]", times_s: list[float]
) -> None:
    """One client: question after question, two on each connection."""
    host, _, port = address.rpartition(":")
    method, path, body = question
    head = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    asked = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    while time.monotonic() < until:
        writer = None
        try:
            async with asyncio.timeout(ANSWER_S):
                for _ in range(2):
                    began = time.monotonic()
                    if writer is None:
                        reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(asked)
                    statuses[await answer(reader)] += 1
                    times_s.append(time.monotonic() - began)
                    await asyncio.sleep(PAUSE_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            statuses[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_S)
        if writer is not None:
            writer.close()


async def answer(reader: asyncio.StreamReader) -> str:
    """The status of one answer, its body read."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length"))
    await reader.readexactly(length)
    return head.split()[1]


if __name__ == "__main__":
    sys.exit(main())
