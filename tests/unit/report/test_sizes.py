import pytest
from tests.unit.report.samples import drawn, estimate, max_batch

from vramfit.report.sizes import lengths_to_compare, name_batches, render_max_batch, render_table

TABLE = [estimate(batch=b, seq=s) for s in (128, 256, 512) for b in (1, 8, 16)]


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()[:1]}


def test_lengths_are_rows_and_batches_columns() -> None:
    found = rows(drawn(render_table(TABLE)))
    assert found["length"] == ["↓", "1", "8", "16"]
    assert found["128"] == ["1.72", "2.20", "2.75"]


def test_what_does_not_fit_is_marked_and_the_mark_explained() -> None:
    text = drawn(render_table(TABLE))
    assert rows(text)["512"] == ["2.28", "6.67", "11.68", "✗"]
    assert "✗ does not fit into the 10.64 GiB" in text


def test_another_figure_can_be_shown() -> None:
    text = drawn(render_table(TABLE, "reserved"))
    assert "Peak reserved, GiB" in text
    assert rows(text)["128"][0] == "1.86"


def test_without_a_capacity_nothing_is_marked() -> None:
    text = drawn(render_table([estimate(batch=b, gpu=None) for b in (1, 512)]))
    assert "✗" not in text


def test_small_figures_are_in_mib() -> None:
    tiny = [estimate(batch=b, peak_allocated_bytes=b * 2**20) for b in (1, 2)]
    assert "Peak allocated, MiB" in drawn(render_table(tiny))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_more_batches_than_fit_in_a_line_go_below(width: int) -> None:
    text = drawn(render_table([estimate(batch=b) for b in range(1, 33)]), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("length ↓") >= 3 if width < 120 else text.count("length ↓") == 3


def test_lengths_are_compared_at_the_largest_batch_that_fits_at_both() -> None:
    pair = lengths_to_compare(TABLE)
    assert pair is not None
    assert [(e.workload.seq, e.workload.batch) for e in pair] == [(256, 8), (512, 8)]


def test_one_length_leaves_nothing_to_compare() -> None:
    assert lengths_to_compare([estimate(batch=1), estimate(batch=2)]) is None


def test_the_table_answers_which_tensors_grew_and_why() -> None:
    text = drawn(render_table(TABLE))
    assert "From 256 to 512 tokens at batch 8: 3.22 GiB → 6.67 GiB, 2.07 times as much" in text
    assert "+864.00 MiB  288.00 MiB  →   1.12 GiB  ×4.00  attention probabilities" in text
    assert "×4.00" in next(line for line in text.splitlines() if "length²" in line)
    assert "×2.00" in next(line for line in text.splitlines() if "as length:" in line)
    assert "×1.00" in next(line for line in text.splitlines() if "weights and the like" in line)


def test_a_peak_that_moved_is_told() -> None:
    from dataclasses import replace

    short, long = estimate(seq=256), estimate(seq=512)
    moved = replace(short, peak=replace(short.peak, part="optimizer"))
    assert "The peak moved" in drawn(render_table([moved, long]))
    assert "The peak moved" not in drawn(render_table([short, long]))


def test_the_answer_comes_with_what_is_left_and_what_stops_the_next() -> None:
    text = drawn(render_max_batch(max_batch(14)))
    assert "Largest batch: 14" in text
    assert "to spare" in text
    assert "the backward pass of the steady step runs out" in text


def test_what_leaves_the_margin_of_plans_stands_beside_what_fits() -> None:
    changes = {"margin_batch": 11, "margin_reason": "2.10 GiB stay free: 15% since …"}
    text = " ".join(drawn(render_max_batch(max_batch(14, **changes))).split())
    assert "Largest batch: 14, or 11 with the headroom that plans keep" in text
    assert "The headroom of plans: 2.10 GiB stay free: 15% since …." in text
    assert "only the default" not in text
    lower = drawn(render_max_batch(max_batch(14, **changes, usual_precision="amp-fp16", usual_batch=20)))
    assert "fp32 is only the default: --precision amp-fp16" in lower
    assert "not even one with the headroom" in drawn(render_max_batch(max_batch(1, **{**changes, "margin_batch": 0})))


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
