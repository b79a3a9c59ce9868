import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from vramfit.monitor.places import JobSeen
from vramfit.records.watch import OutOfMemoryReport
from vramfit.runtime import watching as watch_advice
from vramfit.units import GIB

SOURCE: Any = SimpleNamespace(budget_bytes=lambda: GIB)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that the advice runs; each is answered with a largest batch of 4."""
    commands: list[list[str]] = []

    def run(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({"batch": 4}))

    monkeypatch.setattr(watch_advice.subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("weights", "autocast", "precision"),
    [
        (torch.bfloat16, None, "bf16"),
        (torch.bfloat16, torch.float16, "bf16"),
        (torch.float16, None, "fp16"),
        (torch.float32, torch.bfloat16, "amp-bf16"),
        (torch.float32, None, "fp32"),
    ],
)
def test_evaluation_is_advised_in_the_precision_it_ran_in(
    asked: list[list[str]], weights: torch.dtype, autocast: torch.dtype | None, precision: str
) -> None:
    model = BertForSequenceClassification(BertConfig(**SMALL)).to(weights)
    job = JobSeen(model=model, batch=8, seq=16, autocast=autocast)
    said = watch_advice.advise(job, OutOfMemoryReport(message="", phase="evaluation", step=0), SOURCE)
    (command,) = asked
    assert command[command.index("--precision") + 1] == precision
    assert "up to 4 samples a batch, not 8" in said[0]


def test_the_advice_is_asked_of_the_command_line(asked: list[list[str]]) -> None:
    job = JobSeen(model=BertForSequenceClassification(BertConfig(**SMALL)), batch=8, seq=16)
    watch_advice.advise(job, OutOfMemoryReport(message="", phase="evaluation", step=0), SOURCE)
    (command,) = asked
    assert command[1:5] == ["-P", "-m", "vramfit", "max-batch"]
