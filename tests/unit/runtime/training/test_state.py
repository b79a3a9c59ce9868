"""Weights, optimizer state and generators, put away and taken up again."""

import random

import numpy as np
import pytest
import torch

from vramfit.errors import VramfitError
from vramfit.runtime.training.state import (
    learned_tensors,
    optimizer_state,
    random_tensors,
    random_values,
    restore_learned,
    restore_optimizer,
    restore_random,
)
from vramfit.step.recovery import RandomState
from vramfit.techniques import optimizers


def trained(name: str, num_steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = optimizers.make(name, model.parameters(), lr=1e-2)  # type: ignore[arg-type]
    for step in range(num_steps):
        learn(model, optimizer, step)
    return model, optimizer


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "adamw-single", "sgd", "adafactor"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_restored_optimizer_goes_on_to_the_bit(name: str, num_before: int) -> None:
    model, optimizer = trained(name, 5)
    tensors, scalars = optimizer_state(model, optimizer)
    weights = {k: v.clone() for k, v in learned_tensors(model).items()}
    saved = {k: v.clone() for k, v in tensors.items()}
    learn(model, optimizer, 5)

    twin, other = trained(name, num_before)
    restore_learned(twin, weights)
    restore_optimizer(twin, other, saved, scalars)
    learn(twin, other, 5)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


def test_weights_of_another_model_are_refused() -> None:
    model, _ = trained("sgd", 0)
    with pytest.raises(VramfitError, match="another model"):
        restore_learned(model, {"x": torch.zeros(1)})


def test_all_generators_are_where_they_were() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), random.gauss(), float(np.random.rand()), np.random.randn()]

    random.gauss()
    state = RandomState.now()
    tensors, values = random_tensors(state), random_values(state)
    first = drawn()
    drawn()
    restore_random(tensors, values)
    assert drawn() == first
