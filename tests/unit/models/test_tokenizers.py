"""Tokenizers from folders: without the lengths that some files fix, and not without words."""

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.errors import CheckpointError
from vramfit.models.hub import NotOnHubError
from vramfit.models.tokenizers import load_tokenizer


def test_a_fixed_length_in_the_file_is_taken_off(tmp_path: Path, tokenizer_folder: Path) -> None:
    made = load_tokenizer(tokenizer_folder)
    made.backend_tokenizer.enable_padding(length=128)
    made.backend_tokenizer.enable_truncation(max_length=4)
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["padding"] is not None
    again = load_tokenizer(str(tmp_path))
    assert again.backend_tokenizer.padding is None
    assert again.backend_tokenizer.truncation is None
    assert len(again("a b c d e f")["input_ids"]) == 8


@pytest.mark.parametrize("files", [{}, {"config.json": {"model_type": "bert"}}])
def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="no tokenizer at"):
        load_tokenizer(tmp_path)


def test_without_a_network_a_name_is_answered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(hub_id: str) -> bytes:
        raise NotOnHubError("the hub could not be reached: ConnectError")

    monkeypatch.setattr("vramfit.models.tokenizers.fetch_config", unreachable)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="the hub could not be reached") as caught:
        load_tokenizer("bert-base-uncased")
    assert "where the hub can be reached" in (caught.value.hint or "")


def test_a_vocabulary_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    made, outside = tmp_path / "model", tmp_path / "outside.json"
    made.mkdir()
    outside.write_text("{}")
    (made / "tokenizer.json").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link that leaves the folder"):
        load_tokenizer(made)
