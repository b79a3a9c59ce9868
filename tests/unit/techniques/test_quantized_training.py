"""Training beside int8 weights: what is quantized, what gradients it gives, and what waits for backward."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.techniques import application, quantization
from vramfit.techniques.quantization import FrozenLinear, dequantized
from vramfit.workload import Workload

pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')

SIZES = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
INPUTS = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.tensor([0, 1])}


def small(kind: Any = BertForSequenceClassification, config: Any = BertConfig) -> Any:
    torch.manual_seed(0)
    return kind(config(**SIZES, intermediate_size=128, max_position_embeddings=32))


def trained(**keywords: Any) -> Any:
    model = small()
    application.apply(model, Workload(model="m", quantize="int8", dropout=False, **keywords))
    return model


def quantized(model: torch.nn.Module) -> set[str]:
    return {n for n, m in model.named_modules() if isinstance(m, FrozenLinear)}


def in_full(model: Any) -> Any:
    """The same model with its int8 weights in full: what the arithmetic should be."""
    for module in model.modules():
        if isinstance(module, FrozenLinear):
            module.__class__ = torch.nn.Linear
            module.weight = torch.nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return model


def gradients(model: Any, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(**INPUTS).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("columns", [128, 96, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantizing_is_torchaos_to_the_bit(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = quantization.quantize_weight(torch.randn(16, columns).to(dtype), "int8")
    in_fp32 = weight.dequantize(torch.float32)  # type: ignore[operator]
    assert torch.equal(dequantized(weight), in_fp32.to(dtype))


@pytest.mark.parametrize(
    "keywords",
    [{"freeze": "backbone"}, {"freeze": "encoder"}, {"lora": 4}, {"lora": 4, "checkpointing": "full"}],
    ids=str,
)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_gradients_are_those_of_the_weights_in_full(keywords: dict[str, Any], autocast: torch.dtype | None) -> None:
    torch.manual_seed(3)
    ours = gradients(trained(**keywords), autocast)
    torch.manual_seed(3)
    theirs = gradients(in_full(trained(**keywords)), autocast)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name


def test_the_gradient_of_the_input_is_that_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32).requires_grad_(False)
    model = torch.nn.Sequential(linear)
    quantization.apply(model, "int8", trains=True)
    x = torch.randn(3, 5, 64, requires_grad=True)
    model(x).square().sum().backward()
    ours = x.grad
    x.grad = None
    torch.nn.functional.linear(x, linear.weight.dequantize(), linear.bias).square().sum().backward()  # type: ignore[operator]
    assert x.grad is not None
    torch.testing.assert_close(ours, x.grad)


def test_layers_that_learn_are_left_in_full() -> None:
    """Heads and adapters learn always, the pooler under `encoder`; it is not quantized under `backbone` either."""
    for freeze in ("encoder", "backbone", ("embeddings", "encoder")):
        names = quantized(trained(freeze=freeze))
        assert "bert.encoder.layer.1.output.dense" in names
        assert "bert.pooler.dense" not in names
    adapted = quantized(trained(lora=4))
    assert "bert.encoder.layer.0.attention.self.query.base_layer" in adapted
    assert not any("lora_" in name or "classifier" in name for name in adapted)


def test_a_head_with_a_large_layer_learns_in_full() -> None:
    model = small(RobertaForSequenceClassification, RobertaConfig)
    application.apply(model, Workload(model="m", quantize="int8", freeze="backbone"))
    assert model.classifier.dense.weight.requires_grad
    assert "classifier.dense" not in quantized(model)


def test_quantized_weights_never_require_a_gradient() -> None:
    for model in (trained(lora=4), trained(freeze="backbone")):
        weights = [m.weight for m in model.modules() if isinstance(m, FrozenLinear)]
        assert weights
        assert not any(w.requires_grad for w in weights)


def test_no_weight_in_full_waits_for_backward() -> None:
    """torchao's own product would keep one for every layer."""
    kept: list[torch.Size] = []

    model = trained(lora=4)
    plain = {p.data_ptr() for p in model.parameters() if type(p) is torch.nn.Parameter}  # there anyway

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in plain:
            kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**INPUTS)
    sizes = {tuple(sorted(shape)) for shape in kept}
    assert (64, 128) not in sizes
    assert (64, 64) not in sizes


def test_a_mode_sees_the_weight_dequantized_in_both_directions() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func._schema.name == "aten::mul" and args[0].dtype == torch.int8:
                seen.append(part)
            return result

    model = trained(lora=4)
    num_layers = len(quantized(model))
    with Watch():
        part = "forward"
        loss = model(**INPUTS).loss
        part = "backward"
        loss.backward()
    assert seen.count("forward") == num_layers
    assert 0 < seen.count("backward") <= num_layers


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16", "amp-fp16"])
def test_int8_beside_lora_is_predicted_to_take_less(precision: str) -> None:
    keywords: dict[str, Any] = {"batch": 8, "seq": 64, "lora": 8, "precision": precision, "gpu": "h200"}
    in_int8 = estimate("bert-mini", **keywords, quantize="int8")
    assert in_int8.breakdown["weights"] < estimate("bert-mini", **keywords).breakdown["weights"]
    assert in_int8.peak_requested_bytes < estimate("bert-mini", **keywords).peak_requested_bytes


@pytest.mark.parametrize("quantize", ["int4", "int8-dynamic"])
def test_other_forms_cannot_train(quantize: Any) -> None:
    with pytest.raises(WorkloadError, match=f"quantize {quantize} cannot train"):
        Workload(model="m", quantize=quantize, lora=8)
    with pytest.raises(WorkloadError, match="has no gradient"):
        quantization.apply(small(), quantize, trains=True)
    Workload(model="m", quantize=quantize, mode="infer")
