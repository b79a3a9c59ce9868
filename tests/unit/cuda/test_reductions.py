"""Sums over several blocks: buffers and semaphores as recorded on an H200, and how they go with the GPU."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cuda.profiles import A100, H200, T4, left_over, script_of, spec, temporaries

from vramfit.cuda.kernels.reductions import reduction_buffers


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "recorded"),
    [
        (4096, 768, "float32", (25165824, 24)),
        (4096, 3072, "float32", (100663296, 96)),
        (4096, 768, "bfloat16", (25165824, 24)),
        (4096, 3072, "float16", (100663296, 96)),
        (2048, 768, "bfloat16", (12582912, 24)),
        (2048, 3072, "bfloat16", (50331648, 96)),
        (1232, 768, "float32", (7864320, 24)),
        (1232, 3072, "float32", (31457280, 96)),
        (1024, 768, "float32", (6291456, 24)),
        (1024, 3072, "float32", (25165824, 96)),
    ],
)
def test_a_bias_gradient_takes_on_an_h200_what_was_recorded_there(
    rows: int, columns: int, dtype: str, recorded: tuple[int, int]
) -> None:
    assert reduction_buffers(spec(rows, columns, dtype=dtype), (0,), H200) == recorded


def test_a_short_sum_needs_no_second_pass() -> None:
    assert reduction_buffers(spec(16, 768), (0,), H200) == (0, 0)
    assert reduction_buffers(spec(64, 3072), (0,), H200) == (0, 0)


def test_row_sums_with_a_block_each_need_nothing() -> None:
    assert reduction_buffers(spec(4096, 768), (1,), H200) == (0, 0)
    assert reduction_buffers(spec(4096, 768), (-1,), H200) == (0, 0)


def test_a_sum_of_everything_is_the_sum_over_every_dimension() -> None:
    everything = reduction_buffers(spec(512, 30522), None, H200)
    assert (
        everything
        == reduction_buffers(spec(512, 30522), (0, 1), H200)
        == reduction_buffers(spec(512 * 30522), None, H200)
    )
    assert everything[0] > 0


def test_dimensions_that_lie_side_by_side_count_as_one() -> None:
    assert reduction_buffers(spec(16, 256, 768), (0, 1), H200) == reduction_buffers(spec(4096, 768), (0,), H200)


def test_a_dimension_of_one_changes_nothing() -> None:
    assert reduction_buffers(spec(4096, 1, 768), (0, 1), H200) == reduction_buffers(spec(4096, 768), (0,), H200)


def test_nothing_to_reduce_asks_for_nothing() -> None:
    assert reduction_buffers(spec(1, 768), (0,), H200) == (0, 0)


def test_more_multiprocessors_take_more_until_the_rows_run_out() -> None:
    rows = spec(65536, 768)
    sizes = [reduction_buffers(rows, (0,), replace(H200, num_multiprocessors=n))[0] for n in (8, 16, 40, 80, 132, 264)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    few = spec(4096, 768)
    assert reduction_buffers(few, (0,), H200) == reduction_buffers(few, (0,), replace(H200, num_multiprocessors=9999))


def test_a_small_gpu_takes_less_than_a_large_one() -> None:
    rows = spec(65536, 768)
    assert reduction_buffers(rows, (0,), T4)[0] < reduction_buffers(rows, (0,), A100)[0]
    assert reduction_buffers(rows, (0,), A100)[0] < reduction_buffers(rows, (0,), H200)[0]


@given(st.integers(1, 2**22), st.integers(1, 40_000), st.sampled_from(["float32", "bfloat16"]))
def test_buffers_come_with_semaphores_or_not_at_all(rows: int, columns: int, dtype: str) -> None:
    buffer, semaphores = reduction_buffers(spec(rows, columns, dtype=dtype), (0,), H200)
    assert (buffer == 0) == (semaphores == 0)
    assert buffer % (4 * columns) == 0
    assert semaphores % 4 == 0


def test_a_sum_asks_for_its_output_then_the_buffer_then_the_semaphores() -> None:
    steps = script_of("sum", spec(4096, 768), (0,), True, outputs=(spec(1, 768),))
    assert steps == [("out", 0, 0), ("temp", 0, 25165824), ("temp", 1, 24), ("free", 1, 0), ("free", 0, 0)]


def test_a_norm_reads_its_dimensions_after_the_order() -> None:
    column_norms = script_of("linalg_vector_norm", spec(4096, 768), 2, (0,), outputs=(spec(768),))
    assert temporaries(column_norms) == [25165824, 24]
    assert temporaries(script_of("linalg_vector_norm", spec(4096, 768), 2, outputs=(spec(),))) != [25165824, 24]


def test_dimensions_may_be_given_by_name() -> None:
    by_name = script_of("sum", spec(4096, 768), outputs=(spec(768),), dim=(0,))
    assert by_name == script_of("sum", spec(4096, 768), (0,), outputs=(spec(768),))


def test_a_truth_value_takes_a_quarter_of_the_buffer() -> None:
    mask = spec(4096, 768, dtype="bool")
    (buffer, _) = temporaries(script_of("any", mask, (0,), outputs=(spec(768, dtype="bool"),)))
    (as_number, _) = temporaries(script_of("sum", mask, (0,), outputs=(spec(768),)))
    assert as_number == 4 * buffer


@pytest.mark.parametrize("operator", ["sum", "mean", "amax", "prod"])
def test_every_temporary_is_given_back(operator: str) -> None:
    steps = script_of(operator, spec(100_000, 768), (0,), outputs=(spec(768),))
    assert temporaries(steps)
    assert left_over(steps) == set()


def test_norms_of_many_tensors_take_as_many_partial_ones_for_each_as_the_largest_needs() -> None:
    """RoBERTa-base: 202 gradients, the largest of 50,265 × 768."""
    tensors = (*(spec(768) for _ in range(201)), spec(50265, 768))
    script = script_of("_foreach_norm", tensors, outputs=tuple(spec() for _ in tensors))
    assert temporaries(script) == [476_720]
    assert not left_over(script)
