"""Sizes before a load: what each tensor will take, with and without quantization."""

import pytest
import torch

from vramfit.loader import budget
from vramfit.loader.budget import free_bytes, tensor_bytes
from vramfit.loader.load import load, make_request
from vramfit.models.build import build_meta
from vramfit.models.resolve import resolve
from vramfit.techniques import offloading
from vramfit.workload import Workload


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("quantize", [None, "int8", "int8-dynamic"])
@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
def test_sizes_are_those_of_the_loaded_model(precision: str, quantize: str | None, task: str) -> None:
    if quantize is not None:
        pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    keywords = {"task": task, "precision": precision, "quantize": quantize}
    workload = Workload.from_keywords(model="bert-tiny", mode="infer", **keywords)
    sizes = tensor_bytes(build_meta(resolve("bert-tiny", task=task)), workload)
    model, _ = load("bert-tiny", random_weights=True, device="cpu", **keywords)
    assert sum(sizes.values()) == offloading.model_bytes(model)


@pytest.mark.parametrize(("memory", "kept"), [(None, 0.75), ("given", 1.0)])
def test_offloading_leaves_room_for_activations_where_no_memory_is_given(
    memory: str | None, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = build_meta(resolve("bert-base-uncased"))
    total = offloading.model_bytes(meta)
    monkeypatch.setattr(budget, "free_bytes", lambda device: total)
    request = make_request("bert-base-uncased", offload="weights", memory=total if memory else None)
    expected = offloading.num_resident_layers(meta, int(kept * total))
    assert budget.resident_layers(request, meta, torch.device("cuda")) == expected
    plain = make_request("bert-base-uncased")
    assert budget.resident_layers(plain, meta, torch.device("cuda")) == 12


def test_the_host_does_not_say_what_is_free() -> None:
    assert free_bytes(torch.device("cpu")) is None
