"""What a verb's help says of its exit codes is complete, and the codes are those of the errors."""

import re
from pathlib import Path

import pytest

from vramfit.cli.main import INTERRUPTED, VERBS, find_verb
from vramfit.errors import NoPlanFits, UnknownGPU, UnknownModel, VramfitError, WorkloadError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("verb", VERBS)
def test_a_help_that_lists_exit_codes_lists_that_of_wrong_values(verb: str) -> None:
    told = " ".join((find_verb(verb).__doc__ or "").split())
    listed = re.search(r"Exit codes: (.*)", told)
    if verb in ("train", "evaluate", "predict", "encode", "estimate", "plan", "measure", "load", "serve"):
        assert listed is not None
    if listed is not None:
        assert re.match(r"0\b.*\b1 (for|when)\b.*\b2 for a wrong name or value", listed[1])


def test_wrong_names_and_values_leave_as_the_help_says() -> None:
    assert {kind.exit_code for kind in (WorkloadError, UnknownModel, UnknownGPU)} == {2}
    assert (VramfitError.exit_code, NoPlanFits.exit_code, INTERRUPTED) == (1, 3, 130)


@pytest.mark.parametrize("page", ["README.md", "docs/reference/cli.md"])
def test_the_pages_list_every_code(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    (listed,) = re.findall(r"Exit codes: ([^.]*)\.", text)
    assert re.findall(r"\b\d+\b", listed) == ["0", "1", "2", "3", "4", "130"]
