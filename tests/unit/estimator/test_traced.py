"""One trace serves every batch; a process makes it once and keeps the last few."""

from typing import Any

import pytest
import torch

from vramfit.errors import TraceError
from vramfit.estimator import traced as traced_module
from vramfit.estimator.resolve import resolve_workload


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The batches that were really traced."""
    seen: list[int | None] = []
    real = traced_module.trace

    def watched(*args: Any, batch: int | None = None, **keywords: Any) -> Any:
        seen.append(batch)
        return real(*args, batch=batch, **keywords)

    monkeypatch.setattr(traced_module, "trace", watched)
    monkeypatch.setattr(traced_module, "_kept", type(traced_module._kept)())
    return seen


def streams(model: Any, *batches: int, **keywords: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        traced, _ = resolve_workload(model, {"batch": batch, "seq": 16, "gpu": "t4"} | keywords)
        found.append(traced.stream(traced.workload.micro_batch or 0).events)
    return found


def test_one_trace_serves_every_batch_and_one_sample_has_its_own(traces: list[int | None]) -> None:
    streams("bert-tiny", 2, 3, 100, 1, 7, 1)
    assert traces == [None, 1]


def test_capacity_and_batch_do_not_need_another_trace(traces: list[int | None]) -> None:
    streams("bert-tiny", 4)
    streams("bert-tiny", 8, memory="1GiB")
    streams("bert-tiny", 6, micro_batch=6)
    assert traces == [None]


def test_accumulation_and_gpu_do(traces: list[int | None]) -> None:
    streams("bert-tiny", 4)
    streams("bert-tiny", 8, accumulate=2)
    streams("bert-tiny", 4, gpu="h200")
    assert traces == [None] * 3


def test_gpus_of_one_architecture_share_a_trace_and_have_streams_of_their_own(traces: list[int | None]) -> None:
    job = {"seq": 512, "mode": "train", "task": "masked-lm"}
    few, many = (streams("bert-tiny", 8, gpu=gpu, **job) for gpu in ("gtx-1650", "t4"))
    assert traces == [None]
    assert few != many  # reductions have buffers for each multiprocessor
    traced_module._kept.clear()
    assert streams("bert-tiny", 8, gpu="t4", **job) == many
    assert traces == [None] * 2


def test_the_oldest_trace_is_forgotten_first(traces: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_module, "MAX_KEPT", 2)
    for seq in (5, 6, 5, 7):  # 6 has not been asked for longest
        streams("bert-tiny", 4, seq=seq, mode="infer")
    assert len(traces) == 3
    streams("bert-tiny", 4, seq=5, mode="infer")
    assert len(traces) == 3
    streams("bert-tiny", 4, seq=6, mode="infer")
    assert len(traces) == 4


class LooksAtItsBatch(torch.nn.Module):
    """A model that samples more than 64 are too many for."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(100, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        return x if len(input_ids) <= 64 else torch.unique(x)


def test_a_model_that_looks_at_its_batch_is_traced_at_the_real_one(traces: list[int | None]) -> None:
    few, more = streams(LooksAtItsBatch(), 2, 64, task="features", mask="none")
    assert traces == [None, 2, None, 64]
    assert few != more
    with pytest.raises(TraceError, match="_unique2"):
        streams(LooksAtItsBatch(), 65, task="features", mask="none")


def test_a_module_is_traced_anew_every_time(traces: list[int | None]) -> None:
    first, again = streams(LooksAtItsBatch(), 1, 1, task="features", mask="none")
    assert first == again
    assert traces == [1, 1]
