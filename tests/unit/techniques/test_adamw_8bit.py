"""adamw-8bit: moments in a byte, a step like AdamW's, and nothing that a prediction does not know."""

import copy
from typing import Any

import pytest
import torch

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.step.commit import Backup, needs_temporaries, secure_state, take_step
from vramfit.techniques import adamw_8bit, optimizers
from vramfit.techniques.adamw_8bit import PIECE, by_chance, code_values

SHAPES = [(64, 128), (64,), (30, 7), (48, 256)]
"""Quantized: the first and the last; the others are too small, or no blocks of 256."""


def parameters(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
    return made


def new_gradients(made: list[torch.nn.Parameter], seed: int, rows: float = 1.0) -> None:
    """Others for every parameter; with `rows`, only that share of its rows has one."""
    generator = torch.Generator().manual_seed(seed)
    for p in made:
        kept = torch.rand(p.shape[0], *[1] * (p.dim() - 1), generator=generator) < rows
        p.grad = 0.01 * torch.randn(p.shape, generator=generator) * kept


def test_the_first_step_is_that_of_adamw() -> None:
    ours, theirs = parameters(), parameters()
    optimizers.make("adamw-8bit", ours, lr=0.01).step()
    torch.optim.AdamW(theirs, lr=0.01).step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("rows", [1.0, 0.2], ids=["all rows", "a fifth of the rows, as in an embedding"])
def test_the_way_of_the_weights_stays_near_adamws(rows: float) -> None:
    ours, theirs = parameters(), parameters()
    start = [p.detach().clone() for p in ours]
    mine, reference = optimizers.make("adamw-8bit", ours, lr=1e-3), torch.optim.AdamW(theirs, lr=1e-3)
    for seed in range(50):
        new_gradients(ours, seed, rows)
        new_gradients(theirs, seed, rows)
        mine.step()
        reference.step()
    for p, q, begin in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < 0.05 * (q - begin).norm()
        assert (p - q).abs().max() < 0.01  # 50 steps of 0.001: no weight was thrown off


def test_codes_and_weights_are_torchaos() -> None:
    """Where every row has a gradient; elsewhere torchao lets second moments vanish, see `eight_bit_step.tables`."""
    optim = pytest.importorskip("torchao.optim", reason='pip install "vramfit[train]"')
    step_one = pytest.importorskip("torchao.optim.adam").single_param_adam
    dynamic_map = pytest.importorskip("torchao.optim.quant_utils").create_dynamic_map
    for signed in (True, False):
        assert code_values(signed) == tuple(dynamic_map(signed=signed))
    ours, theirs = parameters(), parameters()
    mine, reference = optimizers.make("adamw-8bit", ours, lr=0.01), optim.AdamW8bit(theirs, lr=0.01)
    for seed in range(4):
        new_gradients(ours, seed)
        new_gradients(theirs, seed)
        mine.step()
        for q in theirs:
            state = reference.state[q]
            if not state:
                buffers = (reference._new_buffer(q, True), reference._new_buffer(q, False))
                state.update(step=torch.tensor(0.0), exp_avg=buffers[0], exp_avg_sq=buffers[1])
            state["step"] += 1
            moments = (state["exp_avg"], state["exp_avg_sq"], None)
            step_one(
                q.detach(), q.grad, state["step"], *moments, torch.tensor(0.01), 0.9, 0.999, 0.01, 1e-8, True, False
            )
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).norm() < 1e-3 * q.norm()
    same = mine.state[ours[0]]["exp_avg"] == reference.state[theirs[0]]["exp_avg"].codes
    assert same.float().mean() > 0.999


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_state_is_a_byte_a_weight_and_a_scale_a_block(device: str) -> None:
    made = parameters(device)
    optimizer = optimizers.make("adamw-8bit", made)
    optimizer.step()
    for parameter in (made[0], made[3]):
        state = optimizer.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            assert (state[name].shape, state[name].dtype) == (parameter.shape, torch.uint8)
            assert state[f"{name}_scale"].shape == (parameter.numel() // 256,)
    for parameter in made[1:3]:
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def test_large_parameters_are_stepped_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = parameters(), parameters()
    optimizers.make("adamw-8bit", whole).step()
    monkeypatch.setattr("vramfit.techniques.adamw_8bit.PIECE", 3 * 256)
    optimizers.make("adamw-8bit", pieces).step()
    assert whole[0].numel() < PIECE
    assert all(torch.equal(p, q) for p, q in zip(whole, pieces, strict=True))


def test_after_its_state_is_made_a_step_takes_no_memory() -> None:
    made = parameters()
    optimizer = optimizers.make("adamw-8bit", made)
    assert not needs_temporaries(optimizer)
    secure_state(optimizer)
    with EmulatedGPU("64MiB") as gpu:
        optimizer.step()  # the emulated GPU meets what is there
        before = gpu.num_allocations
        optimizer.step()
        assert gpu.num_allocations == before


def test_the_state_is_there_before_the_step() -> None:
    made = parameters()
    optimizer = optimizers.make("adamw-8bit", made)
    secure_state(optimizer)
    assert set(optimizer.state[made[0]]) == {"step", *adamw_8bit.PARTS}
    assert set(optimizer.state[made[1]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_step_can_be_taken_back() -> None:
    ends = []
    for disturbed in (False, True):
        made = parameters()
        optimizer = optimizers.make("adamw-8bit", made, lr=0.1)
        take_step(optimizer)
        if disturbed:
            backup = Backup(optimizer, made)
            take_step(optimizer)
            backup.restore()
        take_step(optimizer)
        ends.append([*made, *optimizer.state[made[0]].values()])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_to_the_bit(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    first, second = (optimizers.make("adamw-8bit", p, lr=0.01) for p in (ours, theirs))
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            q.copy_(p)
    first.step()
    second.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert second.state[theirs[0]]["exp_avg"].dtype == torch.uint8


def test_a_schedule_changes_the_rate() -> None:
    made = parameters()
    optimizer = optimizers.make("adamw-8bit", made, lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    optimizer.step()
    schedule.step()
    weights = [p.detach().clone() for p in made]
    optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(made, weights, strict=True))


def test_a_prediction_shows_a_quarter_of_the_state() -> None:
    full, eight = (
        estimate("bert-mini", batch=64, seq=128, gpu="h200", optimizer=name) for name in ("adamw", "adamw-8bit")
    )
    ratio = eight.breakdown["optimizer"] / full.breakdown["optimizer"]
    assert 0.25 < ratio < 0.27


@pytest.mark.parametrize("loop", ["plain", "stepper"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-fp16"])
def test_every_loop_and_precision_is_predicted(loop: Any, precision: Any) -> None:
    made = estimate("bert-tiny", batch=4, seq=32, optimizer="adamw-8bit", loop=loop, precision=precision, gpu="h200")
    assert made.breakdown["optimizer"] > 0


def test_on_a_gpu_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_8bit, "find_spec", lambda name: None)

    class OnGpu:
        device = torch.device("cuda")

    with pytest.raises(WorkloadError, match="has no Triton"):
        adamw_8bit.make([OnGpu()], 0.1)  # type: ignore[list-item]


def test_a_copy_steps_on_its_own() -> None:
    made = parameters()
    optimizer = optimizers.make("adamw-8bit", made, lr=0.01)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    for p, q in zip(made, twin.param_groups[0]["params"], strict=True):
        q.grad = p.grad
    twin.step()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(made, twin.param_groups[0]["params"], strict=True))


def test_a_state_is_loaded_in_its_bytes() -> None:
    made = [torch.nn.Parameter(torch.ones(1024, 1024))]
    made[0].grad = torch.ones(1024, 1024)
    optimizer = optimizers.make("adamw-8bit", made)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    with EmulatedGPU("64MiB") as gpu:
        made[0].add(0)
        gpu.reset_peaks()
        optimizer.load_state_dict(state)
    assert gpu.max_allocated_bytes < 9 * 2**20  # 4 MiB of weights, what is loaded twice over


def test_the_state_of_another_optimizer_is_refused() -> None:
    ours, theirs = parameters(), parameters()
    other = torch.optim.AdamW(theirs)
    other.step()
    with pytest.raises(WorkloadError, match="not that of adamw-8bit"):
        optimizers.make("adamw-8bit", ours).load_state_dict(other.state_dict())


def test_gradients_may_lie_otherwise_than_their_parameters() -> None:
    ours, theirs = (torch.nn.Parameter(torch.arange(12.0).view(3, 4).t()) for _ in range(2))
    for p in (ours, theirs):
        p.grad = torch.arange(12.0).view(4, 3).contiguous()
    optimizers.make("adamw-8bit", [ours], lr=0.1).step()
    torch.optim.AdamW([theirs], lr=0.1, foreach=False).step()
    torch.testing.assert_close(ours, theirs)


def test_a_step_that_must_copy_a_gradient_says_so() -> None:
    made = parameters()
    optimizer = optimizers.make("adamw-8bit", made)
    assert not needs_temporaries(optimizer)
    made[0].grad = torch.ones(128, 64).t()
    assert needs_temporaries(optimizer)
    take_step(optimizer)
    assert float(optimizer.state[made[0]]["step"]) == 1


def test_chance_is_fair_and_takes_the_number_above_or_below() -> None:
    value = torch.full((1 << 16,), 1.0 + 2**-7 * 0.3)  # three tenths of the way from 1 to the next bfloat16
    rounded = by_chance(value, seed=7, begin=0)
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.3, abs=0.01)
    below = by_chance(-value, seed=8, begin=0)
    assert float((below < -1).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert torch.equal(by_chance(rounded, seed=9, begin=3), rounded)  # what bfloat16 has stays
    special = torch.tensor([float("inf"), float("-inf"), 0.0])
    assert torch.equal(by_chance(special, seed=1, begin=0), special)
    assert by_chance(torch.tensor([float("nan")]), seed=1, begin=0).isnan().all()


def test_chance_goes_by_seed_and_place() -> None:
    value = torch.randn(4096)
    whole = by_chance(value, seed=5, begin=0)
    assert torch.equal(by_chance(value[1000:], seed=5, begin=1000), whole[1000:])
    assert not torch.equal(by_chance(value, seed=6, begin=0), whole)


@pytest.mark.parametrize("shape", [(64, 64), (64,)], ids=["matrix", "small"])
def test_updates_too_small_for_bf16_add_up(shape: tuple[int, ...]) -> None:
    """Each is a fiftieth of the last bit of a weight: rounded to the nearest, none would ever count."""
    made = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    optimizer = adamw_8bit.AdamW8bit([made], lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        made.grad = torch.full(shape, 1.0, dtype=torch.bfloat16)
        optimizer.step()
    assert float(made.detach().float().mean()) == pytest.approx(1 - 200 * 1e-4, abs=2.5e-3)
    plain = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    fused = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0, fused=True)
    for _ in range(200):
        plain.grad = torch.full(shape, 1.0, dtype=torch.bfloat16)
        fused.step()
    assert torch.equal(plain, torch.ones_like(plain))


def test_weights_in_bf16_follow_those_in_fp32() -> None:
    """A quadratic bowl: with the nearest rounding the last steps of the way are never taken."""
    torch.manual_seed(0)
    target = torch.randn(64, 64)
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        made = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
        optimizer = adamw_8bit.AdamW8bit([made], lr=2e-3, weight_decay=0.0)
        for _ in range(1500):
            made.grad = (made.detach().float() - target).to(dtype)
            optimizer.step()
        ends[dtype] = float((made.detach().float() - target).square().mean().sqrt())
    assert ends[torch.bfloat16] < ends[torch.float32] + 0.01


def test_small_tensors_in_bf16_have_masters_that_are_predicted_and_saved() -> None:
    made = parameters(dtype=torch.bfloat16)
    optimizer = optimizers.make("adamw-8bit", made)
    secure_state(optimizer)
    assert set(optimizer.state[made[1]]) == {"step", *adamw_8bit.MASTERED}
    assert all(optimizer.state[made[1]][name].dtype == torch.float32 for name in adamw_8bit.MASTERED)
    with EmulatedGPU("64MiB") as gpu:
        optimizer.step()
        before = gpu.num_allocations
        optimizer.step()
        assert gpu.num_allocations == before
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]["master"]
    with pytest.raises(WorkloadError, match="small weights have no masters"):
        optimizer.load_state_dict(saved)
