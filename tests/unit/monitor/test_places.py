"""Files, lines and variables of the user's code."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.monitor.places import is_library, line_that_fills, locals_of, module_name, tensors_in, user_line, variables

HERE = Path(__file__)


def here() -> int:
    return sys._getframe(1).f_lineno


def test_the_line_of_the_user_is_the_innermost_outside_libraries() -> None:
    lines = []
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: lines.append(user_line(sys._getframe(1))))
    layer(torch.ones(1, 2)), lines.append(here())
    found, line = lines
    assert found.endswith(f"{HERE.name}:{line}")


@pytest.mark.parametrize(
    ("file", "is_theirs"),
    [(torch.__file__, True), (sys.modules["json"].__file__, True), ("/x/site-packages/a/b.py", True), ("t.py", False)],
)
def test_libraries_are_told_from_the_users_files(file: str, is_theirs: bool) -> None:
    assert is_library(file) is is_theirs


@pytest.mark.parametrize(
    "source",
    ["kept.append(x)", "kept += [x]", "kept[3] = x", "kept = kept + [x]", "kept.extend([x])"],
)
def test_the_line_that_fills_a_variable_is_found(source: str, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        f"def f(look):\n    kept, x = [0, 0, 0, 0], 1\n    other = kept\n    {source}\n    return look(kept)\n"
    )
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    found = names["f"](lambda kept: line_that_fills(sys._getframe(1), "kept"))
    assert found == f"{file}:4"


def test_looking_at_a_frame_keeps_nothing_of_it_alive() -> None:
    def program() -> bool:
        tensor = torch.ones(4)
        storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
        dict(locals_of(sys._getframe()))
        del tensor
        return bool(storage.expired())

    assert program()


def test_strange_values_among_the_variables_are_passed_by() -> None:
    class Proxy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("working outside of a context")

    strange, plain = Proxy(), torch.ones(1)
    names = dict(variables(sys._getframe()))
    assert list(tensors_in([names["strange"], {"a": plain}])) == [plain]
    assert strange is names["strange"]


def test_modules_are_named_by_their_path() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert module_name(model[0], model) == "0"
    assert module_name(model, model) == "Sequential"
    assert module_name(torch.nn.ReLU(), model) == "ReLU"
