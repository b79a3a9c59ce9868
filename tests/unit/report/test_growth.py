from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.report.samples import estimate

from vramfit.records.estimate import TensorGroup
from vramfit.report.sizes import by_law, compare_lengths, law_of

BEFORE, AFTER = estimate(seq=256), estimate(seq=512)
GROWTH = compare_lengths(BEFORE, AFTER)


def law(operator: str, category: str = "activations") -> str:
    (found,) = {g.law for g in GROWTH if g.group.operator == operator and g.group.category == category}
    return found


def test_attention_probabilities_grow_with_the_square_of_the_length() -> None:
    assert law("_softmax") == "square"
    grown = next(g for g in GROWTH if g.group.operator == "_softmax")
    assert grown.after_bytes == 4 * grown.before_bytes


def test_rows_of_tokens_grow_with_the_length() -> None:
    assert law("gelu") == "length"


def test_weights_gradients_and_optimizer_state_do_not_grow() -> None:
    assert {law("parameter", "weights"), law("mm", "gradients"), law("zeros_like", "optimizer")} == {"constant"}


def test_the_most_grown_comes_first() -> None:
    grown = [g.grown_bytes for g in GROWTH]
    assert grown == sorted(grown, reverse=True)


def test_growth_adds_up_to_the_growth_of_the_peak() -> None:
    difference = AFTER.peak_allocated_bytes - BEFORE.peak_allocated_bytes
    assert sum(g.grown_bytes for g in GROWTH) == difference
    assert sum(after - before for before, after in by_law(GROWTH).values()) == difference


def test_a_group_of_both_kinds_is_split_between_the_square_and_the_length() -> None:
    assert law("bmm") == "mixed"
    assert "mixed" not in by_law(GROWTH)
    before, after = by_law(GROWTH)["square"]
    assert after == pytest.approx(4 * before)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.sampled_from([1.5, 2.0, 4.0]))
def test_laws_are_recognised_in_any_mixture(constant: int, linear: int, ratio: float) -> None:
    assert law_of(constant, constant, ratio) == "constant"
    assert law_of(10**6 + linear, round(ratio * (10**6 + linear)), ratio) == "length"
    assert law_of(10**6 + linear, round(ratio**2 * (10**6 + linear)), ratio) == "square"


def test_layers_are_compared_whatever_their_number() -> None:
    def at(layer: int, size: int) -> tuple[TensorGroup, ...]:
        module = f"bert.encoder.layer.{layer}.output"
        return (TensorGroup(category="temporaries", operator="mm", module=module, num_blocks=1, allocated_bytes=size),)

    (group,) = compare_lengths(estimate(seq=256, groups=at(11, 100)), estimate(seq=512, groups=at(0, 200)))
    assert (group.group.module, group.law) == ("bert.encoder.layer.*.output", "length")


def test_groups_at_one_of_the_peaks_only_are_new_or_gone() -> None:
    short = estimate(seq=256)
    fewer = replace(short, groups=tuple(g for g in short.groups if g.operator != "gelu"))
    assert next(g for g in compare_lengths(fewer, estimate(seq=512)) if g.group.operator == "gelu").law == "new"
    less = replace(estimate(seq=512), groups=fewer.groups)
    assert next(g for g in compare_lengths(short, less) if g.group.operator == "gelu").law == "gone"


def test_the_shorter_length_comes_first() -> None:
    with pytest.raises(ValueError, match="not longer"):
        compare_lengths(estimate(seq=512), estimate(seq=512))
