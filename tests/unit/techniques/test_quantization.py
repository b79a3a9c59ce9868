"""Quantization on the meta device and on a real one: the same layers, the same sizes, embeddings left alone."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from vramfit.errors import WorkloadError
from vramfit.models.build import build_meta
from vramfit.models.catalogue import all_entries
from vramfit.models.resolve import resolve
from vramfit.techniques import quantization
from vramfit.techniques.quantization import inner_tensors
from vramfit.workload import Workload

pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')


def small(**changes: int) -> BertConfig:
    sizes = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertConfig(**(sizes | {"intermediate_size": 128, "max_position_embeddings": 32} | changes))


@pytest.mark.parametrize("quantize", ["int8", "int8-dynamic"])
def test_a_meta_model_and_a_real_one_end_alike(quantize: str) -> None:
    real = BertForSequenceClassification(small()).eval()
    with torch.device("meta"):
        meta = BertForSequenceClassification(small()).eval()
    for model in (real, meta):
        quantization.apply(model, quantize)  # type: ignore[arg-type]
    for (name, ours), (_, theirs) in zip(real.named_parameters(), meta.named_parameters(), strict=True):
        parts = [[(key, part.shape, part.dtype) for key, part in inner_tensors(p)] for p in (ours, theirs)]
        assert parts[0] == parts[1], name


def test_linear_layers_are_quantized_and_nothing_else() -> None:
    model = BertForSequenceClassification(small())
    quantization.apply(model, "int8")
    kinds = {type(m): type(m.weight).__name__ for m in model.modules() if hasattr(m, "weight")}
    assert kinds[torch.nn.Embedding] == kinds[torch.nn.LayerNorm] == "Parameter"
    assert type(model.bert.encoder.layer[0].output.dense.weight).__name__ == "Int8Tensor"
    assert isinstance(model.classifier.weight, torch.nn.Parameter)
    assert model.classifier.weight.dtype is torch.float32


def test_a_decoder_that_shares_the_word_embedding_is_left_alone() -> None:
    model = BertForMaskedLM(small())
    quantization.apply(model, "int8")
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert type(model.bert.encoder.layer[0].output.dense.weight).__name__ == "Int8Tensor"


def test_quantized_weights_stay_near_and_do_not_learn() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 64)
    before = linear.weight.detach().clone()
    quantization.quantize_linear(linear, "int8")
    after = linear.weight.dequantize()  # type: ignore[operator]
    assert (before - after).abs().max() < before.abs().max() / 127
    assert not linear.weight.requires_grad


def test_a_single_large_weight_spoils_only_its_group() -> None:
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(8, 128)
    weight[3, 5] = 8.0
    quantized = quantization.quantize_weight(weight, "int8").dequantize()  # type: ignore[operator]
    error = (weight - quantized).abs()
    assert error[3, 64:].max() < 0.001
    assert error[3, :64].max() > 0.01


def test_rows_at_a_time_give_the_whole() -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 64)
    whole = quantization.quantize_weight(weight, "int8")
    parts = [quantization.quantize_weight(weight[i : i + 16], "int8") for i in range(0, 40, 16)]
    for name, part in inner_tensors(whole):
        assert torch.equal(part, torch.cat([dict(inner_tensors(p))[name] for p in parts])), name


@pytest.mark.parametrize("quantize", ["int8", "int8-dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [64, 96, 40])
def test_written_in_place_it_is_torchaos_to_the_bit(quantize: str, dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(48, columns) * torch.rand(48, 1)).to(dtype)
    weight[3] = 0
    theirs = dict(inner_tensors(quantization.quantize_weight(weight, quantize)))  # type: ignore[arg-type]
    ours = {name: torch.empty_like(part) for name, part in theirs.items()}
    quantization.fill_int8(weight, ours)
    assert all(torch.equal(ours[name], part) for name, part in theirs.items())


def test_a_quantized_weight_can_be_taken_apart_and_put_together() -> None:
    whole = quantization.quantize_weight(torch.randn(16, 64), "int8")
    again = quantization.with_inner_tensors(whole, {n: p.clone() for n, p in inner_tensors(whole)})
    assert torch.equal(whole.dequantize(), again.dequantize())  # type: ignore[operator]


def test_int4_has_a_layout_without_any_gpu() -> None:
    with torch.device("meta"):
        linear = torch.nn.Linear(1024, 64, dtype=torch.bfloat16)
    quantization.quantize_linear(linear, "int4")
    num_bytes = sum(part.numel() * part.element_size() for _, part in inner_tensors(linear.weight))
    assert num_bytes == 64 * 1024 // 2 + 64 * 1024 // 128 * 4


def test_int4_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(WorkloadError) as caught:
        quantization.check(Workload(model="m", mode="infer", quantize="int4"), torch.device("cpu"))
    assert len(caught.value.problems) == 2
    quantization.check(Workload(model="m", mode="infer", quantize="int8"), torch.device("cpu"))


def test_the_integer_product_is_not_asked_for_sizes_it_does_not_take() -> None:
    model = BertForSequenceClassification(small(hidden_size=36, intermediate_size=72))
    assert quantization.quantizable(model, "int8") == []


def test_a_piece_that_was_quantized_is_freed_at_once() -> None:
    """torchao ties a module to itself; a load that waits for the collector would hold every piece it brought."""
    import gc
    import weakref

    gc.disable()
    try:
        weight = quantization.quantize_weight(torch.randn(16, 64), "int8")
        part = weakref.ref(next(t for _, t in inner_tensors(weight)).untyped_storage())
        assert part() is not None
        del weight
        assert part() is None
    finally:
        gc.enable()


DECODERS = ("gemma3_text", "qwen3")
FAMILIES = sorted({entry.family for entry in all_entries()})


@pytest.mark.parametrize(
    ("family", "task"),
    [
        *((family, "sequence-classification") for family in FAMILIES),
        *((family, "masked-lm") for family in FAMILIES if family not in DECODERS),
    ],
)
def test_what_comes_after_the_encoder_is_left_alone_in_every_family(family: str, task: str) -> None:
    name = next(entry.name for entry in all_entries() if entry.family == family)
    model = build_meta(resolve(name, task=task, num_labels=8 if task == "sequence-classification" else None))
    chosen = {id(linear) for linear in quantization.quantizable(model, "int8")}
    names = {name for name, module in model.named_modules() if id(module) in chosen}
    assert names
    assert all("layer" in name or "embedding" in name for name in names), names


def test_a_module_of_ones_own_keeps_what_it_has_after_its_layers() -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
    model.out = torch.nn.Linear(16, 8)
    assert quantization.quantizable(model, "int8") == list(model.layers)
    assert len(quantization.quantizable(torch.nn.Sequential(torch.nn.Linear(16, 8)), "int8")) == 1


def test_the_extra_asks_for_the_packages_that_the_code_needs() -> None:
    import tomllib
    from pathlib import Path

    from vramfit.techniques import lora

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, quantization.OLDEST_TORCHAO))
    assert {f"torchao>={oldest}", f"peft>={lora.OLDEST_PEFT}"} <= set(project["optional-dependencies"]["train"])
