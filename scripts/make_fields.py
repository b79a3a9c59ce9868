"""Write `src/vramfit/settings/fields.pyi`: the fields and properties of `Workload` for type checkers.

They are made of the settings when vramfit is imported, which no type checker sees; a test compares the file.
"""

import inspect
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from vramfit.settings import SETTINGS
from vramfit.settings.setting import Setting
from vramfit.settings.values import Bytes

PATH = Path(__file__).parents[1] / "src" / "vramfit" / "settings" / "fields.pyi"
HEAD = '''"""What settings give to `Workload`, for type checkers; made by `python scripts/make_fields.py`."""

from dataclasses import Field
from typing import Any, ClassVar

import torch

class Fields:
    """A field for each setting, and what is asked of them."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
'''


def text() -> str:
    """What the file should hold."""
    settings = list(SETTINGS.values())
    fields = [f"    {s.keyword}: {_kept(s)}\n" for s in settings]
    given = [f"        {s.keyword}: {_given(s)}{'' if s.keyword == 'model' else ' = ...'},\n" for s in settings]
    asked = [
        f"    @property\n    def {question.__name__}(self) -> {_name(question.__annotations__['return'])}:\n"
        f'        """{inspect.getdoc(question)}"""\n\n'
        for s in settings
        for question in s.asked
    ]
    made = "".join(
        [HEAD, *fields, "\n    def __init__(\n        self,\n        *,\n", *given, "    ) -> None: ...\n", *asked]
    )
    return made.rstrip() + "\n"


def _kept(setting: Setting) -> str:
    """The type of a field; of what a workload works out, the type it then has."""
    return _name(setting.value.kind if setting.is_worked_out else setting.value.annotation)


def _given(setting: Setting) -> str:
    return _name(setting.value.annotation | str if isinstance(setting.value, Bytes) else setting.value.annotation)


def _name(kind: Any) -> str:
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        parts = dict.fromkeys(_name(part) for part in get_args(kind))
        return " | ".join(sorted(parts, key=lambda part: part == "None"))
    if get_origin(kind) is Literal:
        return "str"  # a workload checks names when it is made
    if kind is NoneType:
        return "None"
    return str(kind) if get_args(kind) or isinstance(kind, str) else kind.__name__


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
