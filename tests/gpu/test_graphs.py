"""On a real GPU: recorded passes learn what passes as they are learn, and take what was predicted."""

from typing import Any

import pytest
import torch
from tests.gpu.peaks import assert_takes_what_was_predicted
from tests.unit.runtime.small_models import FAMILIES, flat_gradient, flat_weights, make_batch, make_model
from tests.unit.techniques.test_packing import with_pads

from vramfit.runtime.stepper import Stepper
from vramfit.techniques import casting, compiling, packing

pytestmark = pytest.mark.gpu

TASK = "sequence-classification"
TASKS = ("sequence-classification", "token-classification", "masked-lm")
PACKED = [name for name in FAMILIES if name != "deberta-v2"]
WIDE = {"hidden_size": 64, "intermediate_size": 128}


def make_stepper(family: str = "bert", task: Any = TASK, micro_batch: int = 6, **keywords: Any) -> Stepper:
    model = make_model(family, task, **keywords.pop("changes", {})).cuda()
    packing.apply(model, task)
    casting.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Stepper(model, optimizer, micro_batch=micro_batch, precision="amp-bf16", **({"graphs": True} | keywords))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", PACKED)
def test_gradients_are_those_of_passes_as_they_are(family: str, task: Any) -> None:
    batch = with_pads(family, make_batch(task))
    stepper = make_stepper(family, task)
    loss = float(stepper.gradients(batch))
    right = flat_gradient(stepper.model)
    for _ in range(3):
        assert float(stepper.gradients(batch)) == pytest.approx(loss, rel=5e-3)
        assert (flat_gradient(stepper.model) - right).norm() / right.norm() < 0.02
    assert stepper._graph_use.passes is not None
    assert stepper._graph_use.passes.num_captured >= 1


DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def learn(looks_at: tuple[int, ...] = (), *, num: int = 6) -> tuple[list[float], torch.Tensor]:
    """Losses and weights of a run with dropout, which evaluates before some of its steps."""
    torch.manual_seed(7)
    stepper = make_stepper(changes=DROPS)
    stepper.rehearse(make_batch(TASK))
    losses = []
    for step in range(num):
        if step in looks_at:
            stepper.model.eval()
            with torch.no_grad():
                stepper.model(**{k: v.cuda() for k, v in make_batch(TASK).items()})
            stepper.model.train()
        losses.append(stepper.step(make_batch(TASK, seed=step % 2)))
    assert stepper._graph_use.passes is not None
    return losses, flat_weights(stepper.model)


def test_dropout_draws_anew_at_every_replay() -> None:
    stepper = make_stepper(changes=DROPS)
    seen = {round(float(stepper.gradients(make_batch(TASK))), 6) for _ in range(6)}
    assert len(seen) > 3


def test_an_evaluation_in_between_changes_nothing() -> None:
    torch.use_deterministic_algorithms(False)
    losses, weights = learn()
    others, other_weights = learn(looks_at=(2, 4))
    assert losses == pytest.approx(others, rel=1e-3)  # attention's backward adds in no fixed order
    assert (weights - other_weights).norm() / weights.norm() < 1e-3


def test_a_window_that_is_turned_back_draws_the_same() -> None:
    stepper = make_stepper(changes=DROPS)
    stepper.rehearse(make_batch(TASK))
    state = torch.cuda.get_rng_state()
    first = float(stepper.gradients(make_batch(TASK)))
    second = float(stepper.gradients(make_batch(TASK)))
    torch.cuda.set_rng_state(state)
    assert float(stepper.gradients(make_batch(TASK))) == pytest.approx(first, rel=1e-6)
    assert first != second


def test_memory_of_recorded_passes_is_free_for_an_evaluation() -> None:
    stepper = make_stepper(changes=WIDE | {"num_hidden_layers": 4}, micro_batch=512, seq=16)
    batch = make_batch(TASK, size=512)
    stepper.rehearse(batch)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    with torch.no_grad():
        stepper.model(**{k: v[:1].cuda() for k, v in batch.items()})
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held


def test_too_little_memory_to_record_costs_no_step() -> None:
    stepper = make_stepper(changes=WIDE | {"num_hidden_layers": 8}, micro_batch=2048, seq=16)
    batch = make_batch(TASK, size=2048)
    stepper.step(batch)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 64 * 2**20  # workspaces, and then a pass needs far more
    stepper.on_out_of_memory = lambda error: torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    stepper.step(batch)
    assert stepper.num_steps == 2
    assert stepper.num_recoveries >= 1
    assert stepper._graph_use.passes is None
    stepper.step(batch)


def look_at(module: Any, inputs: Any) -> None:
    float(inputs[0].sum())  # the host waits, which no graph can hold


def test_a_capture_that_cuda_makes_invalid_costs_no_step() -> None:
    stepper = make_stepper(changes=DROPS)
    hook = stepper.model.classifier.register_forward_pre_hook(look_at)
    stepper.step(make_batch(TASK))
    with pytest.warns(UserWarning, match="cannot be captured"):
        stepper.step(make_batch(TASK))
    stepper.step(make_batch(TASK))  # dropout draws, as before
    assert (stepper.num_steps, stepper.num_recoveries) == (3, 0)
    torch.cuda.empty_cache()
    hook.remove()
    other = make_stepper(changes=DROPS)
    other.rehearse(make_batch(TASK))
    first, second = (float(other.gradients(make_batch(TASK))) for _ in range(2))
    assert other._graph_use.passes is not None
    assert first != second


def test_memory_is_free_when_a_stepper_goes() -> None:
    stepper = make_stepper(changes=WIDE | {"num_hidden_layers": 4}, micro_batch=512, seq=16)
    model, optimizer = stepper.model, stepper.optimizer
    stepper.rehearse(make_batch(TASK, size=512))
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    del stepper
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held
    assert optimizer.state  # is there still
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("change", ["eval", "unfreeze", "storage"])
def test_a_model_that_changes_learns_as_one_that_runs_as_it_is(change: str) -> None:
    batch = with_pads("bert", make_batch(TASK))
    made = [make_stepper(changes=DROPS if change == "eval" else {}, graphs=graphs) for graphs in (True, False)]
    losses: list[list[float]] = [[], []]
    for stepper, seen in zip(made, losses, strict=True):
        model: Any = stepper.model
        model.bert.embeddings.requires_grad_(change != "unfreeze")
        stepper.rehearse(batch)
        if change == "eval":
            model.eval()
        elif change == "unfreeze":
            model.bert.embeddings.requires_grad_(True)
        else:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        seen += [stepper.step(batch) for _ in range(4)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    weights = [flat_weights(stepper.model) for stepper in made]
    assert (weights[0] - weights[1]).norm() / weights[1].norm() < 0.01


def test_compiled_layers_are_recorded() -> None:
    batch = with_pads("bert", make_batch(TASK))
    stepper = make_stepper(changes=WIDE)
    plain = make_stepper(changes=WIDE, graphs=False)
    compiling.apply(stepper.model)
    stepper.rehearse(batch)
    losses = [stepper.step(batch) for _ in range(4)]
    assert stepper._graph_use.passes is not None
    assert stepper._graph_use.passes.num_captured >= 1
    assert losses == pytest.approx([plain.step(batch) for _ in range(4)], rel=0.02)


@pytest.mark.parametrize(
    "keywords",
    [
        {"model": "bert-base-uncased", "batch": 16, "seq": 512},
        {"model": "bert-base-uncased", "batch": 32, "micro_batch": 8, "seq": 512},
        {"model": "roberta-base", "batch": 16, "seq": 256, "task": "token-classification", "precision": "bf16"},
        {"model": "modernbert-base", "batch": 8, "seq": 512, "task": "masked-lm"},
        {"model": "distilbert-base-uncased", "batch": 32, "seq": 512, "casts": "together"},
        {"model": "bert-base-uncased", "batch": 16, "seq": 512, "lora": 8, "casts": "together"},
    ],
    ids=str,
)
def test_recorded_training_takes_what_was_predicted(keywords: dict[str, Any]) -> None:
    assert_takes_what_was_predicted(keywords | {"graphs": True})
