from typing import Any

import pytest
import torch

from vramfit.errors import WorkloadError
from vramfit.models.build import build_meta
from vramfit.models.resolve import resolve
from vramfit.runtime.measurement import check, draw_tokens, make_step, prepare
from vramfit.step.plain import make_batch
from vramfit.workload import Workload

MODELS = ("bert-tiny", "electra-small-discriminator", "albert-base-v2", "deberta-v3-xsmall")


def shapes(tensors: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(t.shape), t.dtype) for name, t in tensors]


@pytest.mark.parametrize("model", MODELS)
def test_a_real_model_is_its_meta_twin_with_values(model: str) -> None:
    resolved = resolve(model, task="masked-lm")
    real = prepare(resolved, Workload(model=model, task="masked-lm"))
    twin = build_meta(resolved)
    assert shapes(real.named_parameters()) == shapes(twin.named_parameters())
    assert shapes(real.named_buffers()) == shapes(twin.named_buffers())
    assert all(bool(torch.isfinite(p).all()) for p in real.parameters())


def test_tied_weights_stay_tied() -> None:
    model: Any = prepare(resolve("bert-tiny", task="masked-lm"), Workload(model="bert-tiny", task="masked-lm"))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_initialisation_is_as_it_was_afterwards() -> None:
    prepare(resolve("bert-tiny"), Workload(model="bert-tiny"))
    assert float(torch.nn.Linear(64, 64).weight.detach().std()) > 0


def test_techniques_are_applied() -> None:
    workload = Workload(model="bert-tiny", precision="bf16", freeze="encoder", checkpointing=1, dropout=False)
    model: Any = prepare(resolve("bert-tiny"), workload)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.bert.encoder.parameters())
    assert [layer.gradient_checkpointing for layer in model.bert.encoder.layer] == [True, False]


@pytest.mark.parametrize("keywords", [{}, {"accumulate": 2, "max_grad_norm": 1.0, "optimizer": "sgd"}])
def test_a_training_step_learns_from_tokens(keywords: dict[str, Any]) -> None:
    workload = Workload(model="bert-tiny", batch=4, seq=16, **keywords)
    model = prepare(resolve("bert-tiny"), workload)
    batch = make_batch(model, workload.task, "train", "padded", workload.micro_batch or 0, 16, "cpu")
    draw_tokens(batch, model)
    before = [p.detach().clone() for p in model.parameters()]
    make_step(model, workload, batch)()
    words = batch["attention_mask"] == 1
    assert int(batch["input_ids"][words].min()) >= 1000
    assert set(batch["input_ids"][~words].tolist()) == {model.config.pad_token_id}
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_inference_leaves_no_gradients() -> None:
    workload = Workload(model="bert-tiny", mode="infer", batch=2, seq=16)
    model = prepare(resolve("bert-tiny"), workload)
    make_step(model, workload, make_batch(model, workload.task, "infer", "none", 2, 16, "cpu"))()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"seq": 513}, "seq 513 is beyond the 512 positions"),
        ({"compile": True}, "compile"),
        ({"num_gpus": 2}, "num_gpus"),
        ({"attention": "packed"}, "packed"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(keywords: dict[str, Any], problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        check(resolve("bert-tiny"), Workload(model="bert-tiny", **keywords))


def test_a_kernel_that_the_family_lacks_is_refused() -> None:
    with pytest.raises(WorkloadError, match="no attention 'sdpa'"):
        check(resolve("deberta-v3-xsmall"), Workload(model="deberta-v3-xsmall", attention="sdpa"))
