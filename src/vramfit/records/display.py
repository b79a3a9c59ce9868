"""`Displayed`: records that show themselves. How they look is up to `report`, which the package hands down to here."""

from collections.abc import Callable
from typing import Any

_find: Callable[[], Any] | None = None


def use_renderer(find: Callable[[], Any]) -> None:
    """Have records shown by the module that `find` gives: by its `text_of` and `html_of`.

    It is asked for when a record is shown: until then nothing need be imported.
    """
    global _find
    _find = find


class Displayed:
    """A record as a prompt shows it, and a notebook where there is a drawing of it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return object.__repr__(self) if _find is None else str(_find().text_of(self))

    def _repr_html_(self) -> str | None:
        made: str | None = None if _find is None else _find().html_of(self)
        return made
