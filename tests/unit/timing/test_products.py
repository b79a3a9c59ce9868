"""Matrix products over multiprocessors."""

import pytest

from vramfit.timing.speed import product_share


def test_whole_waves_of_whole_tiles_lose_nothing() -> None:
    assert product_share((1, 128 * 12, 128 * 11, 64), 132) == 1.0


def test_one_tile_more_than_a_wave_takes_a_second_wave() -> None:
    assert product_share((1, 128 * 133, 128, 64), 132) == pytest.approx(133 / 264)


def test_rows_that_fill_part_of_a_tile_waste_the_rest() -> None:
    assert product_share((1, 8, 128 * 132, 64), 132) == pytest.approx(8 / 128)


def test_a_long_inner_dimension_is_split_where_tiles_are_few() -> None:
    short, long = product_share((1, 768, 768, 128), 132), product_share((1, 768, 768, 16384), 132)
    assert short == pytest.approx(36 / 132)
    assert long > 2 * short


def test_batches_fill_the_device_as_rows_do() -> None:
    assert product_share((132, 128, 128, 64), 132) == 1.0


def test_an_empty_product_has_no_share_to_lose() -> None:
    assert product_share((0, 128, 128, 64), 132) == 1.0
