"""What is there for a run, by what the driver and the allocator say."""

import pytest
import torch

from vramfit.runtime.device import RunDevice

GIB = 2**30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A GPU of 16 GiB of which this process holds 4 and nobody else anything; its limit is 8."""
    card = {"free": 12 * GIB, "held": 4 * GIB, "fraction": 0.5}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (card["free"], 16 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: card["held"])
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda device: card["fraction"])
    return card


def gpu() -> RunDevice:
    device = RunDevice("cpu")
    device.device = torch.device("cuda", 0)
    return device


def test_what_is_there_is_what_is_free_and_what_is_held_whatever_limit_the_run_set(card: dict[str, float]) -> None:
    assert gpu().available_bytes(8 * GIB) == 16 * GIB
    card["free"] = 2 * GIB
    assert gpu().available_bytes(8 * GIB) == 6 * GIB


def test_a_limit_that_somebody_else_lowered_counts(card: dict[str, float]) -> None:
    card["fraction"] = 0.25
    assert gpu().available_bytes(8 * GIB) == 4 * GIB


def test_on_an_emulated_gpu_it_is_what_no_neighbour_has_taken() -> None:
    device = RunDevice("emulated", memory="64MiB")
    assert device.emulated is not None
    device.emulated.take("16MiB")
    assert device.available_bytes(1) == 48 * 2**20
