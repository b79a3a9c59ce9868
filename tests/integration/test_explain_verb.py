"""`vramfit explain` as a user runs it."""

import json
from pathlib import Path

from tests.integration.command import vramfit
from tests.unit.doctor.real_messages import MESSAGES
from vramfit.records.codec import from_data
from vramfit.records.watch import Explanation

OLD = next(r.text for r in MESSAGES if "GenerativeGraph" in r.where)


def test_a_log_from_standard_input_is_explained() -> None:
    done = vramfit("explain", stdin=f"epoch 1\n{OLD}\n")
    assert (done.code, done.err) == (0, "")
    for part in ("10.90 GiB", "as a k80 has", "line 2", "expandable_segments", "--model"):
        assert part in done.out, part


def test_a_file_with_a_model_gives_the_plan_as_json(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(OLD)
    done = vramfit("explain", str(tmp_path / "train.log"), "--model", "bert-tiny", "--batch", "64", "--json")
    said = from_data(Explanation, json.loads(done.out))
    assert (done.code, done.err) == (0, "")
    assert said.plan is not None
    assert said.plan.workload.batch == 64


def test_the_message_itself_is_explained() -> None:
    done = vramfit("explain", OLD)
    assert (done.code, done.err) == (0, "")
    assert "10.90 GiB" in done.out


def test_words_that_are_no_file_and_no_message_say_so(tmp_path: Path) -> None:
    (tmp_path / "my train.log").write_text(OLD)
    assert vramfit("explain", str(tmp_path / "my train.log")).code == 0
    done = vramfit("explain", str(tmp_path / "my other.log"))
    assert done.code == 1
    assert "no out-of-memory message" in done.err


def test_bad_input_is_two_lines(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 1000)
    for arguments, code, words in (
        ((str(tmp_path / "binary"),), 1, "no out-of-memory message"),
        ((str(tmp_path / "none"),), 1, "No such file"),
        ((str(tmp_path),), 1, "cannot read"),
        (("--batch", "8"), 2, "--model"),
        (("--model", "bert-tinny"), 2, "bert-tiny"),
    ):
        done = vramfit("explain", *arguments, stdin=OLD)
        assert done.code == code, done.err
        assert words in done.err
        assert len(done.err.strip().splitlines()) <= 2
