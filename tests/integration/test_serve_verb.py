"""`vramfit serve` as it runs: over HTTP, with workers that die, and under load with faults."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import vramfit
from tests.unit.checkpoints.broken import load_script
from tests.unit.serve.small_servers import write_head
from tests.waiting import LIMIT_S, running

ROOT = Path(__file__).parents[2]
serving: Any = load_script(ROOT / "benchmarks" / "serving.py")
FORKED = (str(Path(__file__).with_name("serve_from_forks.py")),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_head(tmp_path_factory.mktemp("served"), "features"))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS")  # workers share the processors among themselves
        limits = ("--memory", "400MiB", "--timeout", "280")
        started = serving.Server(model, "--device", "cpu", "--workers", "2", *limits, program=FORKED)
    try:
        yield started
    finally:
        started.stop()


def post(server: Any, inputs: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.facts['url']}invocations",
        json.dumps({"inputs": inputs}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_sixty_four_clients_get_their_own_answers_in_bounded_memory(server: Any, model: str) -> None:
    asked = serving.questions(400, 5, serving.read_words(model), hard=True)
    before = serving.resident_bytes(server.process.pid)
    heard, _, held = serving.ask(server, asked, 64, 1)
    compared = serving.differences(heard, asked, serving.one_at_a_time(model, "cpu", asked)[0])
    assert len(heard.answers) == 400
    assert (heard.num_lost, heard.num_turned_away, compared["num_wrong"], compared["num_5xx"]) == (0, 0, 0, 0)
    assert set(compared["statuses"]) == {"200", "400"}
    assert held < before + 400 * 2**20
    metrics = serving.metrics_of(server.address)
    assert metrics["vramfit_accepted_total"] == metrics["vramfit_answered_total"] >= 400
    assert {f'vramfit_batches_total{{worker="{n}"}}' for n in (0, 1)} <= set(metrics)


def test_a_worker_that_is_killed_is_replaced_and_nobody_notices(server: Any) -> None:
    before = serving.metrics_of(server.address)["vramfit_worker_restarts_total"]
    workers = [pid for pid in serving._descendants(server.process.pid) if _is_worker(pid)]
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    status, row = post(server, "anna saw the film")
    assert status == 200
    assert len(row["embedding"]) == 32
    assert serving.metrics_of(server.address)["vramfit_worker_restarts_total"] > before


def _is_worker(pid: int) -> bool:
    """Whether it is forked from the process that has imported everything."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return all(b"forkserver" in Path(f"/proc/{one}/cmdline").read_bytes() for one in (pid, parent))


def test_faults_and_a_stop_in_the_middle_of_requests(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = Namespace(
        part="faults", model=model, device="cpu", memory="200MiB", clients=32, processes=1, seconds=0.0, rounds=3,
        pool=200, fail_every=12, stop_after=40, timeout_s=280.0, limit_s=LIMIT_S,
    )  # fmt: skip
    result = serving.faults(options)
    assert result["held"], result
    assert result["num_recoveries"] >= 2
    assert result["num_hung_up"] >= 5
    assert result["turned_away_in_the_last_round"] > 0  # SIGTERM came in the middle


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--memory", "12MiB", "--device", "emulated"), 3, "one text of 48 tokens takes"),
        (("--task", "sentiment"), 2, "task 'sentiment' is not one of"),
    ],
)
def test_what_cannot_be_served_ends_in_a_sentence(
    model: str, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = vramfit("serve", model, "--port", "0", *arguments)
    assert done.code == code, done.err
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = vramfit("serve", model, "--port", str(taken.getsockname()[1]))
    assert done.code == 1
    assert done.err.startswith("Error: cannot listen on 127.0.0.1")


def test_a_polite_kill_while_loading_ends_it() -> None:
    command = [sys.executable, "-m", "vramfit", "serve", "no-such-model-anywhere", "--port", "0"]
    with running(command, stderr=subprocess.PIPE, env={**os.environ, "HF_HUB_OFFLINE": "1"}) as process:
        assert process.stderr is not None
        assert "Loading" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait() in (130, 2, -signal.SIGTERM)
