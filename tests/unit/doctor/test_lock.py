from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vramfit.doctor.lock import HEADER, LockedPackage, as_conda, as_requirements, installed, write_lock
from vramfit.errors import VramfitError

PACKAGES = [
    LockedPackage(name="torch", version="2.13.0+cpu"),
    LockedPackage(name="rich", version="15.0.0"),
    LockedPackage(name="thing", version="1.0", direct="git+https://example.org/thing@abc"),
    LockedPackage(name="mine", version="0.1", direct=""),
]


def test_every_line_is_a_requirement_or_a_comment() -> None:
    lines = as_requirements(PACKAGES).splitlines()
    assert lines[0].startswith(HEADER)
    requirements = [Requirement(line.split("  #")[0]) for line in lines if not line.startswith("#")]
    assert [str(r) for r in requirements] == [
        "torch==2.13.0",
        "rich==15.0.0",
        "thing @ git+https://example.org/thing@abc",
    ]


def test_a_local_build_keeps_its_label_as_a_remark() -> None:
    assert "torch==2.13.0  # here: 2.13.0+cpu" in as_requirements(PACKAGES)


def test_the_conda_form_names_python_and_puts_the_rest_through_pip() -> None:
    text = as_conda(PACKAGES, "lab")
    assert "name: lab\n" in text
    assert "  - python=3." in text
    assert "      - rich==15.0.0\n" in text


def test_this_environment_is_locked_with_its_real_versions(tmp_path: Path) -> None:
    path = tmp_path / "requirements.lock.txt"
    num_packages = write_lock(path)
    text = path.read_text()
    assert num_packages == len(installed()) > 20
    assert f"transformers=={version('transformers')}\n" in text
    assert "file:" not in text


def test_a_lock_is_overwritten_and_anything_else_is_not(tmp_path: Path) -> None:
    path = tmp_path / "environment.yml"
    write_lock(path, PACKAGES)
    write_lock(path, PACKAGES[:1])
    assert "rich" not in path.read_text()
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("my life's work")
    with pytest.raises(VramfitError, match="was not written by"):
        write_lock(thesis, PACKAGES)
    assert thesis.read_text() == "my life's work"


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(VramfitError, match="cannot write"):
        write_lock(tmp_path / "no" / "such" / "folder.txt", PACKAGES)
    with pytest.raises(VramfitError, match="is a folder"):
        write_lock(tmp_path, PACKAGES)
