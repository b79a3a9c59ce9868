"""What convolutions are predicted to request against what they requested on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cuda.profiles import most_requested, script_of, spec

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "convolutions_h200.json").read_text())["rows"]


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['shape']} {row['dtype']} {row['tf32']} {row['is_permuted']}"
)
def test_a_convolution_requests_no_more_than_predicted(row: dict[str, Any]) -> None:
    batch, channels, num_out, length, kernel, groups = row["shape"]
    dtype = row["dtype"]
    stride = (channels * length, 1, channels) if row["is_permuted"] else None
    x = spec(batch, channels, length, dtype=dtype, stride=stride)
    weight, bias = spec(num_out, channels // groups, kernel, dtype=dtype), spec(num_out, dtype=dtype)
    y = spec(batch, num_out, length, dtype=dtype)
    forward = script_of("convolution", x, weight, bias, outputs=(y,))
    assert most_requested(forward, (y,)) >= row["forward_bytes"]
    outputs = (spec(batch, channels, length, dtype=dtype), weight, bias)
    backward = script_of("convolution_backward", y, x, weight, outputs=outputs)
    after = x.nbytes if row["is_permuted"] else 0  # the leaf's gradient, made contiguous beside the others
    assert most_requested(backward, outputs) + after >= row["backward_bytes"]


def test_most_of_what_convolutions_in_sixteen_bits_request_is_predicted_to_within_a_block() -> None:
    rows = [row for row in ROWS if row["dtype"] != "float32" and not row["is_permuted"]]
    near = 0
    for row in rows:
        batch, channels, num_out, length, kernel, groups = row["shape"]
        x, y = spec(batch, channels, length, dtype=row["dtype"]), spec(batch, num_out, length, dtype=row["dtype"])
        weight = spec(num_out, channels // groups, kernel, dtype=row["dtype"])
        forward = script_of("convolution", x, weight, None, outputs=(y,))
        near += most_requested(forward, (y,)) - row["forward_bytes"] <= 512
    assert near == len(rows)
