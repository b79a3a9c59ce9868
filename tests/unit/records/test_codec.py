import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from vramfit.errors import VramfitError
from vramfit.records.codec import SCHEMA_VERSION, RecordError, check_place, from_json, replace_file, to_json
from vramfit.records.finding import Finding, worst


@dataclass(frozen=True, kw_only=True)
class Inner:
    num_things: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...] = ()
    table: dict[str, int] | None = None
    mixed: str | int | None = None
    pair: tuple[int, str] = (1, "a")
    ratio: float = 0.0


OUTER = Outer(
    inner=Inner(num_things=3),
    many=(Inner(num_things=1),),
    table={"a": 1},
    mixed="x",
    pair=(2, "b"),
    ratio=0.5,
)


def test_records_survive_json() -> None:
    assert from_json(Outer, to_json(OUTER)) == OUTER
    finding = Finding(check="a.b", severity="warning", what="w", why="y", fix="f")
    assert from_json(Finding, to_json(finding)) == finding


def test_json_says_which_record_and_schema_it_is() -> None:
    data = json.loads(to_json(OUTER))
    assert (data["schema_version"], data["record"]) == (SCHEMA_VERSION, "Outer")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 99}, "schema_version 99"),
        ({"schema_version": None}, "schema_version None"),
        ({"record": "Plan"}, "this is a Plan"),
        ({"inner": {}}, "'num_things' is missing"),
        ({"inner": {"num_things": "3"}}, "Outer.inner.num_things: expected int"),
        ({"inner": {"num_things": True}}, "expected int"),
        ({"many": [1]}, "Outer.many[0]: expected an object"),
        ({"pair": [1]}, "expected 2 items"),
        ({"table": [1]}, "expected dict"),
        ({"surprise": 1}, "unknown field 'surprise'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change: dict[str, object], says: str) -> None:
    text = json.dumps(json.loads(to_json(OUTER)) | change)
    with pytest.raises(RecordError) as caught:
        from_json(Outer, text)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "3", "{", "null", "[" * 100_000])
def test_text_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(RecordError):
        from_json(Outer, text)


def test_a_severity_outside_the_list_is_refused() -> None:
    finding = json.loads(to_json(Finding(check="a", severity="ok", what="w"))) | {"severity": "bad"}
    with pytest.raises(RecordError, match="'bad' is not one of"):
        from_json(Finding, json.dumps(finding))


def test_the_worst_severity_wins() -> None:
    assert worst([]) == "ok"
    assert (
        worst([Finding(check="a", severity=s, what="") for s in ("info", "error", "warning")]) == "error"  # type: ignore[arg-type]
    )


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


def test_a_place_whose_file_is_read_here_is_refused(tmp_path: Path) -> None:
    data, model, new = tmp_path / "d.csv", tmp_path / "model", tmp_path / "new.csv"
    data.write_text("text")
    model.mkdir()
    (model / "config.json").write_text("{}")
    check_place(new, data, model, None, [1])
    check_place(model / "new.html", data, model)
    (model / "predictions.jsonl").write_text("")
    check_place(model / "predictions.jsonl", data, model)  # of an earlier run
    check_place(model / "predictions.jsonl", "CUDA out of memory. " * 50, "nul\0")  # a message, not a file
    (tmp_path / "link").symlink_to(data)
    for place in (data, tmp_path / "link"):
        with pytest.raises(VramfitError, match="is the data: the receipt would overwrite it"):
            check_place(place, str(data), model, what="the receipt")
    with pytest.raises(VramfitError, match=r"is a file of .*model: this would overwrite it"):
        check_place(model / "config.json", data, str(model))
    for place, why in ((model, "it is a folder"), (tmp_path / "no" / "f", "there is no such folder")):
        with pytest.raises(VramfitError, match=why):
            check_place(place)
