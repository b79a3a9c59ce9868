"""PYTORCH_ALLOC_CONF is read as PyTorch reads it, or refused by name."""

import pytest

from vramfit.allocator import AllocatorOptionError, AllocatorOptions
from vramfit.errors import VramfitError

MIB = 2**20


def test_nothing_set_gives_the_defaults() -> None:
    assert AllocatorOptions.parse("") == AllocatorOptions()


def test_every_simulated_option_is_read() -> None:
    options = AllocatorOptions.parse(
        "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb:30,"
        "garbage_collection_threshold:0.8,roundup_power2_divisions:4"
    )

    assert options == AllocatorOptions(
        expandable_segments=True,
        max_split_size_bytes=128 * MIB,
        max_non_split_rounding_bytes=30 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(4,) * 16,
    )


def test_divisions_can_be_given_by_interval() -> None:
    text = "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]"

    assert AllocatorOptions.parse(text).roundup_power2_divisions == (8,) * 7 + (2, 4, 2) + (1,) * 6


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("backend:cudaMallocAsync", "backend"),
        ("expandable_segments:True,per_process_memory_fraction:0.5", "per_process_memory_fraction"),
        ("large_segment_size_mb:40", "large_segment_size_mb"),
        ("garbage:1", "garbage"),
    ],
)
def test_an_option_that_is_not_simulated_is_refused_by_name(text: str, option: str) -> None:
    with pytest.raises(AllocatorOptionError, match=option) as caught:
        AllocatorOptions.parse(text)

    assert isinstance(caught.value, VramfitError)
    assert caught.value.option == option
    assert "max_split_size_mb" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:true",
        "max_split_size_mb:19",
        "max_split_size_mb:many",
        "max_non_split_rounding_mb:1",
        "garbage_collection_threshold:1.5",
        "garbage_collection_threshold:0",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:2]",
        "roundup_power2_divisions:[64:8,",
        "expandable_segments",
        "expandable_segments:",
        ":",
    ],
)
def test_a_value_that_pytorch_refuses_is_refused(text: str) -> None:
    with pytest.raises(AllocatorOptionError):
        AllocatorOptions.parse(text)


@pytest.mark.parametrize("text", ["backend:native", "pinned_use_background_threads:True", "max_split_size_mb:64,"])
def test_settings_without_effect_on_device_memory_are_accepted(text: str) -> None:
    assert AllocatorOptions.parse(text).expandable_segments is False
