"""Serving on a GPU: in its budget, packed where there is a kernel, with the answers of the CPU."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.checkpoints.broken import load_script
from tests.unit.loader.checkpoints import SENTENCES, minilm
from tests.unit.serve.small_servers import ask, engine_of

from vramfit.techniques import packing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MEMORY = 2 * 2**30
serving: Any = load_script(Path(__file__).parents[2] / "benchmarks" / "serving.py")


@pytest.mark.parametrize(("precision", "within"), [("fp32", 1e-5), ("bf16", 2e-2), ("amp-bf16", 2e-2), ("fp16", 2e-3)])
def test_answers_are_those_of_the_cpu_and_memory_is_kept(precision: str, within: float) -> None:
    texts = [*SENTENCES, " ".join(SENTENCES * 12)]
    expected = ask(engine_of(minilm()), texts)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine = engine_of(minilm(), devices=("cuda",), memory=MEMORY, precision=precision)
    engine.rehearse()
    assert engine.num_recoveries == 0
    assert packing.is_applied(engine._inference.model) == (
        precision != "fp32" and torch.cuda.get_device_capability() >= (8, 0)
    )
    for row, true in zip(ask(engine, texts), expected, strict=True):
        assert row["embedding"] == pytest.approx(true["embedding"], abs=within)
    assert torch.cuda.max_memory_reserved() <= MEMORY


def test_memory_that_another_takes_reaches_no_client() -> None:
    engine = engine_of(minilm(), devices=("cuda",), memory=MEMORY)
    planned = engine.max_tokens
    hog = torch.empty(MEMORY - torch.cuda.memory_reserved() - 64 * 2**20, dtype=torch.uint8, device="cuda")
    rows = ask(engine, [" ".join(SENTENCES * 12)] * 120)
    assert len(rows) == 120
    assert engine.num_recoveries > 0
    assert engine.max_tokens < planned
    del hog


def test_sixty_four_clients_get_the_answers_of_transformers_three_times_as_fast() -> None:
    options = Namespace(
        part="load", model=str(minilm()), device="cuda", memory="2GiB", requests=1000, clients=64, processes=4,
        beside=True, limit_s=120.0,
    )  # fmt: skip
    result = serving.load(options)
    assert result["held"], result
    assert result["worker_memory_bytes"] <= MEMORY
    assert result["plain"]["times_as_fast"] >= 3, result["plain"]
