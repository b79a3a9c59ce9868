import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import vramfit
from vramfit.errors import (
    BudgetExceeded,
    MissingExtra,
    NoPlanFits,
    UnknownModel,
    VramfitError,
    WorkloadError,
    nearest_names,
)


def test_every_error_is_a_vramfit_error_with_a_hint_and_an_exit_code() -> None:
    classes = [getattr(vramfit, name) for name in vramfit.__all__ if name[0].isupper()]
    errors = [c for c in classes if issubclass(c, Exception)]
    assert len(errors) >= 9
    for error in errors:
        assert issubclass(error, VramfitError)
        assert error.exit_code in (1, 2, 3)


def test_a_workload_error_carries_every_problem() -> None:
    error = WorkloadError(["batch 0", "seq -1"])
    assert error.problems == ("batch 0", "seq -1")
    assert str(error) == "batch 0; seq -1"


def test_a_missing_extra_says_the_pip_command() -> None:
    error = MissingExtra("vramfit web", extra="web", package="fastapi")
    assert error.hint == 'pip install "vramfit[web]"'
    assert isinstance(error, ImportError)


def test_a_traceback_ends_with_the_hint() -> None:
    error = NoPlanFits("71.00 MiB too little", shortfall_bytes=71, hint="allow freezing: allow=['freeze']")
    shown = traceback.format_exception(error)
    assert shown[-2:] == [
        "vramfit.errors.NoPlanFits: 71.00 MiB too little\n",
        "→ allow freezing: allow=['freeze']\n",
    ]
    assert str(error) == "71.00 MiB too little"


def test_a_hint_that_is_changed_is_shown_as_it_is_now_and_beside_other_notes() -> None:
    error = VramfitError("it failed", hint="do this")
    error.add_note("seen on a Monday")
    error.hint = "do that"
    assert error.__notes__ == ["seen on a Monday", "→ do that"]
    error.hint = None
    assert error.__notes__ == ["seen on a Monday"]
    assert "→" not in "".join(traceback.format_exception(VramfitError("without a hint")))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_that_is_copied_or_sent_keeps_its_hint_once(again: Callable[[Any], Any]) -> None:
    for error in (
        WorkloadError(["batch 0", "seq -1"], hint="mend both"),
        UnknownModel("no model x", nearest=["y"], hint="did you mean y?"),
        NoPlanFits("too little", shortfall_bytes=3, hint="allow more"),
        BudgetExceeded("too much", predicted_bytes=1, observed_bytes=2, phase="load", hint="allow more"),
        MissingExtra("vramfit web", extra="web", package="fastapi"),
    ):
        same = again(error)
        assert {**vars(same)} == {**vars(error)}
        assert (type(same), str(same), same.hint, same.__notes__) == (
            type(error),
            str(error),
            error.hint,
            [f"→ {error.hint}"],
        )
        same.hint = "another"
        assert error.__notes__ == [f"→ {error.hint}"]


def test_the_tree_in_the_docstring_names_every_class() -> None:
    from vramfit import errors

    for name in dir(errors):
        value = getattr(errors, name)
        if isinstance(value, type) and issubclass(value, VramfitError):
            assert name in (errors.__doc__ or ""), name


def test_nearest_names_prefer_shared_parts() -> None:
    known = ["rtx-4090", "rtx-4080", "rtx-3090", "t4", "a100-40gb"]
    assert nearest_names("RTX 4090 Ti", known)[0] == "rtx-4090"
    assert nearest_names("4090", known)[0] == "rtx-4090"
    assert len(nearest_names("xyz", known)) == 3
