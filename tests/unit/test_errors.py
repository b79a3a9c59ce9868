import vramfit
from vramfit.errors import MissingExtra, VramfitError, WorkloadError, nearest_names


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
