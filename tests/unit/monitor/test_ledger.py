"""Every storage with its origin, from its first moment to its last."""

import torch

from vramfit.monitor.ledger import KEEPS_AFTER, LEAKS_FROM, Ledger


def make() -> Ledger:
    return Ledger(lambda tensor: True, lambda: "forward", lambda error, operator, module: None)


def test_storages_come_and_go_with_their_tensors() -> None:
    with make() as ledger:
        first = torch.ones(256)
        view = first[:10]
        second = first * 2
    assert ledger.live_bytes == 2 * 256 * 4
    origin = ledger.origin(second)
    assert origin is not None
    assert (origin.operator, ledger.origin(view)) == ("mul", ledger.origin(first))
    del first
    assert ledger.live_bytes == 2 * 256 * 4, "a view keeps what it looks at"
    del view, second
    assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 2 * 256 * 4


def test_modules_are_named_in_forward_and_in_backward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    seen: list[tuple[str, str]] = []
    with make() as ledger:
        ledger.know(model)
        model(torch.ones(4, 8)).sum().backward()
        seen = [(group.module, group.operator) for group in ledger.alive({})]
    assert ("0", "parameter") in seen
    assert any(module == "2" and operator in ("mm", "sum") for module, operator in seen), seen


def test_only_what_stays_for_rounds_is_a_leak() -> None:
    kept = []
    with make() as ledger:
        for _ in range(LEAKS_FROM + KEEPS_AFTER):
            kept.append(torch.ones(256) * 3)  # kept
            torch.zeros(64)
            ledger.next_round()
    (leak,) = ledger.leaks(())
    assert leak.origin.operator == "mul"
    assert leak.num_tensors == leak.num_rounds >= LEAKS_FROM
    assert ledger.leaks([t.untyped_storage()._cdata for t in kept]) == []


def test_another_memory_begins_without_what_lies_elsewhere() -> None:
    with make() as ledger:
        here, there = torch.ones(8), torch.ones(4, device="meta")
    ledger.keep_only("meta")
    assert ledger.live_bytes == 16
    assert ledger.origin(here) is None
    del there
    assert ledger.live_bytes == 0
