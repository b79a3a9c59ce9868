import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.units import GIB, MAX_BYTES, SizeError, format_bytes, parse_bytes, parse_memory


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("11.17GiB", 11_993_696_174),
        ("16 GB", 16_000_000_000),
        ("800MiB", 838_860_800),
        ("800 mib", 838_860_800),
        ("1.5g", 3 * GIB // 2),
        (" 2TiB ", 2 * 2**40),
        ("1_000_000", 1_000_000),
        ("12,345 B", 12_345),
        (4096, 4096),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "abc", "12 parsecs", "-3GiB", "0", "1e9", "GiB", "1.2.3MB", "9" * 60, "9 EiB", True, 1.5, None],
)
def test_nonsense_is_an_error_that_shows_what_is_accepted(text: object) -> None:
    with pytest.raises(SizeError) as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert "11.17GiB" in (caught.value.hint or "")


def test_the_error_names_the_setting() -> None:
    with pytest.raises(SizeError, match="memory 'lots' is not a size"):
        parse_bytes("lots", name="memory")


@given(st.integers(1, MAX_BYTES))
def test_plain_integers_are_bytes(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(1, 2**50))
def test_what_is_shown_can_be_read_back(num_bytes: int) -> None:
    shown = format_bytes(num_bytes)
    assert parse_bytes(shown) == pytest.approx(num_bytes, rel=0.006)


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_size_error(text: str) -> None:
    try:
        assert 0 < parse_bytes(text) <= MAX_BYTES
    except SizeError as error:
        assert error.hint  # noqa: PT017


@pytest.mark.parametrize("size", ["12", " 800 "])
def test_a_memory_that_was_written_without_its_unit_is_refused(size: str) -> None:
    with pytest.raises(SizeError, match="in which nothing fits") as caught:
        parse_memory(size)
    assert caught.value.hint
    assert f"{size.strip()}GiB" in caught.value.hint


@pytest.mark.parametrize(("size", "num_bytes"), [("1MiB", 2**20), ("10KiB", 10240), (12, 12), ("12000000", 12_000_000)])
def test_a_small_memory_that_is_meant_is_taken(size: str | int, num_bytes: int) -> None:
    """What is computed may leave little, and the answer is then by how much it is too little."""
    assert parse_memory(size) == num_bytes
