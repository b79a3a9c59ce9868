"""Vectors in JSON: not one bit of an fp32 number is lost, and what is no number is not written."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.serve.vectors import write_vector


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_every_fp32_number_is_read_back_as_it_was(numbers: list[float]) -> None:
    import torch

    read = json.loads(write_vector(numbers))
    assert list(read) == ["embedding"]
    expected = torch.tensor(numbers, dtype=torch.float32)
    assert torch.equal(torch.tensor(read["embedding"], dtype=torch.float32), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="no numbers"):
        write_vector([0.5, bad])
