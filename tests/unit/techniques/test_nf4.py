"""Weights in 4 bits: torchao's layout to the bit, filled in pieces, and learned through."""

import math
from typing import Any

import pytest
import torch
from benchmarks.tiny_families import tiny_config

from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.loader.load import load
from vramfit.planner.job import Job
from vramfit.planner.plan import plan
from vramfit.planner.recipes import trainings
from vramfit.planner.request import Request
from vramfit.techniques import application, nf4, quantization
from vramfit.techniques.quantization import FrozenLinear, inner_tensors, quantize_weight
from vramfit.workload import Workload

pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')

JOB: dict[str, Any] = {
    "batch": 4,
    "seq": 16,
    "gpu": "a10g",
    "mode": "train",
    "loop": "stepper",
    "precision": "amp-bf16",
}


@pytest.mark.parametrize("shape", [(96, 64), (64, 8), (256, 128)])
def test_a_weight_is_quantized_as_torchao_does_it(shape: tuple[int, int]) -> None:
    from torchao.quantization import NF4Tensor

    torch.manual_seed(0)
    weight = torch.randn(shape) * 0.02
    num_blocks = weight.numel() // nf4.BLOCK
    theirs = NF4Tensor.from_tensor(weight, nf4.BLOCK, math.gcd(num_blocks, nf4.SCALE_BLOCK))
    for name, part in inner_tensors(quantize_weight(weight, "nf4")):
        assert torch.equal(part, getattr(theirs, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reading_it_gives_torchaos_numbers_to_the_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made: Any = quantize_weight(torch.randn(64, 32, dtype=dtype), "nf4")
    assert torch.equal(nf4.dequantized(made), made.get_original_weight())
    assert nf4.dequantized(made).dtype == dtype


def test_pieces_give_what_the_whole_gives() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 24)
    whole = dict(inner_tensors(quantize_weight(weight, "nf4")))
    parts = {name: torch.empty_like(part) for name, part in whole.items()}
    nf4.fill(parts, [weight[begin : begin + nf4.ROWS] for begin in range(0, 64, nf4.ROWS)])
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_blocks_of_zeros_stay_zeros() -> None:
    weight = torch.randn(128, 64)
    weight[3] = 0
    assert nf4.dequantized(quantize_weight(weight, "nf4"))[3].abs().max() < 0.02 * weight.abs().max()
    assert nf4.dequantized(quantize_weight(torch.zeros(64, 64), "nf4")).eq(0).all()


def test_on_paper_it_takes_what_it_takes_for_real() -> None:
    sizes = [
        [(name, part.shape, part.dtype) for name, part in inner_tensors(quantize_weight(weight, "nf4"))]
        for weight in (torch.ones(1024, 3072), torch.ones(1024, 3072, device="meta"))
    ]
    assert sizes[0] == sizes[1]
    num_bytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in sizes[0])
    assert num_bytes / (1024 * 3072) == pytest.approx(0.5 + 1 / 64 + 4 / (64 * 256), abs=1e-4)


def qlora(**keywords: Any) -> Any:
    model, _ = load(tiny_config("llama"), random_weights=True, device="cpu")
    w = Workload(model="m", quantize="nf4", lora=4, lora_targets=("all-linear",), dropout=False, **keywords)
    torch.manual_seed(0)
    application.apply(model, w)
    return model


@pytest.mark.parametrize("keywords", [{}, {"checkpointing": "full"}], ids=str)
def test_gradients_of_adapters_are_those_beside_the_weights_in_full(keywords: dict[str, Any]) -> None:
    found = []
    for in_full in (False, True):
        model = qlora(**keywords)
        for module in model.modules():
            if in_full and isinstance(module, FrozenLinear):
                module.__class__ = torch.nn.Linear
                module.weight = torch.nn.Parameter(nf4.dequantized(module.weight), requires_grad=False)
        model.train()
        ids = torch.arange(10, 42).view(4, 8)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first, which would hide the gradients of the other half
                torch.nn.init.normal_(parameter, std=0.1)
        model(input_ids=ids, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 2 * 7 * 2 + 1  # two layers of seven, and the head
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_it_is_predicted_to_take_less_than_int8_and_than_none() -> None:
    config = tiny_config("llama")
    config.hidden_size, config.intermediate_size = 256, 512
    peaks = [estimate(config, lora=4, quantize=form, **JOB).breakdown["weights"] for form in ("nf4", "int8", None)]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 3


def test_a_plan_tries_it_after_int8_where_it_is_allowed() -> None:
    job = Job.of(tiny_config("llama"), Request.of({"batch": 4, "seq": 16, "gpu": "a10g", "allow": "lora,int8,nf4"}))
    words = [training.words for training in trainings(job)]
    assert words[-2:] == ["lora 16, quantize int8", "lora 16, quantize nf4"]


def test_a_plan_keeps_it_where_it_was_asked_for() -> None:
    made = plan(tiny_config("llama"), batch=4, seq=16, gpu="a10g", lora=4, lora_targets="all-linear", quantize="nf4")
    assert (made.workload.lora_targets, made.workload.quantize) == (("all-linear",), "nf4")


def test_allowing_it_alone_is_refused_with_what_is_missing() -> None:
    with pytest.raises(WorkloadError, match="weights in 4 bits do not learn; allow lora or freeze"):
        plan(tiny_config("llama"), batch=4, seq=16, gpu="a10g", allow="nf4")


def test_a_model_without_linear_layers_is_refused() -> None:
    model, _ = load(tiny_config("gpt2"), random_weights=True, device="cpu")
    num_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert quantization.quantized_model_bytes(model, "nf4") == num_bytes  # shown as it is
    with pytest.raises(WorkloadError, match="GPT2ForSequenceClassification has no linear layer"):
        quantization.apply(model, "nf4")


def test_a_loaded_model_computes_as_a_prepared_one() -> None:
    """By the same product, which is the one that is predicted."""
    loaded, _ = load(tiny_config("llama"), random_weights=True, device="cpu", quantize="nf4")
    prepared, _ = load(tiny_config("llama"), random_weights=True, device="cpu")
    quantization.apply(prepared, "nf4")
    ids = torch.arange(10, 26).view(2, 8)
    assert sum(isinstance(module, FrozenLinear) for module in loaded.modules()) == 14
    assert torch.equal(loaded(input_ids=ids).logits, prepared(input_ids=ids).logits)
