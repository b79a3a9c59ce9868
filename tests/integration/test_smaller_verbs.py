"""`vramfit trim`, `export` and `prune` as a user calls them: what they print, and what they refuse in one line."""

import json
from pathlib import Path

import pytest

from tests.integration.command import vramfit
from tests.integration.test_bad_input import assert_one_line
from tests.unit.runtime.training.small_runs import write_classes, write_model, write_texts
from tests.unit.serve.small_servers import write_head
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


def test_prune_names_commands_that_can_be_run_on_its_data(tmp_path: Path) -> None:
    write_head(tmp_path / "model", "sequence-classification")
    write_classes(tmp_path / "labelled.csv", num_rows=12)
    write_texts(tmp_path / "texts.txt")
    write_model(tmp_path / "encoder")

    def said(model: str, *data: str) -> list[str]:
        files = [part for file in data for part in ("--data", str(tmp_path / file))]
        asked = ("prune", str(tmp_path / model), *files, "--neurons", "16", "--text-column", "text")
        done = vramfit(*asked, "-o", str(tmp_path / f"{model}{len(data)}"), COLUMNS="900")
        assert done.code == 0, done.err
        return done.out.splitlines()

    texts, labelled = str(tmp_path / "texts.txt"), str(tmp_path / "labelled.csv")
    *_, missing, train, distill = said("model", "texts.txt")
    assert missing == f"{texts} has no labels to recover it with: give rows with labels as DATA."
    assert "vramfit train DATA --task sequence-classification" in train
    assert f"vramfit distill {tmp_path / 'model'} DATA --student" in distill
    *_, shape, train, _ = said("model", "texts.txt", "labelled.csv")
    assert "of their squares before recovery" in shape
    assert f"vramfit train {labelled} " in train
    assert train.endswith(f" --text-column text --output {tmp_path / 'model2-recovered'}")
    *_, shape, alone = said("encoder", "texts.txt")
    assert "of their squares before recovery" in shape
    assert (
        "It has no head to recover: fine-tune it for a task, on data for that: vramfit train DATA --task NAME" in alone
    )


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
