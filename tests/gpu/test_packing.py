"""On a real GPU: packed batches through the flash kernel give what padded ones give, and take what was predicted."""

from typing import Any

import pytest
import torch
from tests.gpu.peaks import assert_takes_what_was_predicted
from tests.unit.runtime.small_models import FAMILIES, HEADS, make_batch, make_model
from tests.unit.techniques.test_packing import logits_of, with_pads

from vramfit.step.inputs import each_tensor
from vramfit.tasks.parts.losses import model_inputs
from vramfit.techniques import packing

pytestmark = pytest.mark.gpu

PACKED = [name for name in FAMILIES if name != "deberta-v2"]


def on_gpu(batch: Any) -> Any:
    return each_tensor(batch, torch.Tensor.cuda)


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("family", PACKED)
def test_packed_logits_are_the_padded_ones_within_rounding(family: str, task: Any) -> None:
    batch = with_pads(family, make_batch(task))
    exact = make_model(family, task).cuda().eval()
    with torch.no_grad():
        reference = logits_of(exact, on_gpu(batch)).float()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            padded = logits_of(exact, on_gpu(batch)).float()
        packing.apply(exact, task)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            packed = logits_of(exact, on_gpu(packing.pack(batch, exact))).float()
    rounding = float((padded - reference).abs().max())
    assert float((packed - reference).abs().max()) <= 2 * rounding + 1e-3


def gradients_beside_another_sample(model: Any, batch: Any) -> list[dict[str, torch.Tensor]]:
    """The gradient of sample 3, with sample 4 as it is and with another one, which changes no logits but its own."""
    other = {name: value.clone() for name, value in batch.items()}
    other["input_ids"][4, :3] = 50
    rows = torch.arange(12).repeat_interleave(batch["attention_mask"].sum(1)).cuda()
    seen, found = [], []
    for given in (batch, other):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(**model_inputs(on_gpu(packing.pack(given, model)))).logits[0]
        logits[rows == 3].float().square().sum().backward()
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None and "emb" not in n]
        found.append({name: grad.clone() for name, grad in named})
        seen.append(logits.detach())
    assert torch.equal(seen[0][rows != 4], seen[1][rows != 4])
    assert not torch.equal(seen[0][rows == 4], seen[1][rows == 4])
    return found


@pytest.mark.parametrize("family", PACKED)
def test_no_sample_sees_another_forward_or_backward(family: str) -> None:
    task = "token-classification"
    model = make_model(family, task).cuda().eval()
    packing.apply(model, task)
    found = gradients_beside_another_sample(model, with_pads(family, make_batch(task)))
    gradient, other_gradient = (torch.cat([g.flatten() for g in made.values()]) for made in found)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-3, atol=1e-6)  # sums of gradients have no fixed order


@pytest.mark.parametrize(
    "keywords",
    [
        {"model": "bert-base-uncased", "batch": 16, "seq": 512},
        {"model": "bert-base-uncased", "batch": 16, "seq": 128, "checkpointing": "full"},
        {"model": "roberta-base", "batch": 16, "seq": 256, "task": "token-classification", "precision": "bf16"},
        {"model": "modernbert-base", "batch": 8, "seq": 512, "task": "masked-lm"},
        {"model": "bert-base-uncased", "batch": 32, "micro_batch": 8, "seq": 256, "task": "question-answering"},
    ],
    ids=str,
)
def test_packed_training_takes_what_was_predicted(keywords: dict[str, Any]) -> None:
    assert_takes_what_was_predicted(keywords)
