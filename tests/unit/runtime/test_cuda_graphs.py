"""Captures that fail, with torch's own calls replaced: what torch leaves open is ended."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from vramfit.runtime import graphs as cuda_graphs
from vramfit.runtime.graphs import CudaCapture


class FakeGraph:
    """A graph whose first capture cannot be ended, where `is_invalid`."""

    is_invalid = True
    done: list[str]

    def capture_begin(self, **keywords: Any) -> None:
        self.done.append("begin")

    def capture_end(self) -> None:
        if FakeGraph.is_invalid:
            FakeGraph.is_invalid = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.done.append("end")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(cuda_graphs, "_UNENDED", [])
    monkeypatch.setattr(FakeGraph, "done", made, raising=False)
    monkeypatch.setattr(FakeGraph, "is_invalid", True)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given, name=name: made.append(f"{name}{given}"), raising=False)
    return made


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [RuntimeError("not permitted when stream is capturing"), KeyboardInterrupt()])
def test_an_invalid_capture_is_ended_and_the_generator_with_it(done: list[str], error: BaseException) -> None:
    records = CudaCapture(torch.device("cpu"))
    with pytest.raises(type(error)):
        records(lambda: fail(error))
    assert done == ["begin", "_cuda_endAllocateToPool(0, (0, 7))", "_cuda_releasePool(0, (0, 7))", "begin", "end"]
    assert len(cuda_graphs._UNENDED) == 1


def test_a_capture_that_can_be_ended_is(done: list[str]) -> None:
    FakeGraph.is_invalid = False
    records = CudaCapture(torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError):
        records(lambda: fail(torch.OutOfMemoryError("CUDA out of memory")))
    assert done == ["begin", "end"]
    assert not cuda_graphs._UNENDED


def test_a_call_that_leaves_the_capture_invalid_is_an_error(done: list[str]) -> None:
    records = CudaCapture(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="previous error"):
        records(lambda: None)
