"""A wrong name, file or column is told before anything heavy is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.runtime.training.small_runs import write_classes

from vramfit.cli.first_look import look_at_columns, look_at_data, look_at_driver, look_at_model
from vramfit.errors import DataError, VramfitError, WorkloadError
from vramfit.models.catalogue import all_entries
from vramfit.models.resolve import resolve
from vramfit.runtime.data.source import DataSource

SCRIPT = """
import json, sys
sys.argv = ["vramfit", *{arguments!r}]
try:
    from vramfit.cli.main import main
    main()
finally:
    print(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "nosuch.csv", "--model", "bert-tiny", "--output", "out"), "cannot read nosuch.csv"),
        (("train", "DATA", "--model", "./nosuch", "--output", "out"), "unknown model './nosuch'"),
        (("train", "DATA", "--model", "bert-tiny", "--output", "out", "--text-column", "nope"), "no column 'nope'"),
        (("train", "DATA", "--model", "bert-tiny", "--output", "out", "--gpu", "t44"), "no GPU 't44'"),
        (
            ("train", "DATA", "--problem", "regression", "--model", "bert-tiny", "--output", "out"),
            "not a finite number",
        ),
        (("train", "EMPTY", "--model", "bert-tiny", "--output", "out"), "there are no rows in it"),
        (("train", "DATA", "--model", "bert-tiny", "--output", "out", "--max-rows", "1"), "nothing to tell apart"),
        (("train", "DATA", "--eval-data", "STARS", "--model", "bert-tiny", "--output", "out"), "different decimals"),
        (("evaluate", "bert-tiny", "nosuch.csv"), "cannot read nosuch.csv"),
        (("evaluate", "MODEL", "DATA", "--label-column", "nope"), "no column 'nope'"),
        (("evaluate", "MODEL", "STARS"), "give data with the labels that are known: bad, good"),
        (("predict", "MODEL", "DATA", "--text-column", "nope"), "no column 'nope'"),
        (("predict", "MODEL", "EMPTY"), "there are no rows in it"),
        (("encode", "MODEL", "EMPTY", "-o", "vectors.npy"), "there are no rows in it"),
        (("encode", "MODEL", "DATA", "-o", "vectors.npy", "--text-column", "nope"), "no column 'nope'"),
        (("encode", "MODEL", "DATA", "-o", "vectors.npz"), "its ending is none of .npy"),
        (("plan", "bert-tiny", "--gpu", "t4", "--lengths", "nosuch.txt"), "neither a file that is there nor"),
        (("predict", "bert-tiny", "DATA", "--gpu", "t44"), "no GPU 't44'"),
        (("estimate", "bert-tiny", "--gpu", "t44"), "no GPU 't44'"),
        (("max-batch", "bert-tiny", "--seq", "100000", "--gpu", "t4"), "beyond the 512 positions of bert-tiny"),
        (("plan", "bert-tiny", "--seq", "100000", "--gpu", "t4"), "beyond the 512 positions of bert-tiny"),
        (("estimate", "bert-tiny", "--task", "features", "--mode", "train", "--gpu", "t4"), "no loss to train on"),
        (("plan", "bert-tiny", "--task", "features", "--gpu", "t4"), "no loss to train on"),
        (("max-batch", "bert-tiny", "--task", "features", "--gpu", "t4"), "no loss to train on"),
        (("plan", "bert-tiny", "--gpu", "t4", "--data", "nosuch.csv"), "cannot read nosuch.csv"),
        (("plan", "bert-tiny", "--gpu", "t4", "--data", "DATA", "--text-column", "nope"), "no column 'nope'"),
    ],
)
def test_a_quick_no_imports_nothing_heavy(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    data = str(write_classes(tmp_path / "train.csv", num_rows=4))
    rows = [f"a film,{n / 64}" for n in range(1, 80, 2)]
    (tmp_path / "stars.csv").write_text("\n".join(["text,label", *rows]))
    (tmp_path / "empty.csv").write_text("text,label\n")
    head = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
    (tmp_path / "config.json").write_text(json.dumps(head))
    files = {"DATA": data, "STARS": "stars.csv", "EMPTY": "empty.csv", "MODEL": str(tmp_path)}
    given = [files.get(a, a) for a in arguments]
    script = SCRIPT.format(arguments=given)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert done.stdout.strip() == "[]"
    assert not (tmp_path / "out").exists()


def test_a_machine_without_a_driver_is_told_so_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.devices.probe.has_driver", lambda: False)
    with pytest.raises(VramfitError, match="no CUDA device") as caught:
        look_at_driver("take another machine")
    assert caught.value.hint == "take another machine"


def test_lengths_are_refused_with_the_words_of_an_estimate() -> None:
    from vramfit.estimator.predict import estimate

    with pytest.raises(WorkloadError) as quick:
        look_at_model("roberta-base", [128, 513])
    with pytest.raises(WorkloadError) as slow:
        estimate("roberta-base", seq=513, gpu="t4")
    assert str(quick.value) == str(slow.value)


def test_every_published_model_may_have_its_longest_length() -> None:
    for entry in all_entries():
        look_at_model(entry.name, [entry.max_positions])
        with pytest.raises(WorkloadError, match=f"{entry.max_positions} or fewer"):
            look_at_model(entry.name, [entry.max_positions + 1])


def test_a_folder_comes_before_a_published_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkloadError, match="positions of bert-tiny"):
        look_at_model("bert-tiny", [100_000])
    resolve("bert-tiny").config.save_pretrained(tmp_path / "bert-tiny")
    monkeypatch.chdir(tmp_path)
    look_at_model("bert-tiny", [100_000])  # its own configuration will say


def test_data_that_can_be_read_once_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("vramfit.runtime.data.rows.open_table", lambda source: opened.append(source.path))
    os.mkfifo(tmp_path / "pipe.csv")
    look_at_data(DataSource(path=str(tmp_path / "pipe.csv"), task="sequence-classification"))
    look_at_data(DataSource(path="-", task="sequence-classification"))
    assert opened == []


def test_what_a_small_file_alone_decides_is_said_as_the_run_would(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_bytes(b"text,label\n\xe9t\xe9,good\n,bad\n")
    source = DataSource(path=str(tmp_path / "bad.csv"), task="sequence-classification")
    with pytest.raises(DataError, match="2 of 2 rows cannot be used"):
        look_at_data(source)
    look_at_columns(source)
    (tmp_path / "binary.csv").write_bytes(b"\0\1\2\3")
    with pytest.raises(DataError, match="not UTF-8 text"):
        look_at_columns(DataSource(path=str(tmp_path / "binary.csv"), task="sequence-classification"))


def test_of_a_large_file_only_the_columns_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_classes(tmp_path / "train.csv", num_rows=4)
    source = DataSource(path=str(path), task="sequence-classification")
    found = look_at_data(source)
    assert found is not None
    assert len(found.references) == 4
    monkeypatch.setattr("vramfit.cli.first_look.LOOKED_AT_BYTES", 10)
    assert look_at_data(source) is None
    with pytest.raises(DataError, match="no column 'nope'"):
        look_at_data(DataSource(path=str(path), task="sequence-classification", text_columns=("nope",)))
