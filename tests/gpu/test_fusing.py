"""On a real GPU: the kernels of fused layers compute what their reference says, and take what was predicted."""

from typing import Any

import pytest
import torch
from tests.gpu.peaks import assert_takes_what_was_predicted
from tests.gpu.test_packing import gradients_beside_another_sample, on_gpu
from tests.unit.runtime.small_models import HEADS, make_batch
from tests.unit.techniques.test_fusing import DROPOUT, FUSED, error, fused, gradients, packed

from vramfit.runtime.stepper import Stepper
from vramfit.techniques import packing
from vramfit.techniques.fusing import layer as fused_ops

pytestmark = pytest.mark.gpu

TASK = "sequence-classification"
SHAPES = [(1, 32), (7, 768), (3001, 768), (1500, 1024), (300, 1000), (64, 2048)]
TYPES = [torch.bfloat16, torch.float16]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def both(run: Any, *args: Any) -> list[list[Any]]:
    """The arguments after a run on the CPU, and after one on the GPU."""
    made = []
    for device in ("cpu", "cuda"):
        given = [a.clone().to(device) if isinstance(a, torch.Tensor) else a for a in args]
        run(*given)
        made.append([a.cpu() if isinstance(a, torch.Tensor) else a for a in given])
    return made


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    near = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(one.dtype, 2e-5)
    scale = float(one.abs().max()) + 1e-6
    torch.testing.assert_close(one, other, rtol=near, atol=near * scale)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_its_backward_are_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = shape
    x, residual = drawn(rows, width, dtype=dtype), drawn(rows, width)
    weight, bias = drawn(width), drawn(width + 1)[1:].clone()
    empty, stats = torch.zeros(rows, width), torch.zeros(2, rows)
    args = (x, residual, weight, bias, None, 0, 0.0, 1e-5, empty, empty, empty.to(dtype), stats)
    (*_, summed, out, out16, seen), (*_, summed2, out2, out16_2, seen2) = both(fused_ops.fused_norm, *args)
    for one, other in ((summed, summed2), (out, out2), (out16, out16_2), (seen, seen2)):
        assert_close(one, other)
    parts = torch.full((fused_ops.NUM_PARTS, 3 * width + 5), 7.0)
    for grad16 in (None, drawn(rows, width, dtype=dtype)):
        args = (drawn(rows, width), grad16, summed, seen, weight, None, 0, 0.0, empty, empty.to(dtype), parts, 5)
        one, other = both(fused_ops.fused_norm_backward, *args)
        assert_close(one[8], other[8])
        assert_close(one[9], other[9])
        assert torch.equal(other[10][:, :5], parts[:, :5])
        torch.testing.assert_close(one[10][:, 5:].sum(0), other[10][:, 5:].sum(0), rtol=2e-3, atol=2e-2 * rows**0.5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_and_joining_are_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = shape
    parts = torch.full((fused_ops.NUM_PARTS, 3 * width + 5), 7.0)
    x, grad = drawn(rows, width, dtype=dtype), drawn(rows + 1, width, dtype=dtype)[1:]
    one, other = both(fused_ops.fused_gelu_backward, x, grad, torch.empty_like(x), parts[:, : width + 5], 5)
    for index in (1, 2):
        assert_close(one[index], other[index])
    torch.testing.assert_close(one[3].sum(0)[5:], other[3].sum(0)[5:], rtol=2e-3, atol=2e-2 * rows**0.5)
    three = [drawn(rows + n, width, dtype=dtype)[n:] for n in range(3)]
    one, other = both(fused_ops.fused_join, *three, torch.empty(rows, 3 * width, dtype=dtype), parts, 5)
    assert torch.equal(other[3], torch.cat(three, 1))
    torch.testing.assert_close(one[4].sum(0)[5:], other[4].sum(0)[5:], rtol=2e-3, atol=1e-3 * rows)


def test_what_is_dropped_is_the_share_that_was_asked_for_and_the_same_in_backward() -> None:
    rows, width, p = 4000, 768, 0.1
    x, residual = torch.ones(rows, width, dtype=torch.bfloat16).cuda(), torch.zeros(rows, width).cuda()
    weight, bias, stats = torch.ones(width).cuda(), torch.zeros(width).cuda(), torch.zeros(2, rows).cuda()
    seeds = torch.tensor([123, 456]).cuda()
    kept = []
    for which in (0, 1, 0):
        summed, out = torch.empty_like(residual), torch.empty_like(residual)
        fused_ops.fused_norm(x, residual, weight, bias, seeds, which, p, 1e-5, summed, out, None, stats)
        kept.append(summed != 0)
        assert summed.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)], rel=0.01)
    assert torch.equal(kept[0], kept[2])
    assert float((kept[0] != kept[1]).float().mean()) == pytest.approx(2 * p * (1 - p), rel=0.02)
    for along in (0, 1):  # no row and no column is special
        shares = kept[0].float().mean(along)
        assert float(shares.mean()) == pytest.approx(1 - p, abs=0.001)
        assert float(shares.std()) == pytest.approx((p * (1 - p) / kept[0].shape[along]) ** 0.5, rel=0.15)
    given = torch.randn_like(residual)
    to_residual, to_x = torch.empty_like(residual), torch.empty_like(x)
    parts = residual.new_empty(fused_ops.NUM_PARTS, 3 * width)
    fused_ops.fused_norm_backward(given, None, summed, stats, weight, seeds, 0, p, to_residual, to_x, parts, 0)
    assert torch.equal(to_x != 0, kept[0] & (to_residual != 0))
    torch.testing.assert_close(to_x[kept[0]].float(), to_residual[kept[0]] / (1 - p), rtol=0.01, atol=1e-6)


def learn(model: Any, task: Any = TASK, dtype: torch.dtype | None = torch.bfloat16, seed: int = 0) -> float:
    torch.manual_seed(seed)
    batch = on_gpu(packing.pack(make_batch(task), model))
    with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(**batch).loss
    loss.backward()
    return loss.item()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("task", [t for t in HEADS if t != "question-answering"])
@pytest.mark.parametrize("family", FUSED)
def test_loss_and_gradients_are_those_of_plain_layers(family: str, task: Any, dtype: torch.dtype) -> None:
    exact, plain, model = packed(family, task).cuda(), packed(family, task).cuda(), fused(family, task).cuda()
    learn(exact, task, None)
    assert learn(model, task, dtype) == pytest.approx(learn(plain, task, dtype), rel=2e-3)
    rounding = error(gradients(plain), gradients(exact))
    assert error(gradients(model), gradients(exact)) <= 1.2 * rounding


@pytest.mark.parametrize("family", FUSED)
def test_no_sample_sees_another(family: str) -> None:
    task = "token-classification"
    those, these = gradients_beside_another_sample(fused(family, task).cuda(), make_batch(task))
    assert error(these, those) < 1e-4  # attention's backward adds in no fixed order


def test_dropout_is_drawn_again_where_a_layer_is_computed_again() -> None:
    plain, again = fused(**DROPOUT).cuda(), fused(**DROPOUT).cuda()
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    found = []
    for model, seed in ((plain, 0), (plain, 1), (again, 0)):
        model.zero_grad()
        learn(model, seed=seed)
        found.append(gradients(model))
    assert error(found[2], found[0]) < 1e-3  # attention's backward adds in no fixed order
    assert error(found[1], found[0]) > 0.1


def test_weights_that_begin_anywhere_are_read_right() -> None:
    plain, model = fused("bert").cuda(), fused("bert").cuda()
    learn(plain)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            for p in module.parameters():
                p.data = torch.cat([p.data[:1], p.data])[1:]
                assert p.data_ptr() % 16
    learn(model)
    assert error(gradients(model), gradients(plain)) < 1e-3


def test_recorded_steps_learn_as_others() -> None:
    steppers = []
    for graphs in (False, True):
        model = fused("bert").cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        steppers.append(Stepper(model, optimizer, micro_batch=12, seq=16, precision="amp-bf16", graphs=graphs))
    losses = [[stepper.step(make_batch(TASK, seed=n % 3)) for n in range(9)] for stepper in steppers]
    assert steppers[1]._graph_use.passes is not None
    assert steppers[1]._graph_use.passes.num_captured >= 1
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize(
    "keywords",
    [
        {"model": "bert-base-uncased", "batch": 16, "seq": 512},
        {"model": "bert-base-uncased", "batch": 16, "seq": 128, "checkpointing": "full"},
        {"model": "bert-base-uncased", "batch": 16, "seq": 512, "checkpointing": 5, "precision": "amp-fp16"},
        {"model": "roberta-base", "batch": 16, "seq": 256, "task": "token-classification"},
        {"model": "distilbert-base-uncased", "batch": 8, "seq": 512, "task": "masked-lm"},
        {"model": "electra-small-discriminator", "batch": 32, "seq": 128},
        {"model": "bert-base-uncased", "batch": 32, "micro_batch": 8, "seq": 256, "task": "question-answering"},
        {"model": "bert-base-uncased", "batch": 16, "seq": 512, "freeze": 6},
        {"model": "bert-large-uncased", "batch": 16, "micro_batch": 8, "seq": 512, "graphs": True},
        {"model": "bert-base-uncased", "batch": 16, "seq": 512, "optimizer": "adamw-8bit"},
    ],
    ids=str,
)
def test_fused_training_takes_what_was_predicted(keywords: dict[str, Any]) -> None:
    assert_takes_what_was_predicted(keywords | {"fused": True})
