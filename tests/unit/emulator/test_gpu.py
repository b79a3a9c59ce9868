"""The emulated GPU: what is counted, when it runs out, and what it says then."""

import gc

import pytest
import torch
import torch.utils.checkpoint

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import VramfitError
from vramfit.step.recovery import is_out_of_memory

MIB = 2**20


def test_storages_are_counted_as_the_caching_allocator_counts_them() -> None:
    with EmulatedGPU(memory="64MiB") as gpu:
        x = torch.zeros(1000)
        assert gpu.allocated_bytes == 4096  # 4,000 bytes in blocks of 512
        y = x.view(10, 100)
        assert gpu.num_allocations == 1  # a view has no storage of its own
        z = y + 1
        assert gpu.allocated_bytes == 2 * 4096
        del x, y
        assert gpu.allocated_bytes == 4096
        del z
    assert gpu.allocated_bytes == 0
    assert gpu.max_allocated_bytes == 2 * 4096
    assert gpu.max_reserved_bytes == 2 * MIB


def test_what_was_there_before_counts_from_its_first_use() -> None:
    weight = torch.ones(MIB)
    with EmulatedGPU(memory="64MiB") as gpu:
        assert gpu.allocated_bytes == 0
        weight.sum()
        assert gpu.allocated_bytes == 4 * MIB


def test_arithmetic_and_autograd_are_real() -> None:
    with EmulatedGPU(memory="64MiB"):
        x = torch.arange(4.0, requires_grad=True)
        (x**2).sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 2.0, 4.0, 6.0]))  # type: ignore[arg-type]


def test_beyond_its_memory_torchs_own_error_is_raised_with_cudas_words() -> None:
    with EmulatedGPU(memory="32MiB") as gpu:
        kept = torch.zeros(5 * MIB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(5 * MIB)
        assert kept.numel()
    assert is_out_of_memory(caught.value)
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 32.00 MiB")
    assert "20.00 MiB is allocated by PyTorch" in text
    assert gpu.num_failures == 1


def test_a_failed_tensor_takes_nothing() -> None:
    with EmulatedGPU(memory="32MiB") as gpu:
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(16 * MIB)
        gc.collect()
        assert gpu.allocated_bytes == 0
        torch.zeros(4 * MIB)


def test_a_failure_can_be_asked_for() -> None:
    with EmulatedGPU(memory="1GiB", fail_at=[2]) as gpu:
        a = torch.zeros(4)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(4)
        b = torch.zeros(4)
        assert a.numel() + b.numel() == 8
    assert (gpu.num_allocations, gpu.num_failures) == (3, 1)


def test_another_process_takes_and_gives_back() -> None:
    with EmulatedGPU(memory="64MiB") as gpu:
        gpu.take("40MiB")
        assert gpu.capacity_bytes == 24 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(8 * MIB)
        gpu.release()
        assert gpu.capacity_bytes == 64 * MIB
        x = torch.zeros(8 * MIB)
        assert gpu.allocated_bytes == x.nbytes


def test_cached_memory_is_freed_before_it_gives_up() -> None:
    with EmulatedGPU(memory="64MiB") as gpu:
        for _ in range(2):
            torch.zeros(11 * MIB)  # 44 MiB: cached when it is gone
            torch.zeros(12 * MIB)  # 48 MiB: only after the cache was given up
        assert gpu.num_retries >= 1
        assert gpu.num_failures == 0


def test_the_parts_of_a_quantized_tensor_count_not_what_it_looks_like() -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    from vramfit.techniques.quantization import inner_tensors, quantize_weight

    weight = quantize_weight(torch.randn(512, 1024), "int8")
    parts = sum(-(-part.nbytes // 512) * 512 for _, part in inner_tensors(weight))
    with EmulatedGPU(memory="64MiB") as gpu:
        y = torch.nn.functional.linear(torch.zeros(1, 1024), weight)
        del y
        gc.collect()
        assert gpu.allocated_bytes == pytest.approx(parts, rel=0.05)


@pytest.mark.parametrize("wrong", [{"memory": "many"}, {"memory": -1}, {"memory": "1GiB", "allocator": "best"}])
def test_wrong_arguments_are_said_plainly(wrong: dict[str, object]) -> None:
    with pytest.raises(VramfitError):
        EmulatedGPU(**wrong)  # type: ignore[arg-type]


def attention_inputs() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 64, 16, generator=draw, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_the_cpus_own_and_writes_no_scores(masked: bool) -> None:
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool).tril() if masked else None
    expected, inputs = attention_inputs(), attention_inputs()
    plain = torch.nn.functional.scaled_dot_product_attention(*expected, mask)
    plain.sum().backward()
    with EmulatedGPU(memory="64MiB") as gpu:
        made = torch.nn.functional.scaled_dot_product_attention(*inputs, mask)
        # three inputs, which were there, the output and a number a row; the mask, and as numbers to add
        kept = 4 * 2 * 3 * 64 * 16 * 4 + 2 * 3 * 64 * 4 + masked * 2 * 64 * 64 * 5
        assert gpu.allocated_bytes - kept in range(4 * 512)
        made.sum().backward()
    torch.testing.assert_close(made, plain)
    for mine, its in zip(inputs, expected, strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_attention_with_dropout_drops_the_same_in_backward() -> None:
    query, key, value = attention_inputs()
    with EmulatedGPU(memory="64MiB"):
        torch.manual_seed(1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        after = torch.get_rng_state()
        (out * out.detach()).sum().backward()
        assert torch.equal(after, torch.get_rng_state())
    # of a sum that is linear in the values, the gradient gives the sum back
    torch.testing.assert_close((value.grad * value).sum(), (out * out).sum())  # type: ignore[operator]


def test_dropout_keeps_a_byte_for_each_number() -> None:
    x = torch.randn(1024, 1024, requires_grad=True)
    with EmulatedGPU(memory="64MiB") as gpu:
        out = torch.nn.functional.dropout(x, 0.1)
        assert gpu.allocated_bytes == (4 + 4 + 1) * MIB
        out.sum().backward()
    assert torch.equal(x.grad == 0, out == 0)  # type: ignore[arg-type]


def test_layers_computed_again_in_backward_do_as_before() -> None:
    x = torch.randn(4, 2, 32, 8, requires_grad=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.1)

    with EmulatedGPU(memory="64MiB"):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def test_a_backward_counts_its_gradients_and_no_second_forward() -> None:
    query, key, value = attention_inputs()
    with EmulatedGPU(memory="64MiB") as gpu:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        loss = out.sum()
        before = gpu.num_allocations
        loss.backward()
        assert gpu.num_allocations - before == 7  # the gradient of the loss; of the three inputs, given and kept


def test_attention_under_autocast_and_with_a_mask_that_learns() -> None:
    query, key, value = attention_inputs()
    bias = torch.zeros(1, 3, 64, 64, requires_grad=True)
    with EmulatedGPU(memory="64MiB"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value.bfloat16())
        assert mixed.dtype == torch.bfloat16
        mixed.sum().backward()
        torch.nn.functional.scaled_dot_product_attention(query, key, value, bias).sum().backward()
    assert bias.grad is not None


def test_backward_takes_what_torchs_own_takes() -> None:
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with EmulatedGPU(memory="64MiB"):
        with pytest.raises(RuntimeError, match="scalar outputs"):
            (x * y).backward()
        (x * y).sum().backward(inputs=x)
    assert (x.grad is None, y.grad is None) == (False, True)
