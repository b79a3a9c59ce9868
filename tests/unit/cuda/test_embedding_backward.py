"""The gradient of an embedding: few indices are added one by one, many are sorted first."""

from dataclasses import replace

import pytest
from tests.unit.cuda.profiles import H200, left_over, script_of, spec, temporaries

from vramfit.cuda.kernels.script import TensorSpec

WORDS, WIDTH = 30522, 768


def steps_of(
    num_indices: int,
    num_weights: int = WORDS,
    *,
    indices: TensorSpec | None = None,
    dtype: str = "float32",
    width: int = WIDTH,
    num_multiprocessors: int = 132,
) -> list[tuple[str, int, int]]:
    return script_of(
        "embedding_dense_backward",
        spec(num_indices, width, dtype=dtype),
        indices or spec(num_indices, dtype="int64"),
        num_weights,
        0,
        False,
        outputs=(spec(num_weights, width, dtype=dtype),),
        gpu=replace(H200, num_multiprocessors=num_multiprocessors),
    )


def test_up_to_3072_indices_ask_for_the_gradient_alone() -> None:
    assert steps_of(3072) == [("out", 0, 0)]
    assert len(steps_of(3073)) > 20


def test_4096_indices_into_two_rows_take_what_was_recorded_on_an_h200() -> None:
    recorded = [32768, 32768, 32768, 83455, 32768, 8, 32768, 1279, 16, 16, 1279, 8, 3288, 3288]
    steps = steps_of(4096, num_weights=2)
    assert temporaries(steps) == recorded
    assert steps[6] == ("out", 0, 0), "the gradient comes after the sort"


def test_expanded_indices_are_copied_first_and_the_copy_goes_last() -> None:
    expanded = spec(16, 256, dtype="int64", stride=(0, 1))
    steps = steps_of(4096, num_weights=512, indices=expanded)
    assert steps[0] == ("temp", 0, 4096 * 8)
    assert steps[-1] == ("free", 0, 0)
    assert temporaries(steps)[1:] == temporaries(steps_of(4096, num_weights=512))


def test_a_few_expanded_indices_are_copied_too() -> None:
    steps = steps_of(512, num_weights=512, indices=spec(4, 128, dtype="int64", stride=(0, 1)))
    assert steps == [("temp", 0, 4096), ("out", 0, 0), ("free", 0, 0)]


def test_a_gradient_with_gaps_is_copied() -> None:
    transposed = spec(4096, WIDTH, stride=(1, 4096))
    steps = script_of(
        "embedding_dense_backward",
        transposed,
        spec(4096, dtype="int64"),
        WORDS,
        outputs=(spec(WORDS, WIDTH),),
    )
    assert temporaries(steps)[0] == 4096 * WIDTH * 4


def test_a_large_vocabulary_stores_partial_sums_in_fp32() -> None:
    num_partials = 4096 // 10 + 4096
    assert temporaries(steps_of(4096))[-1] == num_partials * WIDTH * 4
    assert temporaries(steps_of(4096, dtype="bfloat16"))[-1] == num_partials * WIDTH * 4


def test_half_gradients_of_few_rows_are_summed_in_fp32() -> None:
    in_half = temporaries(steps_of(4096, num_weights=2, dtype="float16"))
    in_full = temporaries(steps_of(4096, num_weights=2))
    assert in_half == [*in_full, 2 * WIDTH * 4]


def test_whether_rows_are_few_depends_on_the_gpu() -> None:
    partial_sums = temporaries(steps_of(65536, num_weights=512, num_multiprocessors=8))[-1]
    fused = temporaries(steps_of(65536, num_weights=512, num_multiprocessors=132))[-1]
    assert partial_sums == fused // 8 * WIDTH * 4


@pytest.mark.parametrize(("num_indices", "num_weights"), [(3073, 2), (4096, WORDS), (100_000, 512)])
def test_every_temporary_is_given_back(num_indices: int, num_weights: int) -> None:
    assert left_over(steps_of(num_indices, num_weights)) == set()
