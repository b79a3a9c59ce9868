"""Serving on a GPU: in its budget, packed where there is a kernel, with the answers of the CPU."""

import pytest
import torch
from tests.unit.loader.checkpoints import SENTENCES, minilm
from tests.unit.serve.small_servers import ask, engine_of

from vramfit.techniques import packing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MEMORY = 2 * 2**30


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
