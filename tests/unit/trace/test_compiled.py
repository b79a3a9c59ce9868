"""Compiled layers in a prediction: less is kept than by plain ones, and layers that are alike are looked at once."""

from collections import OrderedDict
from typing import Any
from unittest.mock import patch

import pytest

from vramfit import estimate
from vramfit.estimator import traced
from vramfit.trace import compiled
from vramfit.trace.compiled import _Compiled

SETTINGS = {"gpu": "h200", "torch_version": "2.11", "loop": "stepper", "optimizer": "adamw-fused", "batch": 16}


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
@pytest.mark.parametrize("model", ["bert-small", "distilroberta-base", "albert-base-v2", "modernbert-base"])
def test_compiled_layers_keep_less(model: str, attention: str) -> None:
    plain, fused = (
        estimate(model, seq=128, precision="amp-bf16", attention=attention, compile=c, **SETTINGS)
        for c in (False, True)
    )
    kept = [e.breakdown["activations"] + e.breakdown["temporaries"] for e in (plain, fused)]
    assert 0.5 * kept[0] < kept[1] < 0.97 * kept[0]
    assert fused.peak_allocated_bytes < plain.peak_allocated_bytes
    assert fused.step_time_s < plain.step_time_s
    assert fused.basis == "derived"
    assert any("compiled" in note for note in fused.notes)


@pytest.fixture
def compiled_types(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The type of each layer that is compiled; a mock would keep its tensors, and so change the prediction."""
    compile_layer, seen = _Compiled._compile, list[type]()

    def compile_seen(self: _Compiled, layer: Any, *args: Any) -> Any:
        seen.append(type(layer))
        return compile_layer(self, layer, *args)

    monkeypatch.setattr(_Compiled, "_compile", compile_seen)
    return seen


def test_alike_layers_are_compiled_once(compiled_types: list[type]) -> None:
    estimate("bert-base-uncased", seq=64, compile=True, **SETTINGS)
    assert len(compiled_types) == 1


def test_jobs_with_the_same_layers_share_what_was_compiled_and_others_do_not(compiled_types: list[type]) -> None:
    keywords = {"seq": 40, "compile": True} | SETTINGS
    first = estimate("bert-mini", **keywords)
    estimate("bert-mini", **keywords | {"optimizer": "sgd", "checkpointing": "full"})
    assert len(compiled_types) == 1
    for other in ({"precision": "amp-bf16"}, {"gpu": "t4"}, {"dropout": False}, {"seq": 48}):
        estimate("bert-mini", **keywords | other)
    assert len(compiled_types) == 5
    with patch.object(compiled, "_kept", OrderedDict()), patch.object(traced, "_kept", OrderedDict()):
        assert estimate("bert-mini", **keywords) == first


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_a_prediction_is_the_same_whether_its_layers_were_compiled_before(
    attention: str, checkpointing: str | None
) -> None:
    keywords = SETTINGS | {"seq": 128, "compile": True, "precision": "amp-bf16", "attention": attention}
    with patch.object(compiled, "_kept", OrderedDict()):
        first = estimate("bert-mini", checkpointing=checkpointing, **keywords)
        with patch.object(traced, "_kept", OrderedDict()):
            assert estimate("bert-mini", checkpointing=checkpointing, **keywords) == first


def test_what_is_kept_grows_with_tokens_and_layers() -> None:
    """Of a layer: its input in fp32, its products' inputs, masks and normalised values: known to the byte a token."""
    short, long = (
        estimate("bert-base-uncased", seq=n, compile=True, attention="packed", precision="amp-bf16", **SETTINGS)
        for n in (128, 256)
    )
    a_token = (long.breakdown["activations"] - short.breakdown["activations"]) / (16 * 128)
    hidden, wide, layers, heads = 768, 3072, 12, 12
    products = 2 * (6 * hidden + 2 * wide)  # bf16: input, query, key, value, attention's, the second norm's; GELU's two
    normalised, masks, sums = 2 * 4 * hidden, 2 * hidden, 4 * heads
    layer = products + normalised + masks + sums
    assert a_token == pytest.approx(layers * layer, rel=0.06)  # and what the embeddings and the peak's layer add


@pytest.mark.parametrize("settings", [{"checkpointing": "full"}, {"freeze": 2}, {"lora": 8}, {"precision": "fp32"}])
def test_compiled_layers_go_with_other_techniques(settings: dict[str, Any]) -> None:
    keywords = {"precision": "amp-bf16", "seq": 64} | SETTINGS | settings
    plain, fused = (estimate("bert-small", compile=c, **keywords) for c in (False, True))
    assert fused.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.05)


def test_inference_is_compiled_too() -> None:
    keywords = {"seq": 128, "batch": 16, "mode": "infer", "precision": "amp-bf16", "gpu": "h200"}
    plain, fused = (estimate("bert-small", compile=c, **keywords) for c in (False, True))
    assert fused.peak_allocated_bytes <= plain.peak_allocated_bytes
