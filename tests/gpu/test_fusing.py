"""On a real GPU: the kernels of fused layers compute what their reference says, and take what was predicted."""

from typing import Any

import pytest
import torch
from tests.gpu.peaks import assert_takes_what_was_predicted
from tests.gpu.test_packing import gradients_beside_another_sample, on_gpu
from tests.unit.runtime.small_models import HEADS, make_batch
from tests.unit.techniques import test_fused_families
from tests.unit.techniques.test_fusing import DROPOUT, FUSED, error, fused, gradients, packed
from transformers import CONFIG_MAPPING

from vramfit.models.anatomy import encoder_layers
from vramfit.runtime.stepper import Stepper
from vramfit.techniques import fusing, packing
from vramfit.techniques.fusing import trial
from vramfit.techniques.fusing.operators import NUM_PARTS, fused_norm, fused_norm_backward

pytestmark = pytest.mark.gpu

TASK = "sequence-classification"
SHAPES = [(1, 32), (7, 768), (3001, 768), (1500, 1024), (300, 1000), (64, 2048)]
TYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_give_what_their_references_give(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.techniques import interpreted_kernels  # which needs Triton

    for name, value in {"ROWS": shape[0], "WIDTH": shape[1], "DEVICE": "cuda", "NUM_PARTS": NUM_PARTS}.items():
        monkeypatch.setattr(interpreted_kernels, name, value)
    near = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for name, apart in (*interpreted_kernels.norms(dtype), *interpreted_kernels.parts_of_a_layer(dtype)):
        assert apart <= near, name


def test_what_is_dropped_is_the_share_that_was_asked_for_and_the_same_in_backward() -> None:
    rows, width, p = 4000, 768, 0.1
    x, residual = torch.ones(rows, width, dtype=torch.bfloat16).cuda(), torch.zeros(rows, width).cuda()
    weight, bias, stats = torch.ones(width).cuda(), torch.zeros(width).cuda(), torch.zeros(2, rows).cuda()
    seeds = torch.tensor([123, 456]).cuda()
    kept = []
    for which in (0, 1, 0):
        summed, out = torch.empty_like(residual), torch.empty_like(residual)
        fused_norm(x, residual, weight, bias, seeds, which, p, 1e-5, False, summed, out, None, stats)
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
    parts = residual.new_empty(NUM_PARTS, 3 * width)
    args = (given, None, summed, stats, weight, seeds, 0, p, False, False)
    fused_norm_backward(*args, to_residual, to_x, parts, 0)
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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", test_fused_families.FAMILIES)
def test_layers_of_every_family_pass_their_trial(family: str, dtype: torch.dtype) -> None:
    """Forward and backward under autocast, and forward alone with weights in 16 bits, beside their own code."""
    for layer in encoder_layers(test_fused_families.make(family)):
        description = fusing.describe(layer)
        assert isinstance(description, fusing.Description)
        for types in (fusing.Types(torch.float32, dtype), fusing.Types(dtype, dtype)):
            assert trial.why_no_kernels(layer, description, torch.device("cuda", 0), types) is None


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
        {"model": "modernbert-base", "batch": 16, "seq": 512},
        {"model": "modernbert-large", "batch": 8, "seq": 512, "checkpointing": "full"},
        {"model": "modernbert-base", "batch": 2, "seq": 8192},
        pytest.param(
            {"model": "gte-multilingual-base", "batch": 16, "seq": 512},
            marks=pytest.mark.skipif("gte" not in CONFIG_MAPPING, reason="this transformers has no GTE"),
        ),
    ],
    ids=str,
)
def test_fused_training_takes_what_was_predicted(keywords: dict[str, Any]) -> None:
    assert_takes_what_was_predicted(keywords | {"fused": True})
