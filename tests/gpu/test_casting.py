"""On a real GPU: layers that cast together learn what plain autocast learns, and take what was predicted."""

from multiprocessing import get_context
from typing import Any

import pytest
import torch
from tests.gpu.peaks import take_steps
from tests.unit.runtime.small_models import FAMILIES, make_batch, make_model

from vramfit.devices.catalogue import match_gpu
from vramfit.estimator.predict import estimate
from vramfit.models.anatomy import encoder_layers
from vramfit.step.plain import each_tensor
from vramfit.techniques import casting
from vramfit.techniques.application import use_expandable_segments
from vramfit.workload import Workload

pytestmark = pytest.mark.gpu

TASK = "sequence-classification"
CAST = [name for name in FAMILIES if name not in ("albert", "deberta-v2")]
"""Not DeBERTa: its attention's backward adds in no fixed order, and no two passes are equal."""
MAX_ERROR = 0.01
CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
needs_kernel = pytest.mark.skipif(not CAPABLE, reason="needs a GPU of sm_80 or newer")


def learn(model: Any, dtype: torch.dtype, num_passes: int = 2) -> list[float]:
    losses = []
    for seed in range(num_passes):
        with torch.autocast("cuda", dtype=dtype):
            loss = model(**each_tensor(make_batch(TASK, seed=seed), torch.Tensor.cuda)).loss
        loss.backward()
        losses.append(loss.item())
    return losses


@needs_kernel
@pytest.mark.parametrize("computed_twice", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", CAST)
def test_a_family_learns_the_same_to_the_bit(family: str, dtype: torch.dtype, computed_twice: bool) -> None:
    plain: Any = make_model(family, TASK, attn_implementation="eager").cuda()  # its backward adds in a fixed order
    model: Any = make_model(family, TASK, attn_implementation="eager").cuda()
    casting.apply(model)
    assert casting.is_applied(model)
    if computed_twice:
        for made in (plain, model):
            made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert learn(model, dtype) == learn(plain, dtype)
    linears = {id(p) for m in model.modules() if isinstance(m, casting.CastLinear) for p in m.parameters()}
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if id(p) in linears and p.grad is not None:
            assert torch.equal(p.grad, q.grad), name


def test_one_kernel_casts_what_others_cast_one_by_one() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(768, 768), (3072, 768), (768, 3072), (768,), (3072,), (7,), (5, 3)]
    given = [torch.randn(shape, generator=draw, device="cuda") * 1e3 for shape in shapes]
    given[3][:4] = torch.tensor([float("inf"), float("-inf"), 1e-42, 65520.0])
    for dtype in (torch.bfloat16, torch.float16):
        for made, value in zip(casting.cast_together(given, dtype), given, strict=True):
            assert torch.equal(made, value.to(dtype))


def test_a_cast_asks_for_what_it_gives_and_no_more() -> None:
    model = make_model("bert", TASK, hidden_size=256, intermediate_size=1024).cuda()
    weights = [p for p in encoder_layers(model)[0].parameters() if p.dim() == 2]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    made = casting.cast_together(weights, torch.bfloat16)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peak == sum(t.nbytes for t in made)


@needs_kernel
@pytest.mark.parametrize(
    "keywords",
    [
        {"model": "bert-base-uncased", "batch": 16, "seq": 128},
        {"model": "bert-base-uncased", "batch": 16, "seq": 128, "checkpointing": "full"},
        {"model": "bert-base-uncased", "batch": 32, "micro_batch": 8, "seq": 128, "attention": "packed"},
        {"model": "bert-base-uncased", "batch": 16, "seq": 128, "attention": "packed", "checkpointing": "full"},
        {"model": "bert-base-uncased", "batch": 16, "seq": 128, "attention": "packed", "checkpointing": 6},
        {"model": "bert-large-uncased", "batch": 16, "micro_batch": 4, "seq": 256, "checkpointing": "full"},
        {"model": "bert-large-uncased", "batch": 8, "seq": 128, "attention": "packed", "optimizer": "adamw-8bit"},
        {"model": "roberta-base", "batch": 16, "seq": 128, "precision": "amp-fp16"},
        {"model": "modernbert-base", "batch": 8, "seq": 256, "attention": "packed", "task": "masked-lm"},
        {"model": "bert-base-uncased", "batch": 16, "seq": 128, "freeze": 6},
        {"model": "bert-base-uncased", "batch": 16, "seq": 128, "lora": 8},
    ],
    ids=str,
)
def test_training_takes_what_was_predicted(keywords: dict[str, Any]) -> None:
    given = {"precision": "amp-bf16", "optimizer": "adamw-fused", "loop": "stepper", "mask": "ones"}
    given |= {"casts": "together", "allocator": "expandable"} | keywords
    gpu = match_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    assert gpu is not None
    predicted = estimate(given["model"], **{k: v for k, v in given.items() if k != "model"}, gpu=gpu.name)
    with get_context("spawn").Pool(1) as fresh:  # where nothing else lies about in memory
        seen, is_cast = fresh.apply(_peak, (predicted.workload, given))
    assert is_cast
    assert predicted.peak_allocated_bytes >= seen
    assert predicted.peak_allocated_bytes <= (1 + MAX_ERROR) * seen


def _peak(w: Workload, given: dict[str, Any]) -> tuple[int, bool]:
    use_expandable_segments(torch.device("cuda"))  # as plans have it
    model = take_steps(w, given)
    return torch.cuda.max_memory_allocated(), casting.is_applied(model)
