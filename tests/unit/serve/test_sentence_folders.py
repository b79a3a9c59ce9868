"""Folders of sentence-transformers, served: their own pooling and length, padded and packed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.loader.checkpoints import SENTENCES, minilm
from tests.unit.models.sentence_folders import TEXTS, write_folder, write_json
from tests.unit.runtime.training.conftest import one_thread  # noqa: F401
from tests.unit.runtime.training.small_runs import write_model
from tests.unit.serve.small_servers import ask, engine_of

from vramfit.errors import CheckpointError
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.device import RunDevice
from vramfit.runtime.trained import TrainedModel, open_model

MODES = ("cls_token", "max_tokens", "mean_tokens", "weightedmean_tokens", "lasttoken")


def answers(folder: Path, texts: list[str], **settings: Any) -> torch.Tensor:
    engine = engine_of(folder, **settings)
    assert engine.task == "embedding"
    return torch.tensor([row["embedding"] for row in ask(engine, texts)])


def their_vectors(folder: Path, texts: list[str]) -> torch.Tensor:
    theirs = pytest.importorskip("sentence_transformers")
    made: torch.Tensor = theirs.SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
    return made


@pytest.mark.parametrize("attention", [None, "packed"], ids=["padded", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_a_folder_is_served_with_its_own_pooling(
    tmp_path: Path, mode: str, attention: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path, "Dense", "Normalize", **{f"pooling_mode_{mode}": True})
    monkeypatch.setattr(
        TrainedModel, "suited", lambda *_, **settings: settings | {"attention": attention}
    )  # as where the GPU has a kernel for it
    torch.testing.assert_close(answers(folder, TEXTS), their_vectors(folder, TEXTS), atol=1e-6, rtol=0)


@pytest.mark.parametrize("attention", [None, "packed"], ids=["padded", "packed"])
def test_a_published_model_answers_as_in_sentence_transformers(
    attention: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, texts = minilm(), [*SENTENCES, "a very long text that is cut " * 60]
    monkeypatch.setattr(TrainedModel, "suited", lambda *_, **settings: settings | {"attention": attention})
    assert open_model(str(folder), or_vectors=True).max_length == 256
    torch.testing.assert_close(answers(folder, texts), their_vectors(folder, texts), atol=1e-6, rtol=0)


def test_vectors_are_cut_where_the_folder_says_so(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "Normalize", pooling_mode_mean_tokens=True)
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 8})
    engine, expected = engine_of(folder), their_vectors(folder, TEXTS)
    torch.testing.assert_close(answers(folder, TEXTS), expected, atol=1e-6, rtol=0)
    body = json.dumps({"inputs": TEXTS, "normalize": False}).encode()
    assert torch.tensor(json.loads(engine.answer(body, "/embed").body)).shape == expected.shape
    (tmp_path / "rows.txt").write_text("\n".join(TEXTS))
    trained = open_model(str(folder))
    found: dict[int, torch.Tensor] = {}
    samples = trained.read(DataSource(path=str(tmp_path / "rows.txt"), task="embedding", needs_labels=False))
    inference = trained.load(RunDevice("cpu"), samples)
    inference.run(samples, lambda output, _, rows: found.update(zip(rows, output.embedding, strict=True)))
    torch.testing.assert_close(torch.stack([found[n] for n in range(len(TEXTS))]), expected, atol=1e-6, rtol=0)


def test_what_is_asked_for_comes_before_what_the_folder_says(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, pooling_mode_mean_tokens=True)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 9})
    assert not torch.equal(answers(folder, TEXTS), answers(folder, TEXTS, pooling="first"))
    assert open_model(str(folder), or_vectors=True).max_length == 9
    assert open_model(str(folder), or_vectors=True, seq=12).max_length == 12
    features = engine_of(folder, task="features")
    assert features.task == "features"
    assert open_model(str(folder), task="features", or_vectors=True).max_length == 48


def test_a_plain_encoder_still_gives_features(tmp_path: Path) -> None:
    assert engine_of(write_model(tmp_path)).task == "features"


def test_a_folder_that_cannot_be_pooled_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "LSTM")
    with pytest.raises(CheckpointError, match="module LSTM, which vramfit does not have"):
        engine_of(folder)
    (folder / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"modules.json cannot be read as JSON"):
        engine_of(folder)
