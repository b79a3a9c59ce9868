"""The lock of an environment: a line for each way to install a package, and what is never overwritten."""

import json
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from vramfit.doctor.environment import HEADER, write_lock
from vramfit.errors import VramfitError


class Installed(Distribution):
    """A distribution with the metadata that a test gives it."""

    def __init__(self, name: str, version: str, origin: dict[str, Any] | None = None) -> None:
        self._texts = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
        if origin is not None:
            self._texts["direct_url.json"] = json.dumps(origin)

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


PACKAGES = [
    Installed("torch", "2.13.0+cpu"),
    Installed("rich", "15.0.0"),
    Installed("Rich", "1.0"),
    Installed("thing", "1.0", {"url": "https://example.org/thing", "vcs_info": {"vcs": "git", "commit_id": "abc"}}),
    Installed("mine", "0.1", {"url": "file:///home/me/mine", "dir_info": {}}),
    Installed("wheel", "0.2", {"url": "file:///cache/wheel.whl", "archive_info": {}}),
    Installed("zip", "0.3", {"url": "https://example.org/zip.whl", "archive_info": {}}),
]


def test_every_line_is_a_requirement_or_a_comment(tmp_path: Path) -> None:
    assert write_lock(tmp_path / "lock.txt", PACKAGES) == 6
    lines = (tmp_path / "lock.txt").read_text().splitlines()
    assert lines[0].startswith(HEADER)
    assert "# mine==0.1: installed here from a local folder" in lines
    requirements = [Requirement(line.split("  #")[0]) for line in lines if not line.startswith("#")]
    assert [str(r) for r in requirements] == [
        "rich==15.0.0",
        "thing @ git+https://example.org/thing@abc",
        "torch==2.13.0",
        "wheel==0.2",
        "zip @ https://example.org/zip.whl",
    ]


def test_a_local_build_keeps_its_label_as_a_remark(tmp_path: Path) -> None:
    write_lock(tmp_path / "lock.txt", PACKAGES)
    assert "torch==2.13.0  # here: 2.13.0+cpu" in (tmp_path / "lock.txt").read_text()


def test_the_conda_form_names_python_and_puts_the_rest_through_pip(tmp_path: Path) -> None:
    write_lock(tmp_path / "lab.yml", PACKAGES)
    text = (tmp_path / "lab.yml").read_text()
    assert "name: lab\n" in text
    assert "  - python=3." in text
    assert "      - rich==15.0.0\n" in text
    assert "      # mine==0.1" in text


def test_this_environment_is_locked_with_its_real_versions(tmp_path: Path) -> None:
    path = tmp_path / "requirements.lock.txt"
    num_packages = write_lock(path)
    text = path.read_text()
    assert len(list(distributions())) >= num_packages > 20
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
