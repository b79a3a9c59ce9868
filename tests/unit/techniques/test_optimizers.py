from typing import Any

import pytest
import torch

from vramfit.errors import WorkloadError
from vramfit.techniques import optimizers
from vramfit.workload import CHOICES


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw", torch.optim.AdamW, {"foreach": True}),
        ("adamw-fused", torch.optim.AdamW, {"fused": True}),
        ("adamw-single", torch.optim.AdamW, {"foreach": False}),
        ("sgd", torch.optim.SGD, {"foreach": True, "momentum": 0}),
        ("adafactor", torch.optim.Adafactor, {"foreach": False}),
    ],
)
def test_a_name_is_an_optimizer_with_its_implementation_spelled_out(
    name: Any, kind: type, options: dict[str, Any]
) -> None:
    made = optimizers.make(name, linear().parameters())
    assert type(made) is kind
    assert {key: made.defaults[key] for key in options} == options


@pytest.mark.parametrize("name", CHOICES["optimizer"])
def test_every_optimizer_takes_a_real_step(name: Any) -> None:
    model = linear()
    before = model.weight.detach().clone()
    made = optimizers.make(name, model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    made.step()
    assert not torch.equal(model.weight, before)


def test_frozen_parameters_are_left_out() -> None:
    model = linear()
    model.bias.requires_grad_(False)
    (group,) = optimizers.make("adamw", model.parameters()).param_groups
    assert [p is model.weight for p in group["params"]] == [True]


def test_nothing_that_learns_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="every parameter of the model is frozen"):
        optimizers.make("adamw", linear().requires_grad_(False).parameters())


def test_the_learning_rate_is_the_one_given() -> None:
    assert optimizers.make("sgd", linear().parameters(), lr=0.5).param_groups[0]["lr"] == 0.5


def test_a_name_that_is_not_available_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="optimizer lion is not available"):
        optimizers.make("lion", linear().parameters())  # type: ignore[arg-type]
