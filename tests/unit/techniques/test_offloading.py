"""Offloaded layers: the same outputs, never more than two of them on the device, and sizes that add up."""

import pytest
import torch
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

from vramfit.errors import NoPlanFits
from vramfit.loader.load import load
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques import offloading, quantization

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
}


def make(num_layers: int = 5) -> BertModel:
    torch.manual_seed(2)
    return BertModel(BertConfig(num_hidden_layers=num_layers, **SIZES)).eval()


@torch.no_grad()
def run(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12)
    found: torch.Tensor = model(input_ids=ids).last_hidden_state
    return found


@pytest.mark.parametrize("num_layers", [3, 4, 5])
@pytest.mark.parametrize("num_resident", [0, 1, 2])
def test_outputs_are_the_same_pass_after_pass(num_layers: int, num_resident: int) -> None:
    expected = run(make(num_layers))
    model = make(num_layers)
    offloading.apply(model, num_resident, "cpu")
    for _ in range(3):
        assert torch.equal(run(model), expected)


def test_a_quantized_layer_can_wait_too() -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    plain, model = make(), make()
    for m in (plain, model):
        quantization.apply(m, "int8")
    offloading.apply(model, 1, "cpu")
    assert torch.equal(run(model), run(plain))


def test_a_layer_that_is_applied_many_times_comes_once() -> None:
    torch.manual_seed(3)
    config = AlbertConfig(num_hidden_layers=4, embedding_size=32, **SIZES)
    model = AlbertModel(config).eval()
    expected = run(model)
    slots = offloading.apply(model, 0, "cpu")
    assert slots is not None
    assert len(slots.slots) == 1
    assert torch.equal(run(model), expected)


def test_slots_hold_two_layers_whatever_their_number() -> None:
    model = make(6)
    layer_bytes = offloading.device_bytes(list(encoder_layers(model)[0].parameters()))
    slots = offloading.apply(model, 1, "cpu")
    assert slots is not None
    assert [slot.numel() for slot in slots.slots] == [layer_bytes, layer_bytes]
    assert offloading.slots_of(model) == slots.slots


def test_nothing_is_offloaded_when_all_layers_are_resident() -> None:
    model = make()
    assert offloading.apply(model, 5, "cpu") is None
    assert offloading.slots_of(model) == []


def test_the_state_of_an_offloaded_model_is_complete() -> None:
    expected = make().state_dict()
    model = make()
    offloading.apply(model, 0, "cpu")
    run(model)
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_failed_pass_leaves_the_model_usable() -> None:
    expected = run(make())
    model = make()
    offloading.apply(model, 0, "cpu")
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 9999))
    assert torch.equal(run(model), expected)


def test_a_meta_model_gets_meta_slots_and_host_weights() -> None:
    with torch.device("meta"):
        model = BertModel(BertConfig(num_hidden_layers=5, **SIZES)).eval()
    slots = offloading.apply(model, 2, "meta")
    assert slots is not None
    assert {slot.device.type for slot in slots.slots} == {"meta"}
    assert encoder_layers(model)[4].output.dense.weight.device.type == "cpu"  # type: ignore[union-attr]
    assert encoder_layers(model)[0].output.dense.weight.device.type == "meta"  # type: ignore[union-attr]
    with torch.no_grad():
        assert model(input_ids=torch.zeros(2, 8, dtype=torch.long, device="meta"))[0].shape == (2, 8, 64)


def test_as_many_layers_stay_as_the_budget_holds() -> None:
    assert offloading.choose_resident(1000, [100] * 8, 1000) == 8
    assert offloading.choose_resident(1000, [100] * 8, 999) == 5
    assert offloading.choose_resident(1000, [100] * 8, 500) == 1
    assert offloading.choose_resident(1000, [100] * 8, 400) == 0


def test_a_budget_below_two_layers_says_what_is_missing() -> None:
    with pytest.raises(NoPlanFits) as caught:
        offloading.choose_resident(1000, [100] * 8, 399)
    assert caught.value.shortfall_bytes == 1


def test_sizes_of_a_meta_model_are_those_of_a_real_one() -> None:
    with torch.device("meta"):
        meta = BertModel(BertConfig(num_hidden_layers=5, **SIZES))
    budget = offloading.model_bytes(make()) * 3 // 4
    assert offloading.num_resident_layers(meta, budget) == offloading.num_resident_layers(make(), budget)


def test_a_load_inside_a_budget_gives_the_same_outputs() -> None:
    plain, whole = load("bert-mini", task="features", random_weights=True, device="cpu")
    budget = offloading.model_bytes(plain) * 9 // 10
    model, report = load(
        "bert-mini", task="features", random_weights=True, device="cpu", memory=budget, offload="weights"
    )
    assert report.num_resident_layers < report.num_layers == whole.num_resident_layers
    assert torch.equal(run(model), run(plain))
