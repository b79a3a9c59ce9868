"""`vramfit trim`, `export` and `prune` as a user calls them: what they print, and what they refuse in one line."""

import json
from pathlib import Path

import pytest

from tests.integration.command import vramfit
from tests.integration.test_bad_input import assert_one_line
from tests.unit.smaller.tokenizers_made import write_corpus, write_multilingual


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smaller")
    write_corpus(made / "english.txt")
    return write_multilingual(made / "model", "wordpiece").parent


def test_trim_prints_sizes_before_and_after(folder: Path, tmp_path: Path) -> None:
    arguments = ("trim", str(folder / "model"), "--data", str(folder / "english.txt"))
    done = vramfit(*arguments, "-o", str(tmp_path / "trimmed"))
    assert (done.code, "5 rows have the same tokens as before" in done.out) == (0, True), done.err
    assert [line.split()[0] for line in done.out.splitlines()[1:3]] == ["before", "after"]
    done = vramfit(*arguments, "-o", str(tmp_path / "again"), "--json")
    report = json.loads(done.out)
    assert report["after"]["vocabulary"] < report["before"]["vocabulary"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("trim", "MODEL", "-o", "OUT"), 2, "give rows: --data FILE"),
        (("trim", "MODEL", "--data", "DATA", "-o", "MODEL"), 1, "is there already"),
        (("trim", "MODEL", "--data", "nowhere.csv", "-o", "OUT"), 1, "cannot read nowhere.csv"),
        (("trim", "no such model", "--data", "DATA", "-o", "OUT"), 2, "no such folder"),
        (("export", "MODEL", "-o", "OUT"), 2, "give rows: --data FILE"),
        (("export", "MODEL", "--data", "DATA", "--int8", "half", "-o", "OUT"), 2, "is not one of dynamic, static"),
        (("export", "MODEL", "--data", "DATA", "-o", "MODEL"), 1, "is there already"),
        (("export", "FOLDER", "--data", "DATA", "-o", "OUT"), 1, "has no config.json"),
        (("prune", "MODEL", "--data", "DATA", "--keep", "0", "-o", "OUT"), 2, "not a share between 0 and 1"),
        (("prune", "MODEL", "--data", "DATA", "--keep", "2", "-o", "OUT"), 2, "not a share between 0 and 1"),
        (("prune", "MODEL", "--data", "DATA", "--size", "many", "-o", "OUT"), 2, "many"),
        (("prune", "MODEL", "--data", "DATA", "-o", "OUT"), 2, "nothing says how small"),
        (("prune", "MODEL", "--keep", "0.5", "-o", "OUT"), 2, "give rows: --data FILE"),
        (("prune", "FOLDER", "--data", "DATA", "--keep", "0.5", "-o", "OUT"), 1, "has no config.json"),
        (("trim", "FOLDER", "--data", "DATA", "-o", "OUT"), 1, "has no config.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], code: int, said: str, folder: Path, tmp_path: Path) -> None:
    places = {"MODEL": folder / "model", "DATA": folder / "english.txt", "FOLDER": folder, "OUT": tmp_path / "new"}
    assert_one_line(vramfit(*(str(places.get(a, a)) for a in arguments)), code, said)
    assert list(tmp_path.iterdir()) == []
