"""What a GPU and a torch release decide."""

import pytest
from tests.unit.cuda.profiles import A100, H200, K80, T4, V100, profile

from vramfit.units import MIB


def test_hopper_keeps_32_mib_for_cublas_and_older_gpus_eight() -> None:
    assert H200.cublas_workspace_bytes == 32 * MIB
    assert {g.cublas_workspace_bytes for g in (A100, T4, V100, K80)} == {8_519_680}


def test_a_product_with_a_bias_keeps_one_mebibyte_more() -> None:
    assert H200.cublaslt_workspace_bytes == A100.cublaslt_workspace_bytes == MIB


@pytest.mark.parametrize(
    ("gpu", "torch_version", "verified"),
    [("h200", (2, 11), True), ("h200", (2, 13), False), ("a100", (2, 11), False), ("h100", (2, 11), True)],
)
def test_only_a_pair_that_was_measured_is_verified(gpu: str, torch_version: tuple[int, int], verified: bool) -> None:
    assert profile(gpu, torch_version).verified is verified


def test_bf16_and_flash_begin_with_ampere() -> None:
    assert [(g.has_bf16, g.has_flash_attention) for g in (V100, T4, A100, H200)] == [
        (False, False),
        (False, False),
        (True, True),
        (True, True),
    ]
    assert not K80.has_efficient_attention
