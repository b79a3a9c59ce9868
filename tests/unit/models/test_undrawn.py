"""Building without drawing, in several threads at once."""

import torch

from vramfit.models.build import DRAWING, undrawn


def test_builds_that_end_in_another_order_leave_no_pile() -> None:
    plain = {name: getattr(torch.nn.init, name) for name in DRAWING}
    try:
        for _ in range(2000):  # more than Python's calls may be deep
            first, second = undrawn(), undrawn()
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            second.__exit__(None, None, None)
        assert torch.nn.Linear(2, 2).weight.abs().sum() > 0
    finally:
        for name, function in plain.items():
            setattr(torch.nn.init, name, function)
