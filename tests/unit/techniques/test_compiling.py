"""Compiled layers give what plain ones give, and no batch has them compiled again."""

import copy
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import LENGTH, make_batch, make_model

from vramfit.models.anatomy import encoder_layers
from vramfit.runtime.stepper import Stepper
from vramfit.techniques import compiling, lora, packing

TASK = "sequence-classification"


class Counted:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "packed", "rank"),
    [("bert", False, None), ("bert", True, None), ("modernbert", True, None), ("bert", False, 4)],
)
def test_compiled_layers_train_the_same(family: str, packed: bool, rank: int | None) -> None:
    plain = make_model(family, TASK)
    if packed:
        packing.apply(plain, TASK)
    lora.apply(plain, rank)
    model = copy.deepcopy(plain)
    backend = Counted()
    compiling.apply(model, backend=backend)
    losses = []
    for made in (plain, model):
        learned = [p for p in made.parameters() if p.requires_grad]
        stepper = Stepper(made, torch.optim.SGD(learned, lr=0.1), micro_batch=4, seq=LENGTH)
        losses.append([stepper.step(make_batch(TASK, seed=seed)) for seed in range(3)])
    assert backend.num_graphs > 0
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


def test_layers_share_what_is_compiled_and_lengths_do_not_ask_for_more() -> None:
    model = make_model("bert", TASK, num_hidden_layers=6)
    backend = Counted()
    compiling.apply(model, backend=backend)
    inputs = [torch.randint(1, 90, (size, length)) for size, length in [(2, 7), (3, 9), (5, 16), (4, 12)]]
    model(inputs[0])
    once = backend.num_graphs
    assert once < len(encoder_layers(model))
    for ids in inputs[1:]:
        model(ids)
    assert backend.num_graphs == once


def test_packed_rows_of_other_numbers_of_sequences_do_not_ask_for_more() -> None:
    model = make_model("bert", TASK)
    packing.apply(model, TASK)
    backend = Counted()
    compiling.apply(model, backend=backend)
    rows = [(7, 9, 3), (5, 16), (4, 12, 8, 2), (11, 3, 3, 9, 2)]

    def run(lengths: tuple[int, ...]) -> None:
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        packed = packing.pack({"input_ids": torch.randint(1, 90, mask.shape), "attention_mask": mask}, model)
        model(**packed)

    run(rows[0])
    once = backend.num_graphs
    for lengths in rows[1:]:
        run(lengths)
    assert backend.num_graphs == once


def test_a_checkpointed_layer_is_compiled_too() -> None:
    model = make_model("bert", TASK)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    backend = Counted()
    compiling.apply(model, backend=backend)
    model.train()
    batch = make_batch(TASK, seed=0)
    model(**batch).loss.backward()
    assert backend.num_graphs > 0
    assert all(p.grad is not None for layer in encoder_layers(model) for p in layer.parameters())


def test_numbers_of_other_compiled_functions_stay_open() -> None:
    model, backend = make_model("bert", TASK), Counted()
    before = torch._dynamo.config.specialize_float
    compiling.apply(model, backend=backend)
    model(**make_batch(TASK))
    assert torch._dynamo.config.specialize_float == before
    assert backend.num_graphs > 0
