"""Decoders, encoder-decoders, experts and state spaces: a trace takes the way that real tensors take."""

from typing import Any

import pytest
import torch
from tests.unit.trace.families import KINDS, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.cuda.kernels import KERNELS
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.traced import collection_paused
from vramfit.models.configuration import make_ready
from vramfit.step.plain import make_batch

BATCH, SEQ = 2, 8
ON_CUDA_ALONE = {"cublas_workspace", "cublaslt_workspace"}


class Requests(TorchDispatchMode):
    """The storages that operators make on the host, and who made them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in _tensors((args, tuple((kwargs or {}).values())))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage.nbytes():
                self.made.append((func._schema.name.partition("::")[2], block(storage.nbytes())))
                given.add(storage._cdata)
        return result


def block(num_bytes: int) -> int:
    """The allocator's smallest unit: `unique` keeps what it took for more than it found, on a CPU."""
    return -(-num_bytes // 512)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple | list) else []


def real_requests(config: Any, mask: str) -> list[tuple[str, int]]:
    """What a forward pass of real tensors makes."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    make_ready(model)
    inputs = make_batch(model, "sequence-classification", "infer", mask, BATCH, SEQ, "cpu")
    with torch.no_grad(), Requests() as requests:
        model(**inputs)
    return requests.made


def traced_requests(config: Any, mask: str) -> list[tuple[str, int]]:
    """What a trace of the same pass asks for, at any batch, set to this one."""
    asked = {"batch": BATCH, "seq": SEQ, "mode": "infer", "attention": "eager", "mask": mask}
    with collection_paused():
        traced, _ = resolve_workload(config, asked)
        stream = traced.template(BATCH).instantiate(BATCH, [("first.micro0", "first")])
    sizes = [event for event in stream.events if event > 0]
    names = [stream.origins[index].operator for index in stream.request_origins]
    return [(name, block(size)) for name, size in zip(names, sizes, strict=True) if name not in ON_CUDA_ALONE]


@pytest.mark.parametrize("mask", ["ones", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_asks_for_what_real_tensors_take(kind: str, mask: str) -> None:
    real, traced = real_requests(tiny(kind), mask), iter(traced_requests(tiny(kind), mask))
    extra: list[str] = []
    for request in real:
        for asked in traced:
            if asked == request:
                break
            extra.append(asked[0])
        else:
            pytest.fail(f"{request} of the real run is not in the trace, or not in its place")
    assert set(extra) | {name for name, _ in traced} <= KERNELS.keys()  # what kernels take beside their outputs
