from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.report.samples import drawn

from vramfit.records.estimate import CATEGORIES, TimelinePoint
from vramfit.report.charts import Meter, StackedBar, Timeline, label_parts, resample


def points(*heights: int, part: str = "forward") -> list[TimelinePoint]:
    return [TimelinePoint(part=part, allocated_bytes=h) for h in heights]


def test_half_of_the_limit_fills_half_of_the_bar() -> None:
    assert drawn(Meter(value=50, limit=100, scale=100), 10).strip() == "▆▆▆▆▆▁▁▁▁▁"


def test_a_figure_beyond_the_limit_shows_where_the_limit_is() -> None:
    assert drawn(Meter(value=100, limit=50, scale=100), 10).strip() == "▆▆▆▆▆┃▆▆▆▆"


def test_one_byte_too_many_can_be_seen() -> None:
    assert "┃▆" in drawn(Meter(value=10**9 + 1, limit=10**9, scale=10**9 + 1), 20)


def test_something_is_never_drawn_as_nothing() -> None:
    assert drawn(Meter(value=1, limit=10**9, scale=10**9), 20).startswith("▆▁")


@given(st.integers(0, 10**12), st.integers(1, 10**12), st.integers(1, 130))
def test_a_meter_is_as_wide_as_its_place(value: int, limit: int, width: int) -> None:
    line = drawn(Meter(value=value, limit=limit, scale=max(value, limit)), width)
    assert len(line.rstrip("\n")) <= max(width, 2)


@given(st.lists(st.integers(0, 10**11), min_size=7, max_size=7).filter(any), st.integers(1, 130))
def test_a_stacked_bar_fills_its_line_exactly(sizes: list[int], width: int) -> None:
    assert len(drawn(StackedBar(dict(zip(CATEGORIES, sizes, strict=True))), width).rstrip("\n")) == width


def test_without_colours_every_category_has_a_character_of_its_own() -> None:
    line = drawn(StackedBar(dict.fromkeys(CATEGORIES, 10)), 70)
    assert len(set(line.strip())) == len(CATEGORIES)


def test_with_colours_every_category_has_a_colour_of_its_own() -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(
            record=True, width=70, file=nowhere, force_terminal=True, color_system="standard", no_color=False
        )
        console.print(StackedBar(dict.fromkeys(CATEGORIES, 10)))
        styled = console.export_text(styles=True)
    assert styled.count("█" * 10) == len(CATEGORIES)
    assert len({line.split("m")[0] for line in styled.split("\x1b[") if "█" in line}) == len(CATEGORIES)


def test_a_timeline_rises_to_its_peak_and_names_the_parts() -> None:
    steps = [*points(*range(40)), *points(*range(40, 0, -1), part="backward"), *points(*[5] * 20, part="optimizer")]
    lines = drawn(Timeline(points=steps), 100).splitlines()
    assert 39 <= lines[0].index("█") <= 41
    assert lines[-1].index("forward") < lines[-1].index("backward") < lines[-1].index("optimizer")


def test_no_peak_is_lost_when_there_are_more_points_than_columns() -> None:
    assert max(p.allocated_bytes for p in resample(points(*[1] * 500, 99, *[1] * 499), 60)) == 99


@given(st.integers(1, 300), st.integers(1, 130))
def test_a_timeline_has_one_column_for_each_character(num_points: int, width: int) -> None:
    assert len(resample(points(*range(num_points)), width)) == width


def test_many_short_parts_are_labelled_as_far_as_there_is_room() -> None:
    parts = (["forward"] * 3 + ["backward"] * 5) * 4 + ["optimizer"] * 20
    label = label_parts(parts).plain
    assert len(label) == len(parts)
    assert "bwd" in label
    assert "optimizer" in label
