"""Every model type is planned and trained: a sample here, all of them in the committed result."""

import json
import math
import re
from pathlib import Path

import pytest
from benchmarks import decoder_plans, family_steps
from benchmarks.tiny_families import all_types

from vramfit.models.configuration import PACKED_DECODERS, PACKED_FAMILIES
from vramfit.units import parse_bytes

PAGE = Path(__file__).parents[3] / "docs" / "decoders.md"
FOUND = json.loads(family_steps.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("model_type", ["qwen3", "t5", "fnet"])
def test_a_type_is_planned_trained_and_has_the_whole_batchs_gradient(model_type: str) -> None:
    """A decoder, an encoder-decoder, and an encoder that mixes padding into every token."""
    found = dict(family_steps.run(model_type))
    assert found["plan"]["fits"]
    assert math.isfinite(found["plan"]["loss"])
    assert max(found[name] for name in ("split", "packed", "checkpointed") if name in found) <= family_steps.MOST
    assert ("packed" in found) == (model_type in PACKED_FAMILIES)


def test_the_result_is_of_every_type_and_has_its_own_counts() -> None:
    assert set(FOUND["types"]) == set(all_types())
    assert FOUND["summary"] == family_steps.summary(FOUND["types"])
    assert FOUND["summary"]["planned_trained_and_split"] >= 100


def test_the_page_says_what_was_found() -> None:
    page, counts = PAGE.read_text(encoding="utf-8"), FOUND["summary"]
    rows = re.findall(r"^\| .* \| (\d+) \|$", page, flags=re.MULTILINE)
    names = ("planned_and_trained", "split", "planned_trained_and_split", "packed", "checkpointed")
    assert list(map(int, rows)) == [counts[name] for name in names]
    assert f"{len(PACKED_DECODERS)} types of decoders" in page
    for plan in json.loads(decoder_plans.RESULTS.read_text(encoding="utf-8"))["plans"].values():
        assert f"| {plan['safe_reserved_bytes'] / 2**30:.2f} GiB |" in page


@pytest.mark.parametrize("model_type", PACKED_DECODERS)
def test_what_may_be_packed_was_compared(model_type: str) -> None:
    assert FOUND["types"][model_type]["packed"] <= family_steps.MOST


def test_plans_of_a_large_decoder_keep_their_budgets() -> None:
    found = json.loads(decoder_plans.RESULTS.read_text(encoding="utf-8"))
    assert found["predicted_only"]
    assert set(found["plans"]) == set(decoder_plans.CASES)
    for name, plan in found["plans"].items():
        assert plan["safe_reserved_bytes"] <= parse_bytes(decoder_plans.CASES[name]["memory"], name="memory")
