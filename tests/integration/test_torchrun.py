"""`torchrun -m vramfit train` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.runtime.training.small_runs import write_classes, write_model
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent.parent


def torchrun(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [*command, "-m", "vramfit", *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=environment
    )


def test_two_processes_train_one_model_and_one_of_them_speaks(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    write_classes(tmp_path / "train.csv", num_rows=24)
    where = ["--model", str(tmp_path / "source"), "--output", str(tmp_path / "out"), "--device", "cpu"]
    settings = ["--batch", "8", "--epochs", "1", "--parallel", "fsdp", "--json"]
    done = torchrun("train", str(tmp_path / "train.csv"), *where, *settings)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)  # one record, not two
    assert record["settings"]["num_gpus"] == 2
    assert record["model_class"] == "BertForSequenceClassification"
    assert done.stderr.count("Training: 3 steps, batch 8 on 2 processes (fsdp) in micro-batches of 4") == 1
    assert (tmp_path / "out" / "model.safetensors").exists()
