"""Data is read while the model's class is imported: the same errors in the same order, and progress is told."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.training.small_runs import write_classes, write_model

from vramfit.errors import CheckpointError, DataError, WorkloadError
from vramfit.runtime.data.samples import TOLD_ROWS
from vramfit.runtime.training.reading import Data, read_data
from vramfit.runtime.training.request import TrainRequest
from vramfit.stages import heard

FOUND = """import sys
from vramfit.models.resolve import find_model
from vramfit.models.tokenizers import load_tokenizer
assert find_model(sys.argv[1]).config.model_type == "bert"
load_tokenizer(sys.argv[1])
print("transformers.modeling_utils" in sys.modules)"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("reading") / "model")


def read(model: Path, data: Path, **settings: Any) -> Data:
    return read_data(TrainRequest(model=str(model), data=str(data), output="none", **settings), None)


def test_rows_that_are_tokenized_are_told_of_all(model: Path, tmp_path: Path) -> None:
    num_rows = 2 * TOLD_ROWS + 100
    write_classes(tmp_path / "train.csv", num_rows=num_rows)
    stages: list[str] = []
    with heard(stages.append):
        data = read(model, tmp_path / "train.csv", eval_data=str(write_classes(tmp_path / "dev.csv", num_rows=10)))
    assert len(data.train) == num_rows
    told = [stage for stage in stages if stage.startswith("tokenizing")]
    done = [f"tokenizing, {n * TOLD_ROWS:,} of {num_rows:,} rows done" for n in (1, 2)]
    assert told == [f"tokenizing {num_rows:,} rows", *done, "tokenizing 10 rows"]


def test_a_model_that_cannot_do_the_task_is_said_before_bad_data_and_a_missing_tokenizer(tmp_path: Path) -> None:
    config = '{"model_type": "vit_mae", "architectures": ["ViTMAEModel"]}'
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    (tmp_path / "bad.csv").write_text("text,label\n,good\n")
    with pytest.raises(WorkloadError, match="no head"):
        read(tmp_path / "model", tmp_path / "bad.csv")


def test_a_missing_tokenizer_is_said_before_bad_data(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "bad.csv").write_text("text,label\n,good\n")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        read(tmp_path / "model", tmp_path / "bad.csv")


@pytest.mark.parametrize("bad", ["train", "eval"])
def test_bad_data_is_an_error_of_its_own(model: Path, tmp_path: Path, bad: str) -> None:
    good = write_classes(tmp_path / "good.csv")
    (tmp_path / "bad.csv").write_text("text,label\n,good\nfine,bad\n")
    train, dev = (tmp_path / "bad.csv", good) if bad == "train" else (good, tmp_path / "bad.csv")
    with pytest.raises(DataError, match=r"bad\.csv: 1 of 2 rows cannot be used: row 2: text is empty"):
        read(model, train, eval_data=str(dev))


def test_a_configuration_and_a_tokenizer_need_no_model_code(model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FOUND, str(model)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
