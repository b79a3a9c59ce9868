"""On a real GPU: what a load takes on the way, what it leaves, and what comes out of the model."""

import gc
from pathlib import Path

import pytest
import torch
from tests.unit.loader.checkpoints import logits, minilm, sentences
from transformers import AutoModel

from vramfit.errors import NoPlanFits
from vramfit.estimator.predict import estimate
from vramfit.loader.load import load
from vramfit.techniques import offloading
from vramfit.techniques.quantization import inner_tensors, quantize_rows, quantize_weight

pytestmark = pytest.mark.gpu

KINDS = [("fp32", None), ("bf16", None), ("fp16", None), ("fp32", "int8"), ("bf16", "int8"), ("bf16", "int8-dynamic")]
MIB = 2**20
ROUNDINGS = 4
"""Of fp32, from a weight to its place: the scale (by a reciprocal on a GPU), its inverse, the product."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "large"
    model, _ = load("bert-large-uncased", random_weights=True, device="cpu")
    model.save_pretrained(path)  # type: ignore[operator]
    return path


@pytest.fixture(autouse=True)
def _clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def to_gpu(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in batch.items()}


def needs_torchao(quantize: str | None) -> None:
    if quantize is not None:
        pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')


@pytest.mark.parametrize(("precision", "quantize"), KINDS)
def test_the_peak_is_the_model_and_at_most_one_tensor(large: Path, precision: str, quantize: str | None) -> None:
    needs_torchao(quantize)
    model, report = load(large, precision=precision, quantize=quantize)
    assert report.peak_device_bytes is not None
    assert report.final_device_bytes is not None
    assert report.peak_device_bytes <= report.final_device_bytes + report.largest_tensor_bytes
    assert report.host_anonymous_bytes is None or report.host_anonymous_bytes < 300 * MIB
    assert 0 <= report.final_device_bytes - offloading.model_bytes(model) < 40 * MIB


@pytest.mark.parametrize(
    ("precision", "quantize"), [("fp32", None), ("bf16", None), ("fp32", "int8"), ("bf16", "int8")]
)
def test_the_size_on_the_device_is_the_predicted_one(large: Path, precision: str, quantize: str | None) -> None:
    needs_torchao(quantize)
    keywords = {"precision": precision, "quantize": quantize}
    predicted = estimate(str(large), mode="infer", batch=1, seq=8, gpu="h200", **keywords)
    _, report = load(large, **keywords)
    assert report.final_device_bytes is not None
    inputs = predicted.breakdown["inputs"]
    difference = predicted.phases["load"].peak_allocated_bytes - inputs - report.final_device_bytes
    assert abs(difference) <= MIB


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_quantization_nothing_but_the_model_is_allocated(large: Path, precision: str) -> None:
    _, report = load(large, precision=precision)
    assert report.peak_device_bytes == report.final_device_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_outputs_are_those_of_transformers(precision: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    batch = to_gpu(sentences(minilm()))
    ours, _ = load(minilm(), task="features", precision=precision)
    theirs = AutoModel.from_pretrained(minilm(), dtype=dtype).cuda()
    assert torch.equal(logits(ours, batch), logits(theirs, batch))


@pytest.mark.parametrize(("quantize", "precision", "least"), [("int8", "fp32", 0.999), ("int8", "bf16", 0.998)])
def test_int8_keeps_the_direction_of_every_sentence(quantize: str, precision: str, least: float) -> None:
    needs_torchao(quantize)
    batch = to_gpu(sentences(minilm()))
    mask = batch["attention_mask"][..., None]

    def vectors(**keywords: str) -> torch.Tensor:
        model, _ = load(minilm(), task="features", **keywords)
        return (logits(model, batch).float() * mask).sum(1) / mask.sum(1)

    cosines = torch.nn.functional.cosine_similarity(vectors(quantize=quantize, precision=precision), vectors())
    assert cosines.min() >= least


def test_quantized_on_the_gpu_row_by_row_equals_quantized_on_the_host() -> None:
    """All but the weights that lie halfway between two steps, up to the rounding of fp32.

    A GPU divides by 127.5 as it multiplies by the reciprocal, so its scale may be one bit off the host's, and such a
    tie falls to one side there and to the other here: both half a step from the weight. The most negative weight of a
    group always is one, at -127.5 steps.
    """
    needs_torchao("int8")
    on_gpu, _ = load("bert-base-uncased", random_weights=True, quantize="int8")
    on_host, _ = load("bert-base-uncased", random_weights=True, quantize="int8", device="cpu")
    full, _ = load("bert-base-uncased", random_weights=True, device="cpu")
    for name in ("attention.self.query", "output.dense"):
        a, b, weight = (m.get_submodule(f"bert.encoder.layer.3.{name}").weight for m in (on_gpu, on_host, full))
        assert torch.allclose(a.scale.cpu(), b.scale)  # type: ignore[union-attr, arg-type]
        groups = weight.detach().double().view(weight.shape[0], -1, 64)  # type: ignore[union-attr, operator, index]
        places = (groups / b.scale.double()[..., None]).view(weight.shape)  # type: ignore[union-attr, operator]
        from_tie = (places - places.floor() - 0.5).abs()
        steps = (a.qdata.cpu().int() - b.qdata.int()).abs()  # type: ignore[union-attr]
        assert steps[from_tie > ROUNDINGS * places.abs() * 2**-24].max() == 0, name
        assert steps.max() <= 1, name


@pytest.mark.parametrize("quantize", ["int8", "int8-dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_brought_one_after_another_are_torchaos_own_result(quantize: str, dtype: torch.dtype) -> None:
    needs_torchao(quantize)
    torch.manual_seed(0)
    source = torch.randn(4096, 1024)
    ours = quantize_rows(source, quantize, dtype, torch.device("cuda"), lambda rows: rows.to("cuda", dtype))
    theirs = quantize_weight(source.to("cuda", dtype), quantize)
    for (name, mine), (_, its) in zip(inner_tensors(ours), inner_tensors(theirs), strict=True):
        assert torch.equal(mine, its), name


def test_int8_dynamic_and_int4_answer(large: Path) -> None:
    needs_torchao("int8")
    ids = torch.randint(1000, 30000, (4, 64), device="cuda")
    full, _ = load(large, precision="bf16", task="features")
    expected = logits(full, {"input_ids": ids}).float()
    for quantize, least in (("int8-dynamic", 0.98), ("int4", 0.8)):
        model, report = load(large, precision="bf16", quantize=quantize, task="features")
        made = logits(model, {"input_ids": ids}).float()
        assert torch.nn.functional.cosine_similarity(made.flatten(), expected.flatten(), dim=0) > least
        assert report.num_quantized >= 144


def test_offloaded_layers_give_the_same_outputs_inside_the_budget(large: Path) -> None:
    ids = torch.randint(1000, 30000, (2, 64), device="cuda")
    whole, _ = load(large, task="features")
    expected = logits(whole, {"input_ids": ids})
    del whole
    gc.collect()
    budget = 500 * MIB
    model, report = load(large, task="features", memory=budget, offload="weights")
    assert report.num_resident_layers < report.num_layers
    assert report.final_device_bytes is not None
    assert report.final_device_bytes <= budget + 4 * MIB
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        assert torch.equal(logits(model, {"input_ids": ids}), expected)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 40 * MIB


def test_a_load_that_fails_leaves_the_gpu_as_it_was(large: Path) -> None:
    before = torch.cuda.memory_allocated()

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(large, progress=interrupt)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_running_out_of_memory_is_said_and_cleaned_up(large: Path) -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    fraction = 600 * MIB / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(NoPlanFits):
            load(large)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_budget_too_small_is_refused_before_anything_moves(large: Path) -> None:
    before = torch.cuda.memory_allocated()
    with pytest.raises(NoPlanFits) as caught:
        load(large, memory="1GiB")
    assert caught.value.shortfall_bytes > 100 * MIB
    assert torch.cuda.memory_allocated() == before
