"""An optimizer in host memory: the same training, and as little on the device as was predicted."""

import copy
import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import FAMILIES, flat_weights, make_batch, make_model

import vramfit
from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import BudgetExceeded, WorkloadError
from vramfit.runtime.stepper import Stepper
from vramfit.settings import checkpointing
from vramfit.settings import freeze as freezing
from vramfit.techniques import application, offloading, optimizers
from vramfit.techniques.offloading import layer_inputs
from vramfit.techniques.offloading.host_step import HostStep

TASK = "sequence-classification"
NUM_STEPS = 4


def train(
    family: str = "bert",
    task: str = TASK,
    *,
    offload: Any = None,
    precision: Any = "fp32",
    optimizer: Any = "adamw-fused",
    micro_batch: int = 5,
    freeze: Any = None,
) -> tuple[torch.Tensor, list[float]]:
    """Weights and losses of a few steps; all of them checkpointed, so that only offloading differs."""
    model = make_model(family, task, num_hidden_layers=3)
    if precision == "bf16":
        model.to(torch.bfloat16)
    freezing.apply(model, freeze)
    if family != "albert":  # it cannot
        checkpointing.apply(model, "full")
    if offload == "weights":
        offloading.apply(model, 0, "cpu", trains=True)
    if offload == "activations":
        layer_inputs.apply(model)
    stepped = optimizers.make(optimizer, model.parameters(), lr=1e-3)
    stepper = Stepper(model, stepped, micro_batch=micro_batch, max_grad_norm=0.5, precision=precision, offload=offload)
    losses = [stepper.step(make_batch(task, seed=seed)) for seed in range(NUM_STEPS)]
    return flat_weights(model), losses


on_the_device = cache(train)
"""What offloaded runs are compared with, each once."""


@pytest.mark.parametrize("offload", ["optimizer", "weights", "activations"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "albert"])
def test_training_is_the_same_to_the_bit_in_every_family(family: str, offload: str) -> None:
    weights, losses = on_the_device(family)
    ours, our_losses = train(family, offload=offload)
    assert our_losses == losses
    assert torch.equal(ours, weights)


@pytest.mark.parametrize("offload", ["optimizer", "weights"])
@pytest.mark.parametrize("task", ["masked-lm", "question-answering"])
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "amp-bf16"},
        {"precision": "amp-fp16"},
        {"optimizer": "adamw"},
        {"optimizer": "sgd"},
        {"optimizer": "adafactor"},
        {"micro_batch": 12},
        {"freeze": "embeddings"},
        {"freeze": 2},
    ],
    ids=str,
)
def test_training_is_the_same_to_the_bit_in_every_setting(settings: dict[str, Any], task: str, offload: str) -> None:
    """masked-lm has a decoder that is tied to the embeddings."""
    weights, losses = on_the_device(task=task, **settings)
    ours, our_losses = train(task=task, offload=offload, **settings)
    assert our_losses == losses
    assert torch.equal(ours, weights)


def test_a_layer_that_is_applied_many_times_learns_the_same() -> None:
    """ALBERT's one layer sums its gradients before they leave."""
    weights, losses = train("albert")
    ours, our_losses = train("albert", offload="optimizer")
    assert our_losses == losses
    assert torch.equal(ours, weights)


def test_updates_too_small_for_bf16_weights_are_not_lost() -> None:
    """One update is rounded away every time; a master in fp32 keeps them all."""
    made = {}
    for offload in (None, "optimizer"):
        model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        stepper = Stepper(
            model,
            optimizer,
            micro_batch=4,
            precision="bf16",
            offload=offload,  # type: ignore[arg-type]
            loss_fn=lambda output, batch: output.sum(),
            count_fn=lambda batch: len(batch["input"]),
        )
        for _ in range(100):
            stepper.step({"input": torch.ones(4, 64, dtype=torch.bfloat16)})
        made[offload] = float(model.weight.detach().float().mean())
    assert made[None] == 1.0
    assert made["optimizer"] == pytest.approx(1.0 - 100 * 1e-4, abs=4e-3)


def test_schedulers_and_weight_decay_reach_the_optimizer_on_the_host() -> None:
    made = {}
    for offload in (None, "optimizer"):
        model = make_model("bert", TASK)
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        stepper = Stepper(model, optimizer, micro_batch=6, scheduler=scheduler, offload=offload)  # type: ignore[arg-type]
        for seed in range(3):
            stepper.step(make_batch(TASK, seed=seed))
        made[offload] = flat_weights(model)
    assert torch.equal(made[None], made["optimizer"])


def test_an_optimizer_that_has_stepped_takes_its_state_along() -> None:
    model = make_model("bert", TASK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    Stepper(model, optimizer, micro_batch=6).step(make_batch(TASK))
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    Stepper(model, optimizer, micro_batch=6).step(make_batch(TASK, seed=2))
    Stepper(twin, other, micro_batch=6, offload="optimizer").step(make_batch(TASK, seed=2))
    assert torch.equal(flat_weights(model), flat_weights(twin))


def test_gradients_leave_the_device_as_they_are_made() -> None:
    model = make_model("bert", TASK)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    host = HostStep(model, optimizer)
    model(**make_batch(TASK)).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    host.gather()
    assert all(home.master.grad is not None for home in host.homes if home.num_received)
    host.drop()
    assert all(home.master.grad is None for home in host.homes)


def test_an_evaluation_between_steps_sees_the_newest_weights() -> None:
    model = make_model("bert", TASK, num_hidden_layers=3)
    checkpointing.apply(model, "full")
    offloading.apply(model, 0, "cpu", trains=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    stepper = Stepper(model, optimizer, micro_batch=6, offload="weights")
    for seed in range(3):
        stepper.step(make_batch(TASK, seed=seed))
        plain = make_model("bert", TASK, num_hidden_layers=3)
        plain.load_state_dict(model.state_dict())
        batch = make_batch(TASK, seed=9)
        with torch.no_grad():
            seen, expected = model.eval()(**batch).logits, plain.eval()(**batch).logits
        model.train()
        assert torch.equal(seen, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
@pytest.mark.parametrize("offload", ["optimizer", "weights", "activations"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_device_takes_what_was_predicted(offload: Any, precision: Any, micro_batch: int) -> None:
    """The emulated GPU has no workspaces; and under its eyes autograd adds some gradients out of place."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=4000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    keywords: dict[str, Any] = {"precision": precision, "optimizer": "adamw-fused", "checkpointing": "full"}
    predicted = vramfit.estimate(
        config,
        batch=2 * micro_batch,
        micro_batch=micro_batch,
        seq=128,
        loop="stepper",
        max_grad_norm=1.0,
        memory="4GiB",
        allocator="expandable",
        offload=offload,
        **keywords,
    )
    model = BertForSequenceClassification(config).train()
    application.apply(model, predicted.workload)
    if offload == "weights":
        offloading.apply(model, 0, "cpu", trains=True)
    optimizer = optimizers.make("adamw-fused", model.parameters())
    stepper = Stepper(
        model, optimizer, micro_batch=micro_batch, max_grad_norm=1.0, precision=precision, offload=offload
    )
    ids = torch.randint(5, 4000, (2 * micro_batch, 128))
    mask = torch.ones_like(ids)
    mask[::2, -8:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(2 * micro_batch, dtype=torch.long)}
    with EmulatedGPU("4GiB", allocator="expandable") as gpu:
        for _ in range(2):
            stepper.step(batch)
    assert predicted.peak_allocated_bytes >= gpu.max_allocated_bytes
    own_bytes = predicted.peak_allocated_bytes - predicted.breakdown["workspaces"]
    assert own_bytes == pytest.approx(gpu.max_allocated_bytes, rel=0.01)
    held = held_on_host(stepper)  # where nothing is pinned, and nothing rounded up for it
    assert held * 0.999 <= predicted.host_bytes <= 1.35 * held
    if offload != "optimizer":
        assert predicted.host_bytes >= 4 * micro_batch * 128 * 256 * 2  # the inputs of four layers


def held_on_host(stepper: Stepper) -> int:
    """What is really there in host memory: every storage once, counts of steps left out."""
    inputs = layer_inputs.layer_inputs_of(stepper.model)
    input_bytes = 0 if inputs is None else sum(inputs.sizes)
    host = stepper.host
    if host is None:
        return input_bytes
    tensors = [t for home in host.homes for t in (home.landing, home.total, home.master, home.weight)]
    tensors = [t for t in tensors if not any(t is home.weight is home.computed for home in host.homes)]
    tensors += [t for state in stepper.optimizer.state.values() for t in state.values() if t.dim()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return input_bytes + sum(storages.values())


@pytest.mark.parametrize("offload", ["optimizer", "weights"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd", "adafactor"])
def test_what_it_takes_of_the_host_is_what_it_says(offload: Any, precision: Any, optimizer: Any) -> None:
    model = make_model("bert", TASK, hidden_size=64, intermediate_size=256)
    if precision == "bf16":
        model.to(torch.bfloat16)
    checkpointing.apply(model, "full")
    if offload == "weights":
        offloading.apply(model, 0, "cpu", trains=True)
    stepper = Stepper(
        model, optimizers.make(optimizer, model.parameters()), micro_batch=12, precision=precision, offload=offload
    )
    stepper.step(make_batch(TASK))
    inputs = layer_inputs.layer_inputs_of(model)
    waiting = 0 if inputs is None else sum(inputs.sizes)
    assert stepper.host is not None
    assert stepper.host.host_bytes + waiting == pytest.approx(held_on_host(stepper), rel=0.002)


def test_host_memory_that_is_not_enough_is_refused_with_numbers() -> None:
    model = make_model("bert", TASK)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(BudgetExceeded, match=r"offloading takes .* of the host's memory, and it may take 100.00 KiB"):
        Stepper(model, optimizer, micro_batch=6, offload="optimizer", host_memory="100KiB")
    Stepper(model, optimizer, micro_batch=6).step(make_batch(TASK))  # nothing was touched


@pytest.mark.parametrize(
    ("prepare", "offload", "says"),
    [
        (lambda model: None, "weights", "no layer of the model waits in host memory"),
        (lambda model: offloading.apply(model, 0, "cpu"), "weights", "offloaded for inference"),
        (lambda model: offloading.apply(model, 0, "cpu", trains=True), "weights", "checkpointing must be full"),
        (lambda model: offloading.apply(model, 0, "cpu", trains=True), None, "take offload='weights'"),
        (lambda model: None, "gradients", "not one of optimizer, activations, weights"),
        (lambda model: None, "activations", "no layer's input waits in host memory"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(prepare: Any, offload: Any, says: str) -> None:
    model = make_model("bert", TASK)
    prepare(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad] or [torch.nn.Parameter()])
    with pytest.raises(WorkloadError, match=says):
        Stepper(model, optimizer, micro_batch=6, offload=offload)


def test_an_optimizer_of_8_bits_stays_on_the_device() -> None:
    model = make_model("bert", TASK)
    optimizer = optimizers.make("adamw-8bit", model.parameters())
    with pytest.raises(WorkloadError, match="AdamW8bit rounds its state"):
        Stepper(model, optimizer, micro_batch=6, offload="optimizer")


def test_a_layer_that_is_not_checkpointed_is_refused_before_it_learns_something_wrong() -> None:
    """transformers checkpoints layers in training mode only."""
    model = make_model("bert", TASK)
    checkpointing.apply(model, "full")
    offloading.apply(model, 0, "cpu", trains=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stepper = Stepper(model, optimizer, micro_batch=6, offload="weights")
    model.eval()
    with pytest.raises(WorkloadError, match="this one is not checkpointed"):
        stepper.step(make_batch(TASK))
    model.train()
    stepper.step(make_batch(TASK))


def test_an_optimizer_goes_to_host_memory_once() -> None:
    model = make_model("bert", TASK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    Stepper(model, optimizer, micro_batch=6, offload="optimizer")
    with pytest.raises(WorkloadError, match="was it taken to host memory before"):
        Stepper(model, optimizer, micro_batch=6, offload="optimizer")


def test_a_second_stepper_of_a_model_takes_its_gradients_over() -> None:
    ends = []
    for times in (1, 2):
        model = make_model("bert", TASK)
        for _ in range(times):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            stepper = Stepper(model, optimizer, micro_batch=6, offload="optimizer")
        stepper.step(make_batch(TASK))
        ends.append(flat_weights(model))
    assert torch.equal(*ends)


def test_a_host_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")

    model = make_model("bert", TASK)
    monkeypatch.setattr(torch, "empty_strided", fail)
    with pytest.raises(BudgetExceeded, match=r"the host does not give the .* that offloading takes: .*can't allocate"):
        HostStep(model, torch.optim.AdamW(model.parameters(), fused=True))


@pytest.mark.parametrize("offload", ["optimizer", "weights", "activations"])
def test_dropout_drops_the_same_when_layers_are_computed_again(offload: Any) -> None:
    ends = []
    for chosen in (None, offload):
        model = make_model("bert", TASK, num_hidden_layers=3, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
        checkpointing.apply(model, "full")
        if chosen == "weights":
            offloading.apply(model, 0, "cpu", trains=True)
        elif chosen == "activations":
            layer_inputs.apply(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        stepper = Stepper(model, optimizer, micro_batch=4, offload=chosen)
        torch.manual_seed(5)
        losses = [stepper.step(make_batch(TASK, seed=seed)) for seed in range(3)]
        ends.append((losses, flat_weights(model)))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_a_layers_input_takes_nothing_of_the_device_while_it_waits() -> None:
    peaks = {}
    for waits in (False, True):
        model = make_model("bert", TASK, num_hidden_layers=12, hidden_size=64)
        checkpointing.apply(model, "full")
        if waits:
            layer_inputs.apply(model)
        with EmulatedGPU("1GiB") as gpu:
            loss = model(**make_batch(TASK, size=64)).loss
            peaks[waits] = gpu.allocated_bytes
            loss.backward()
    one_bytes = 64 * 16 * 64 * 4
    assert peaks[False] - peaks[True] == 12 * one_bytes


@pytest.mark.parametrize("offload", ["optimizer", "weights"])
def test_nothing_is_held_when_the_model_goes(offload: Any) -> None:
    """Hooks of parameters are out of the garbage collector's sight."""
    model = make_model("bert", TASK)
    checkpointing.apply(model, "full")
    if offload == "weights":
        offloading.apply(model, 0, "cpu", trains=True)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), micro_batch=6, offload=offload)
    stepper.step(make_batch(TASK))
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model, stepper
    gc.collect()
    assert not [p for p in parameters if p() is not None]
