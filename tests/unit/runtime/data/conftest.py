"""A tiny WordPiece tokenizer and files of a few rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramfit.models.tokenizers import load_tokenizer
from vramfit.runtime.data.samples import Samples, read_samples
from vramfit.runtime.data.source import DataSource
from vramfit.tasks.parts.reading import Tokenizing

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a b c d e f good bad film very ##ly ##s where is in the berlin anna . , ##x"
LETTERS = [f"{prefix}{chr(n)}" for n in range(ord("a"), ord("z") + 1) for prefix in ("", "##")]

Write = Callable[[str, str | bytes], str]
Read = Callable[..., Samples]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = list(dict.fromkeys([*WORDS.split(), *LETTERS]))
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Any:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file and gives its path."""

    def write_file(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write_file


@pytest.fixture
def read(tokenizer: Any) -> Read:
    """Reads samples of a path; keywords go to the source or to `read_samples`."""

    def read_path(path: str, task: Any = "sequence-classification", **options: Any) -> Samples:
        reading = {key: options.pop(key) for key in ("seed", "mask_probability") if key in options}
        usual = {"tokenizer": tokenizer, "max_length": 16, "label_names": (), "stride": 128}
        how = Tokenizing(**{key: options.pop(key, value) or value for key, value in usual.items()})
        return read_samples(DataSource(path=path, task=task, **options), how, **reading)

    return read_path
