"""A step whose loss compares all texts: the gradient of the undivided batch, whatever the split; and what it takes."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.runtime.distributed.work import RunsOut
from transformers import AutoConfig, AutoModel

from vramfit.models.anatomy import backbone
from vramfit.runtime.stepper import Stepper
from vramfit.step.joint import JointPasses
from vramfit.step.plain import Batch
from vramfit.step.splitting import Alone, Rows, passes_of
from vramfit.step.step import Step
from vramfit.tasks.parts.losses import head_loss, model_inputs
from vramfit.tasks.parts.pooling import EmbeddingHead, attach
from vramfit.techniques import packing
from vramfit.techniques.application import prepare
from vramfit.workload import Workload

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "mpnet": {"pad_token_id": 1},
    "modernbert": {
        "attention_dropout": 0.1,
        "mlp_dropout": 0.1,
        "embedding_dropout": 0.1,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""With dropout, as their configurations have it."""
NOT_PACKED = ("mpnet",)
LOSSES: dict[str, dict[str, Any]] = {
    "in-batch": {},
    "in-batch-symmetric": {"texts": 3},
    "triplet": {"texts": 3},
    "contrastive": {},
    "cosent": {},
    "angle": {},
    "margin-mse": {"texts": 4},
    "matryoshka": {"loss": "in-batch", "matryoshka": (32, 16, 8)},
    "masked": {"loss": "in-batch", "mask_above": 0.9},
}
SCORED = ("contrastive", "cosent", "angle")
NUM_SAMPLES, SEQ = 14, 20


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(family, **SMALL | FAMILIES[family]))
    attach(model, EmbeddingHead())
    return model.train()


def make_batch(texts: int, loss: str, num_samples: int = NUM_SAMPLES) -> Batch:
    draw = torch.Generator().manual_seed(5)
    rows = num_samples * texts
    lengths = torch.randint(4, SEQ + 1, (rows,), generator=draw)
    mask = (torch.arange(SEQ) < lengths[:, None]).long()
    ids = torch.randint(5, 99, (rows, SEQ), generator=draw) * mask + (1 - mask)
    batch = {"input_ids": ids, "attention_mask": mask, "text_rows": torch.arange(rows)}
    batch["text_ids"] = torch.arange(rows)
    if loss in SCORED:
        batch["labels"] = torch.randint(0, 2, (num_samples,), generator=draw).float().repeat_interleave(texts)
    if loss == "margin-mse":
        batch["labels"] = torch.rand(num_samples, texts - 2, generator=draw).repeat_interleave(texts, 0)
    return batch


def workload_of(family: str, loss: str, micro_batch: int, attention: str) -> Workload:
    keywords: dict[str, Any] = {"loss": loss, **LOSSES[loss], "attention": attention, "micro_batch": micro_batch}
    return Workload(model=family, task="embedding", batch=NUM_SAMPLES, seq=SEQ, loop="stepper", **keywords)


def undivided(model: Any, batch: Batch, parts: Sequence[Batch], packs: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and gradients with all graphs alive at once and one loss over all vectors; the same random numbers."""
    model.zero_grad()
    loss = head_loss(model, batch, "embedding")
    assert loss.joint is not None
    made = []
    for part in parts:
        inputs: Any = packing.pack(part, model) if packs else part
        made.append(model(**model_inputs(inputs)).embedding)
    rows = torch.cat([part["text_rows"] for part in parts])
    vectors = torch.cat(made)[rows.argsort()]
    value = loss.joint.of_vectors(vectors, loss.joint.labels)
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_undivided_batch(family: str, loss: str) -> None:
    model = make_model(family)
    for attention in ("sdpa", "packed"):
        if attention == "packed" and family in NOT_PACKED:
            continue
        for num_passes in (1, 2, 7):
            w = workload_of(family, loss, NUM_SAMPLES // num_passes, attention)
            prepare(model, w)
            batch = make_batch(w.texts_per_sample, loss)
            stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), w)
            torch.manual_seed(1)
            found = stepper.gradients(batch)
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            packs = attention == "packed"
            tokens = w.micro_batch * w.sample_tokens  # type: ignore[operator]
            texts = w.micro_batch * w.row_texts  # type: ignore[operator]
            how = head_loss(model, batch, "embedding")
            parts, _ = passes_of(batch, how, tokens, Alone(), Rows(max_texts=texts) if packs else None)
            if num_passes > 1 and not packs:
                assert len(parts) >= num_passes - 1
            torch.manual_seed(1)
            value, expected = undivided(model, batch, parts, packs)
            assert float(found) == pytest.approx(float(value), rel=1e-5)
            assert gradients.keys() == expected.keys()
            scale = max(float(g.abs().max()) for g in expected.values())
            for name, gradient in expected.items():
                assert float((gradients[name] - gradient).abs().max()) <= 1e-5 * scale, (attention, num_passes, name)


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
def test_a_step_that_ran_out_of_memory_is_the_same_to_the_bit(attention: str) -> None:
    w = workload_of("bert", "in-batch", 4, attention)
    batch = make_batch(2, "in-batch")

    def run(fail_at: Sequence[int]) -> tuple[dict[str, Any], int, int]:
        model = make_model("bert")
        prepare(model, w)
        stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-3), w)
        torch.manual_seed(2)
        mode = RunsOut(fail_at)
        with mode:
            stepper.step(batch)
        return model.state_dict(), stepper.num_recoveries, mode.num_operators

    expected, _, count = run(())
    for place in range(1, count, 97):
        found, num_recoveries, _ = run((place,))
        assert all(torch.equal(found[name], value) for name, value in expected.items()), place
    assert num_recoveries <= 1


def test_a_rehearsal_compares_as_many_vectors_as_a_step() -> None:
    w = workload_of("bert", "in-batch", 2, "sdpa")
    model = make_model("bert")
    prepare(model, w)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-3), w)
    seen: list[int] = []
    real = JointPasses.compare

    def compare(self: JointPasses) -> None:
        assert self._vectors is not None
        seen.append(len(self._vectors))
        real(self)

    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JointPasses, "compare", compare)
        stepper.rehearse(make_batch(2, "in-batch"))
        stepper.step(make_batch(2, "in-batch"))
    assert set(seen) == {2 * NUM_SAMPLES}
    assert any(not torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_texts_that_make_no_whole_samples_are_refused() -> None:
    from vramfit.errors import WorkloadError

    w = workload_of("bert", "in-batch", 4, "sdpa")
    model = make_model("bert")
    prepare(model, w)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-3), w)
    batch = {name: value[:5] for name, value in make_batch(2, "in-batch").items()}
    with pytest.raises(WorkloadError, match="5 texts has no whole samples of 2"):
        stepper.step(batch)


def test_the_pass_that_holds_the_batch_runs_once() -> None:
    for micro_batch, expected in ((NUM_SAMPLES, 1), (NUM_SAMPLES // 2, 4)):
        w = workload_of("bert", "in-batch", micro_batch, "sdpa")
        model = make_model("bert")
        prepare(model, w)
        calls: list[bool] = []
        backbone(model).register_forward_hook(lambda *_, calls=calls: calls.append(torch.is_grad_enabled()))
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-3), w)
        batch = make_batch(2, "in-batch")
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        stepper.step(batch)
        assert len(calls) == expected
        assert calls == ([True] if expected == 1 else [False, False, True, True])


def test_the_loss_scale_of_fp16_reaches_the_weights() -> None:
    """Gradients that the scaler scales are unscaled before they are seen."""
    model = make_model("bert").eval()
    batch = make_batch(2, "in-batch")
    loss = head_loss(model, batch, "embedding")
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = Step(model, optimizer, ranks=Alone(), scaler=scaler)
        step.drop_gradients()
        parts, _ = passes_of(batch, loss, 4 * SEQ, Alone(), None)
        step.passes(parts, loss, loss.counts(batch))
        if scaler is not None:
            scaler.unscale_(optimizer)
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert all(torch.allclose(found[0][n], found[1][n], rtol=1e-4, atol=1e-6) for n in found[0])


def test_what_is_kept_of_the_head_is_what_the_workload_says() -> None:
    model = make_model("bert")
    w = replace(workload_of("bert", "in-batch", 4, "sdpa"), temperature=0.1, texts=3, pooling="max")
    prepare(model, w)
    head = model.embedding_head
    assert (head.pooling, head.contrast.temperature, head.contrast.num_texts) == ("max", 0.1, 3)


def test_poolings_that_are_joined_are_compared_whole() -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("bert", **SMALL))
    attach(model, EmbeddingHead("mean+cls"))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-3), micro_batch=8, seq=SEQ)
    assert stepper.step(make_batch(2, "in-batch")) > 0


def test_vectors_come_together_where_passes_compute() -> None:
    """An optimizer in host memory steps masters there, and the vectors are on the GPU: here, the meta device."""
    model = make_model("bert")
    batch = make_batch(2, "in-batch")
    loss = head_loss(model, batch, "embedding")
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), ranks=Alone())
    host: Any = SimpleNamespace(device=torch.device("meta"), traces=False)
    step.host = host
    passes = JointPasses(step, (), loss, 0)
    passes.embed()
    assert passes._vectors is not None
    assert passes._vectors.is_meta


@pytest.mark.parametrize("places", [torch.zeros(8, dtype=torch.long), torch.arange(8).float(), torch.arange(1, 9)])
def test_texts_that_share_a_place_are_refused(places: torch.Tensor) -> None:
    from vramfit.errors import WorkloadError

    model = make_model("bert")
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-3), micro_batch=4, seq=SEQ)
    batch = make_batch(2, "in-batch", 4) | {"text_rows": places}
    with pytest.raises(WorkloadError, match="text_rows of a batch of 8 texts are not the numbers from 0 to 7"):
        stepper.step(batch)
    order = torch.tensor([3, 0, 2, 1, 7, 6, 5, 4])
    assert stepper.step({name: value[order] for name, value in make_batch(2, "in-batch", 4).items()}) > 0
