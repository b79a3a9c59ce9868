"""`vramfit report` and the start of `vramfit web` as a user runs them."""

import json
from pathlib import Path

from tests.integration.command import vramfit


def test_an_estimate_becomes_one_file(tmp_path: Path) -> None:
    made = vramfit("estimate", "bert-tiny", "--batch", "4", "--seq", "32", "--gpu", "t4", "--json")
    (tmp_path / "e.json").write_text(made.out)
    done = vramfit("report", str(tmp_path / "e.json"), "--no-grid", "--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert told["report"] == str(tmp_path / "e.html")
    assert told["notes"] == []
    html = (tmp_path / "e.html").read_text()
    assert told["num_bytes"] == len(html.encode()) < 8 * 2**20
    for part in ("Fits, with", "One step, from left to right", "Alive at the peak", "Environment and versions"):
        assert part in html, part


def test_what_is_no_run_is_one_line_and_what_to_do(tmp_path: Path) -> None:
    done = vramfit("report", str(tmp_path))
    assert done.code == 1
    assert "holds no run" in done.err
    assert "→ give the folder of a run" in done.err
    assert len(done.err.strip().splitlines()) == 2


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 0.5}\n')
    done = vramfit("report", str(tmp_path), "--output", str(tmp_path / "no" / "such" / "r.html"))
    assert done.code == 1
    assert "Traceback" not in done.err


def test_the_page_is_served_on_this_machine_alone() -> None:
    done = vramfit("web", "--host", "0.0.0.0", "--port", "8765")
    assert done.code == 1
    assert "for this machine alone" in done.err
    assert "ssh -L 8765:127.0.0.1:8765" in done.err


def test_a_port_that_is_taken_is_an_error() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = vramfit("web", "--port", str(taken.getsockname()[1]))
    assert done.code == 1
    assert "cannot listen on 127.0.0.1" in done.err
    assert "Traceback" not in done.err
