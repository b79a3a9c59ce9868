import pytest
from tests.unit.report.samples import drawn, estimate, max_batch

from vramfit.report.max_batch import name_batches, render_max_batch


def test_the_answer_comes_with_what_is_left_and_what_stops_the_next() -> None:
    text = drawn(render_max_batch(max_batch(14)))
    assert "Largest batch: 14" in text
    assert "to spare" in text
    assert "the backward pass of the steady step runs out" in text


def test_what_leaves_the_margin_of_plans_stands_beside_what_fits() -> None:
    changes = {"margin_batch": 11, "margin_reason": "2.10 GiB stay free: 15% since …"}
    text = " ".join(drawn(render_max_batch(max_batch(14, **changes))).split())
    assert "Largest batch: 14, or 11 with the margin that plans keep" in text
    assert "The margin of plans: 2.10 GiB stay free: 15% since …." in text
    assert "only the default" not in text
    lower = drawn(render_max_batch(max_batch(14, **changes, usual_precision="amp-fp16", usual_batch=20)))
    assert "fp32 is only the default: --precision amp-fp16" in lower
    assert "not even one with the margin" in drawn(render_max_batch(max_batch(1, **{**changes, "margin_batch": 0})))


def test_smaller_batches_that_do_not_fit_are_named() -> None:
    text = " ".join(drawn(render_max_batch(max_batch(14, not_fitting=(9, 11, 12)))).split())
    assert "Not 9 and 11–12, although 14 fits" in text


def test_not_even_one_sample() -> None:
    text = drawn(render_max_batch(max_batch(0, estimate=estimate(batch=1, seq=512, memory="1GiB"))))
    assert "✗ Not even one sample fits: " in text
    assert "Largest batch" not in text


@pytest.mark.parametrize(
    ("batches", "named"),
    [
        ([7], "7"),
        ([7, 8], "7–8"),
        ([1, 3, 5], "1, 3 and 5"),
        ([1230, 1231, 1240], "1,230–1,231 and 1,240"),
        (range(1, 60, 2), "1, 3, 5, 7, 9, 11, 13 and 23 more"),
    ],
)
def test_batches_are_listed_as_people_list_them(batches: list[int], named: str) -> None:
    assert name_batches(batches) == named


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(render_max_batch(max_batch(14, not_fitting=tuple(range(1, 14, 2)))), width).splitlines()
    assert max(map(len, lines)) <= width


def test_a_smaller_batch_of_a_cold_process_is_named() -> None:
    text = " ".join(drawn(render_max_batch(max_batch(229, cold_batch=220))).split())
    assert "220 where the workload's own first matrix product starts cuBLAS" in text
    assert "cuBLAS" not in drawn(render_max_batch(max_batch(229)))
