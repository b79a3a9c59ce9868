"""The public names: `__all__` is what can be imported, sorted, documented, and nothing more."""

import vramfit


def test_every_public_name_can_be_imported_and_has_a_docstring() -> None:
    for name in vramfit.__all__:
        assert name == "__version__" or getattr(vramfit, name).__doc__, name


def test_public_names_are_sorted_and_equal_what_dir_shows() -> None:
    assert vramfit.__all__ == sorted(vramfit.__all__)
    assert dir(vramfit) == sorted(vramfit.__all__)


def test_lazy_names_and_all_agree() -> None:
    assert set(vramfit._HOME) | {"__version__"} == set(vramfit.__all__)


def test_a_wrong_name_is_an_attribute_error() -> None:
    assert not hasattr(vramfit, "estimat")
