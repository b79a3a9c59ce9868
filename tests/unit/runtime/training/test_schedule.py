"""The learning rate over a run."""

import pytest
import torch

from vramfit.runtime.training.session import Schedule, factor


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_warm_up_reaches_the_rate_and_the_end_is_known(name: str) -> None:
    rates = [factor(name, step, 4, 20) for step in range(21)]  # type: ignore[arg-type]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(1.0 if name == "constant" else 0.0)


def test_a_resumed_schedule_has_the_very_same_rate() -> None:
    def make() -> Schedule:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return Schedule(optimizer, name="cosine", lr=0.1, num_steps=30, warmup=0.1)

    one, other = make(), make()
    for _ in range(11):
        one.step()
    other.load_state_dict(one.state_dict())
    assert other.lr == one.lr
    assert other._optimizer.param_groups[0]["lr"] == one.lr
