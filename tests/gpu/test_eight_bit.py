"""On a real GPU: the kernel of adamw-8bit does what the CPU does, takes no memory, and is quick."""

import time

import pytest
import torch

from vramfit.techniques import optimizers
from vramfit.techniques.adamw_8bit import eight_bit_step, tables

pytestmark = pytest.mark.gpu

SETTINGS = (1e-3, 1 - 1e-5, 1 - 0.9, 1 - 0.999, 1e-8)


@pytest.mark.parametrize("shape", [(1024, 1024), (30522, 768), (9, 768)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_steps_as_the_cpu_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_blocks = shape[0] * shape[1] // 256
    on_host = [
        (0.02 * torch.randn(shape)).to(dtype),
        *(torch.zeros(shape, dtype=torch.uint8), torch.zeros(num_blocks)),
        *(torch.zeros(shape, dtype=torch.uint8), torch.zeros(num_blocks)),
    ]
    codes = tables(torch.device("cpu"))
    for step in range(1, 4):
        on_gpu = [t.cuda() for t in on_host]  # from the same state each time: a tie is not carried on
        grad = (1e-3 * torch.randn(shape) * (torch.rand(shape[0], 1) < 0.5)).to(dtype)
        corrections = (1 - 0.9**step, (1 - 0.999**step) ** 0.5)
        gpu_tables = tables(torch.device("cuda"))
        eight_bit_step(on_host[0], grad, *on_host[1:], codes, *SETTINGS, *corrections, seed=step)
        eight_bit_step(on_gpu[0], grad.cuda(), *on_gpu[1:], gpu_tables, *SETTINGS, *corrections, seed=step)
        weight, average, average_scale, square, square_scale = (t.cpu() for t in on_gpu)
        assert (weight.float() - on_host[0].float()).norm() < 1e-3 * on_host[0].float().norm()
        assert (weight.float() - on_host[0].float()).abs().max() < 1e-3
        torch.testing.assert_close(average_scale, on_host[2], rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(square_scale, on_host[4], rtol=1e-4, atol=1e-12)
        for mine, its, values in ((average, on_host[1], codes[0]), (square, on_host[3], codes[2])):
            assert (mine != its).float().mean() < 1e-3  # ties, one bit of rounding apart
            gap = torch.diff(values, append=values[-1:])
            low, high = torch.minimum(mine, its).long(), torch.maximum(mine, its).long()
            # codes lie close beside zero, where a sum of opposite signs has lost its last bits
            assert (values[high] - values[low] <= gap[low] + 1e-6).all()


def test_a_step_takes_no_memory_and_little_time() -> None:
    """The tensors of BERT-base, roughly: 75 matrices and 124 small ones."""
    shapes = [(30522, 768), *[(768, 768)] * 50, *[(3072, 768)] * 24, *[(768,)] * 124]
    made = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    for p in made:
        p.grad = torch.randn_like(p)
    optimizer = optimizers.make("adamw-8bit", made)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    for _ in range(10):
        optimizer.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / 10
    print(f"a step of adamw-8bit: {1e3 * seconds:.2f} ms")
    assert torch.cuda.max_memory_allocated() == before
    assert seconds < 0.03
