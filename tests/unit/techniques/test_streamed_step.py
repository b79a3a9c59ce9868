"""A step that is computed on the device while its state waits on the host: the same as one on the host, to the bit."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import flat_weights, make_batch, make_model

from vramfit.runtime import stepper as steppers
from vramfit.settings import checkpointing
from vramfit.techniques import offloading, optimizers
from vramfit.techniques.offloading.gradient_slots import HostArena
from vramfit.techniques.offloading.host_step import HostStep
from vramfit.techniques.offloading.streamed_step import MOMENTS, is_streamable

TASK = "sequence-classification"
MIB = 2**20
FUSED = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def make_stepper(
    monkeypatch: pytest.MonkeyPatch,
    *,
    streams: bool,
    offload: Any = "optimizer",
    precision: Any = "fp32",
    micro_batch: int = 5,
    max_grad_norm: float | None = 0.5,
    task: str = TASK,
    family: str = "bert",
    make_optimizer: Any = FUSED,
) -> steppers.Stepper:
    monkeypatch.setattr(steppers, "HostStep", partial(HostStep, streams=streams))
    model = make_model(family, task)
    if precision == "bf16":
        model.to(torch.bfloat16)
    if family != "albert":
        checkpointing.apply(model, "full")
    if offload == "weights":
        offloading.apply(model, 0, "cpu", trains=True)
    made = steppers.Stepper(
        model,
        make_optimizer(model.parameters()),
        micro_batch=micro_batch,
        max_grad_norm=max_grad_norm,
        precision=precision,
        offload=offload,
    )
    assert made.host is not None
    assert made.host.streams == streams
    return made


def train(stepper: steppers.Stepper, task: str = TASK, num_steps: int = 3) -> tuple[torch.Tensor, list[float]]:
    losses = [stepper.step(make_batch(task, seed=seed)) for seed in range(num_steps)]
    return flat_weights(stepper.model), losses


class SharedArena(HostArena):
    """Blocks as for a GPU, on which tensors lie side by side."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self._shares = True


@pytest.mark.parametrize("slot_bytes", [None, 5000])
@pytest.mark.parametrize("micro_batch", [5, 12])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-fp16"])
@pytest.mark.parametrize("offload", ["optimizer", "weights"])
def test_it_is_the_step_of_the_host_to_the_bit(
    offload: str, precision: str, micro_batch: int, slot_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slots that hold many parameters, and in slots that hold a part of one; with a sum, and with an only pass."""
    keywords: dict[str, Any] = {"offload": offload, "precision": precision, "micro_batch": micro_batch}
    weights, losses = train(make_stepper(monkeypatch, streams=False, **keywords))
    if slot_bytes is not None:
        monkeypatch.setattr("vramfit.techniques.offloading.gradient_slots.SLOT_BYTES", slot_bytes)
        monkeypatch.setattr("vramfit.techniques.offloading.host_step.HostArena", SharedArena)
    ours, our_losses = train(make_stepper(monkeypatch, streams=True, **keywords))
    assert our_losses == losses
    assert torch.equal(ours, weights)


def test_what_lies_side_by_side_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_copies() -> int:
        stepper = make_stepper(monkeypatch, streams=True, precision="bf16", micro_batch=12)
        train(stepper, num_steps=2)
        assert stepper.host is not None
        assert stepper.host._stream is not None
        (pieces,) = {id(made): made for made in stepper.host._stream._made.values()}.values()
        return sum(len(piece.inwards.targets) for piece in pieces)

    alone = num_copies()
    monkeypatch.setattr("vramfit.techniques.offloading.host_step.HostArena", SharedArena)
    assert num_copies() < 0.75 * alone


@pytest.mark.parametrize(
    "make_optimizer",
    [
        partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.3, maximize=True),
        partial(torch.optim.Adam, lr=1e-3, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-3),
        lambda parameters: torch.optim.AdamW(
            [{"params": [p], "lr": 10 ** -(3 + i % 2), "weight_decay": i % 3 / 10} for i, p in enumerate(parameters)],
            fused=True,
        ),
    ],
    ids=["adamw", "adam", "groups"],
)
def test_settings_reach_the_step(make_optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keywords = {"make_optimizer": make_optimizer, "max_grad_norm": None}
    weights, losses = train(make_stepper(monkeypatch, streams=False, **keywords))
    ours, our_losses = train(make_stepper(monkeypatch, streams=True, **keywords))
    assert our_losses == pytest.approx(losses, abs=1e-6)
    torch.testing.assert_close(ours, weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_that_is_applied_many_times_in_an_only_pass(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keywords: dict[str, Any] = {"family": "albert", "precision": precision, "micro_batch": 12}
    weights, losses = train(make_stepper(monkeypatch, streams=False, **keywords))
    ours, our_losses = train(make_stepper(monkeypatch, streams=True, **keywords))
    assert our_losses == losses
    assert torch.equal(ours, weights)


def test_state_that_was_loaded_is_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_stepper(monkeypatch, streams=True)
    train(whole, num_steps=2)
    state, weights = copy.deepcopy(whole.optimizer.state_dict()), copy.deepcopy(whole.model.state_dict())
    assert {"step", *MOMENTS} == set(state["state"][0])
    resumed = make_stepper(monkeypatch, streams=True)
    resumed.model.load_state_dict(weights)
    assert resumed.host is not None
    resumed.host.read()
    resumed.optimizer.load_state_dict(state)
    batch = make_batch(TASK, seed=7)
    assert whole.step(batch) == resumed.step(batch)
    assert torch.equal(flat_weights(whole.model), flat_weights(resumed.model))


@pytest.mark.parametrize(
    ("make_optimizer", "can"),
    [
        (partial(torch.optim.AdamW), True),
        (partial(torch.optim.Adam), True),
        (partial(torch.optim.AdamW, amsgrad=True), False),
        (partial(torch.optim.SGD, lr=0.1), False),
        (partial(optimizers.make, "adafactor"), False),
    ],
)
def test_only_plain_adam_is_streamed(make_optimizer: Any, can: bool) -> None:
    assert is_streamable(make_optimizer([torch.nn.Parameter(torch.ones(4))])) is can


def test_an_optimizer_with_hooks_steps_by_itself() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
    optimizer.register_step_pre_hook(lambda *_: None)
    assert not is_streamable(optimizer)


META = torch.device("meta")


def test_blocks_of_a_power_of_two_leave_little_unused() -> None:
    """RoBERTa's embeddings are 147 MiB, which would take 256 each; here they leave room for the layers."""
    sizes = [147 * MIB, *[9 * MIB // 4] * 48, *[9 * MIB] * 24, *[3072] * 100]
    held = HostArena.measure(sizes, META)
    assert sum(sizes) <= held <= 1.15 * sum(sizes)
    assert HostArena.measure(sizes, torch.device("cpu")) == sum(sizes)


def test_a_small_model_does_not_take_a_whole_block() -> None:
    assert HostArena.measure([1000] * 10, META) == 16 * 1024


def test_tensors_of_an_arena_do_not_overlap_and_take_what_was_measured() -> None:
    like = [torch.empty(n, 7) for n in (1, 300, 20, 4000, 3)] + [torch.empty(6, 5).t()]
    arena = HostArena(sum(t.nbytes for t in like), META)
    made = [arena.empty_like(t, torch.float32) for t in like]
    for i, tensor in enumerate(made):
        tensor.fill_(i)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(made))
    assert [t.stride() for t in made] == [t.stride() for t in like]
    assert arena.held_bytes == HostArena.measure([t.nbytes for t in like], META)
