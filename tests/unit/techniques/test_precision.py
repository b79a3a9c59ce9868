import pytest
import torch

from vramfit.settings import SETTINGS
from vramfit.workload import CHOICES, Workload


def apply(model: torch.nn.Module, name: str) -> Workload:
    w = Workload(model="m", mode="infer", precision=name)
    SETTINGS["precision"].apply(model, w)
    return w


def model() -> torch.nn.Module:
    layer = torch.nn.Linear(4, 4)
    layer.register_buffer("positions", torch.arange(4))
    return layer


@pytest.mark.parametrize(
    ("name", "weights", "lower", "scaled"),
    [
        ("fp32", torch.float32, None, False),
        ("tf32", torch.float32, None, False),
        ("amp-fp16", torch.float32, torch.float16, True),
        ("amp-bf16", torch.float32, torch.bfloat16, False),
        ("fp16", torch.float16, None, False),
        ("bf16", torch.bfloat16, None, False),
    ],
)
def test_a_precision_is_a_type_of_weights_an_autocast_and_a_scaler(
    name: str, weights: torch.dtype, lower: torch.dtype | None, scaled: bool
) -> None:
    changed = model()
    w = apply(changed, name)
    assert {p.dtype for p in changed.parameters()} == {weights}
    assert (w.weight_dtype, w.autocast_dtype, w.scales_loss) == (weights, lower, scaled)


@pytest.mark.parametrize("name", CHOICES["precision"])
def test_whole_numbers_stay_whole(name: str) -> None:
    changed = model()
    apply(changed, name)
    assert changed.positions.dtype is torch.int64


def test_a_module_in_its_own_type_is_left_so_when_fp32_is_asked_for() -> None:
    half = model().to(torch.bfloat16)
    apply(half, "amp-bf16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
