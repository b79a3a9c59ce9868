"""Where a request belongs: the module that runs, or whose gradient is computed."""

from typing import Any

import torch
import torch.nn.functional as F
from tests.unit.trace.recording import Applied, Asked, Small, asked, record
from torch.nn.modules import module as module_hooks

from vramfit.trace.ledger import Places


def step(model: torch.nn.Module) -> list[Asked]:
    ids = torch.empty(4, 8, dtype=torch.long, device="meta")

    def action(begin: Any) -> None:
        loss = model(ids).sum()
        begin("backward")
        loss.backward()

    return asked(record(action, model))


def modules(found: list[Asked], operator: str, part: str) -> set[str]:
    return {a.module for a in found if a.operator == operator and a.part == part}


def small(between: torch.nn.Module | None = None) -> Small:
    with torch.device("meta"):
        return Small(between)


def test_an_operator_belongs_to_the_module_whose_forward_runs() -> None:
    found = step(small(torch.nn.Sequential(torch.nn.GELU(), torch.nn.LayerNorm(32, device="meta"))))
    assert modules(found, "embedding", "forward") == {"words"}
    assert modules(found, "gelu", "forward") == {"between.0"}
    assert modules(found, "native_layer_norm", "forward") == {"between.1"}
    assert modules(found, "addmm", "forward") == {"dense"}


def test_a_gradient_belongs_to_the_module_that_made_its_node() -> None:
    found = step(small(torch.nn.Sequential(torch.nn.GELU(), torch.nn.LayerNorm(32, device="meta"))))
    assert modules(found, "gelu_backward", "backward") == {"between.0"}
    assert modules(found, "native_layer_norm_backward", "backward") == {"between.1"}
    assert modules(found, "embedding_dense_backward", "backward") == {"words"}
    assert modules(found, "mm", "backward") == {"dense"}


def test_an_operator_between_modules_belongs_to_the_one_around_them() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.GELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(torch.exp(x)))

    found = step(small(Outer()))
    assert modules(found, "exp", "forward") == modules(found, "tanh", "forward") == {"between"}
    assert modules(found, "gelu", "forward") == {"between.inner"}
    assert modules(found, "tanh_backward", "backward") == {"between"}


def test_a_module_that_is_used_twice_has_one_name() -> None:
    shared = Applied(torch.tanh)
    found = step(small(torch.nn.Sequential(shared, shared)))
    assert modules(found, "tanh", "forward") == {"between.0"}


def test_a_loss_outside_every_module_has_no_name() -> None:
    assert modules(step(small()), "sum", "forward") == {""}


def test_what_is_recomputed_in_backward_is_told_apart() -> None:
    block = Applied(torch.tanh)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpointed(F.gelu(x))

    found = step(small(Outer()))
    assert modules(found, "tanh", "recompute") == {"between.block"}
    assert modules(found, "gelu", "recompute") == set()
    assert modules(found, "tanh_backward", "backward") == {"between.block"}


def test_hooks_are_gone_afterwards_whatever_happened() -> None:
    before = (len(module_hooks._global_forward_pre_hooks), len(module_hooks._global_forward_hooks))
    try:
        with Places(torch.nn.Identity()):
            assert len(module_hooks._global_forward_hooks) == before[1] + 1
            raise RuntimeError
    except RuntimeError:
        pass
    assert (len(module_hooks._global_forward_pre_hooks), len(module_hooks._global_forward_hooks)) == before
