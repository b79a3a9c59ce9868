"""On a real GPU: packed batches through the flash kernel give what padded ones give, and take what was predicted."""

from multiprocessing import get_context
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import FAMILIES, HEADS, make_batch, make_model
from tests.unit.techniques.test_packing import logits_of, with_pads

from vramfit.devices.catalogue import match_gpu
from vramfit.estimator.predict import estimate
from vramfit.models.resolve import resolve
from vramfit.runtime.preparation import prepare
from vramfit.runtime.stepper import Stepper
from vramfit.step.heads import model_inputs
from vramfit.step.inputs import each_tensor
from vramfit.techniques import optimizers, packing
from vramfit.workload import Workload

pytestmark = pytest.mark.gpu

PACKED = [name for name in FAMILIES if name != "deberta-v2"]
MAX_ERROR = 0.01


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
    given = {"attention": "packed", "precision": "amp-bf16", "optimizer": "adamw-fused", "loop": "stepper"} | keywords
    gpu = match_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    assert gpu is not None
    predicted = estimate(given["model"], **{k: v for k, v in given.items() if k != "model"}, gpu=gpu.name)
    with get_context("spawn").Pool(1) as fresh:  # where nothing else lies about in memory
        seen = fresh.apply(_peak, (predicted.workload, given))
    assert predicted.peak_allocated_bytes >= seen
    assert predicted.peak_allocated_bytes <= (1 + MAX_ERROR) * seen


def _peak(w: Workload, given: dict[str, Any]) -> int:
    take_steps(w, given)
    return torch.cuda.max_memory_allocated()


def take_steps(w: Workload, given: dict[str, Any]) -> torch.nn.Module:
    """Three steps of full length in this process; gives the model."""
    model = prepare(resolve(w.model, task=w.task, num_labels=w.num_labels), Workload(**given)).cuda()
    optimizer = optimizers.make(w.optimizer, [p for p in model.parameters() if p.requires_grad])
    assert w.micro_batch is not None
    stepper = Stepper(model, optimizer, micro_batch=w.micro_batch, seq=w.seq, precision=w.precision, graphs=w.graphs)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (w.batch, w.seq), generator=draw)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for _ in range(3):
        stepper.step(batch | _labels(w, draw))
    return model


def _labels(w: Workload, draw: torch.Generator) -> dict[str, torch.Tensor]:
    if w.task == "question-answering":
        places = torch.randint(0, w.seq, (w.batch,), generator=draw)
        return {"start_positions": places, "end_positions": places}
    shape = (w.batch,) if w.task == "sequence-classification" else (w.batch, w.seq)
    return {"labels": torch.randint(0, 2, shape, generator=draw)}
