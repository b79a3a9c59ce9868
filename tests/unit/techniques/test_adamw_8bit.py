"""adamw-8bit: the optimizer is torchao's, compiled or not, and what it keeps and needs is known beforehand."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from vramfit.errors import MissingExtra, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.step.backup import Backup
from vramfit.step.commit import secure_state, take_step
from vramfit.techniques import adamw_8bit, optimizers

torchao_optim = pytest.importorskip("torchao.optim", reason='adamw-8bit: pip install "vramfit[train]"')

SHAPES = [(64, 128), (64,), (30, 7), (48, 256)]
"""Quantized: the first and the last; the others are too small, or no blocks of 256."""


def parameters(device: str = "cpu", seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
    return made


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler; compiling takes long, and is tried once below."""
    monkeypatch.setattr(adamw_8bit, "has_compiler", lambda: False)


COMPILED = """
import torch, torchao.optim
from tests.unit.techniques.test_adamw_8bit import parameters
from vramfit.techniques import optimizers

ours, theirs = parameters(), parameters()
mine, reference = optimizers.make("adamw-8bit", ours, lr=0.01), torchao.optim.AdamW8bit(theirs, lr=0.01)
for _ in range(3):
    mine.step()
    reference.step()
assert isinstance(mine, torchao.optim.AdamW8bit)
for p, q in zip(ours, theirs, strict=True):
    torch.testing.assert_close(p, q)
"""


@pytest.mark.slow
def test_compiled_it_steps_as_torchaos_own() -> None:
    """In a process of its own: compiling changes torch's optimizers for the rest of one."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("uncompiled")
def test_without_a_compiler_the_step_is_the_same_uncompiled() -> None:
    ours, theirs = parameters(), parameters()
    mine = optimizers.make("adamw-8bit", ours, lr=0.01)
    reference = torch.optim.AdamW(theirs, lr=0.01)
    mine.step()
    reference.step()
    for p, q in zip(ours, theirs, strict=True):  # the first step of 8-bit moments is exact
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.usefixtures("uncompiled")
def test_state_is_a_byte_a_weight_a_scale_a_block_and_a_table_of_its_own(device: str) -> None:
    made = parameters(device)
    optimizer = optimizers.make("adamw-8bit", made)
    optimizer.step()
    tables = []
    for parameter in (made[0], made[3]):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][name]
            assert moment.codes.shape == parameter.shape
            assert moment.codes.dtype == torch.uint8
            assert moment.scale.shape == (parameter.numel() // 256,)
            assert moment.qmap.numel() == 256
            tables.append(moment.qmap.untyped_storage()._cdata)
    assert len(set(tables)) == 4
    for parameter in made[1:3]:
        assert type(optimizer.state[parameter]["exp_avg"]) is torch.Tensor
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def test_the_state_is_there_before_the_step() -> None:
    made = parameters()
    optimizer = optimizers.make("adamw-8bit", made)
    secure_state(optimizer)
    assert [set(optimizer.state[p]) for p in made] == [{"step", "exp_avg", "exp_avg_sq"}] * len(made)


@pytest.mark.usefixtures("uncompiled")
def test_a_step_can_be_taken_back() -> None:
    made = parameters()
    optimizer = optimizers.make("adamw-8bit", made, lr=0.1)
    take_step(optimizer)
    weights = [p.detach().clone() for p in made]
    codes = optimizer.state[made[0]]["exp_avg"].codes.clone()
    backup = Backup(optimizer, made)
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert not torch.equal(codes, optimizer.state[made[0]]["exp_avg"].codes)
    backup.restore()
    assert all(torch.equal(p, w) for p, w in zip(made, weights, strict=True))
    assert torch.equal(codes, optimizer.state[made[0]]["exp_avg"].codes)
    assert float(optimizer.state[made[0]]["step"]) == 1.0


@pytest.mark.usefixtures("uncompiled")
def test_a_step_after_one_taken_back_is_as_if_nothing_had_been() -> None:
    ends = []
    for disturbed in (False, True):
        made = parameters()
        optimizer = optimizers.make("adamw-8bit", made, lr=0.1)
        optimizer.step()
        if disturbed:
            backup = Backup(optimizer, made)
            optimizer.step()
            backup.restore()
        optimizer.step()
        ends.append(made)
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


@pytest.mark.usefixtures("uncompiled")
def test_memory_that_runs_out_inside_a_step_changes_nothing() -> None:
    """The commit takes the step back and takes it again; the outcome is that of a quiet step."""
    quiet_run, disturbed = parameters(), parameters()
    quiet_optimizer, optimizer = (optimizers.make("adamw-8bit", p, lr=0.1) for p in (quiet_run, disturbed))
    for _ in range(2):
        quiet_optimizer.step()
    optimizer.step()
    real_step, failures = optimizer.step, [True]

    def failing(*args: Any) -> Any:
        result = real_step(*args)
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return result

    optimizer.step = failing  # type: ignore[method-assign]
    take_step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(quiet_run, disturbed, strict=True))


def test_a_moment_can_be_cloned_and_goes_to_the_host() -> None:
    made = parameters()
    optimizer = optimizers.make("adamw-8bit", made)
    secure_state(optimizer)
    moment: Any = optimizer.state[made[0]]["exp_avg"]
    moment.codes.fill_(7)
    copy = moment.detach().cpu().clone()
    assert type(copy) is type(moment)
    assert torch.equal(copy.codes, moment.codes)
    assert copy.codes.data_ptr() != moment.codes.data_ptr()
    assert moment.clone().dtype == moment.dtype


def test_a_schedule_changes_the_rate() -> None:
    optimizer = optimizers.make("adamw-8bit", parameters(), lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


def test_a_prediction_shows_a_quarter_of_the_state() -> None:
    full, eight = (
        estimate("bert-mini", batch=64, seq=128, gpu="h200", optimizer=name) for name in ("adamw", "adamw-8bit")
    )
    ratio = eight.breakdown["optimizer"] / full.breakdown["optimizer"]
    assert 0.25 < ratio < 0.27


@pytest.mark.parametrize("loop", ["plain", "stepper"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-fp16"])
def test_every_loop_and_precision_is_predicted(loop: str, precision: str) -> None:
    made = estimate("bert-tiny", batch=4, seq=32, optimizer="adamw-8bit", loop=loop, precision=precision, gpu="h200")
    assert made.breakdown["optimizer"] > 0


def test_on_a_gpu_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_8bit, "find_spec", lambda name: None)

    class OnGpu:
        device = torch.device("cuda")

    with pytest.raises(WorkloadError, match="has no Triton"):
        adamw_8bit.make([OnGpu()], 0.1)  # type: ignore[list-item]


def test_without_torchao_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw_8bit._optimizer_class.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MissingExtra, match="adamw-8bit needs the package torchao"):
        optimizers.make("adamw-8bit", parameters())
