import os
from pathlib import Path

import pytest

from vramfit.errors import VramfitError
from vramfit.records.saving import replace_file


def test_a_file_is_written_whole_and_readable_by_all(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    replace_file(file, b"one")
    assert file.read_bytes() == b"one"
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_file_that_is_there_is_replaced_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_bytes(b"old and longer")
    replace_file(file, b"new")
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_disk_that_is_full_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "record.json"
    file.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(VramfitError, match=r"record.json: No space left on device \(3 B to write, .* free\)") as caught:
        replace_file(file, b"new")
    assert "make room" in str(caught.value.hint)
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.parametrize("name", ["missing/record.json", "file/record.json"])
def test_a_place_that_is_no_folder_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(VramfitError, match="cannot write") as caught:
        replace_file(tmp_path / name, b"new")
    assert "\n" not in str(caught.value)


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(VramfitError, match="cannot write"):
        replace_file(tmp_path / "taken", b"new")
    assert os.listdir(tmp_path) == ["taken"]


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    with pytest.raises(VramfitError, match="cannot write /dev/full: No space left on device"):
        replace_file(Path("/dev/full"), b"new")
    assert Path("/dev/full").is_char_device()
    (tmp_path / "link.json").symlink_to(tmp_path / "record.json")
    replace_file(tmp_path / "link.json", b"new")
    assert (tmp_path / "record.json").read_bytes() == b"new"
    assert (tmp_path / "link.json").is_symlink()


def test_a_file_is_for_those_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        replace_file(tmp_path / "record.json", b"one")
    finally:
        os.umask(before)
    assert (tmp_path / "record.json").stat().st_mode & 0o777 == 0o600
