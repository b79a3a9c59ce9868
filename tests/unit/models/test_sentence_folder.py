"""Folders of sentence-transformers: read part by part, the same vectors as there, and every fault by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.models.sentence_folders import (
    TEXTS,
    WIDTH,
    list_modules,
    write_dense,
    write_folder,
    write_json,
    write_pooling,
)
from tests.unit.runtime.training.conftest import one_thread  # noqa: F401
from tests.unit.runtime.training.small_runs import write_model

import vramfit
from vramfit.errors import CheckpointError, WorkloadError
from vramfit.models.resolve import resolve
from vramfit.models.sentence_folder import files_of, is_sentence_folder, read_parts
from vramfit.models.tokenizers import load_tokenizer
from vramfit.planner.job import Job
from vramfit.planner.request import Request
from vramfit.tasks.parts.pooling import head_of


def vectors(folder: Path, texts: list[str] = TEXTS, **settings: Any) -> torch.Tensor:
    """Ours, of padded texts."""
    model, _ = vramfit.load(str(folder), task="embedding", device="cpu", **settings)
    batch = load_tokenizer(folder)(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
    with torch.no_grad():
        made: torch.Tensor = model(**batch).embedding
    return made


def their_vectors(folder: Path, texts: list[str] = TEXTS) -> torch.Tensor:
    theirs = pytest.importorskip("sentence_transformers")
    made: torch.Tensor = theirs.SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
    return made


@pytest.mark.parametrize(
    ("pooling", "name"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted-mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean", "cls"]}, "mean+cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls+mean"),
        ({}, "mean"),
    ],
)
@pytest.mark.parametrize("kinds", [("Normalize",), ()])
def test_every_pooling_gives_the_vectors_of_sentence_transformers(
    tmp_path: Path, pooling: dict[str, Any], name: str, kinds: tuple[str, ...]
) -> None:
    folder = write_folder(tmp_path, *kinds, **pooling)
    parts = read_parts(folder)
    assert parts is not None
    assert parts.pooling == name
    torch.testing.assert_close(vectors(folder), their_vectors(folder), atol=1e-6, rtol=0)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_dense_layer_comes_from_its_own_file(tmp_path: Path, pickled: bool) -> None:
    folder = write_folder(tmp_path, "Dense", "Normalize")
    if pickled:
        (folder / "2_Dense" / "model.safetensors").unlink()
        write_dense(folder, pickled=True)
    _model, report = vramfit.load(str(folder), task="embedding", device="cpu")
    assert report.fresh == ()
    assert report.files == ("model.safetensors", f"2_Dense/{'pytorch_model.bin' if pickled else 'model.safetensors'}")
    made = vectors(folder)
    assert made.shape == (len(TEXTS), 12)
    torch.testing.assert_close(made, their_vectors(folder), atol=1e-6, rtol=0)


def test_layers_come_in_the_order_of_the_list(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "LayerNorm", "Normalize", "Dense")
    write_json(folder / "2_LayerNorm" / "config.json", {"dimension": WIDTH})
    generator = torch.Generator().manual_seed(4)
    scales = {f"norm.{name}": torch.rand(WIDTH, generator=generator) for name in ("weight", "bias")}
    save_file(scales, folder / "2_LayerNorm" / "model.safetensors")
    head = head_of(vramfit.load(str(folder), task="embedding", device="cpu")[0])
    assert head is not None
    assert not head.normalizes
    assert [type(layer).__name__ for layer in head.layers] == ["Norm", "UnitLength", "Dense"]
    torch.testing.assert_close(vectors(folder), their_vectors(folder), atol=1e-6, rtol=0)


def move_encoder(folder: Path) -> Path:
    """As sentence-transformers laid folders out before 2.0: the root's config.json is no model's."""
    inside = folder / "0_Transformer"
    inside.mkdir()
    for path in list(folder.iterdir()):
        if path.is_file() and path.name != "modules.json":
            path.rename(inside / path.name)
    list_modules(folder, "Pooling", encoder="0_Transformer")
    write_json(folder / "config.json", {"__version__": "0.2.0"})
    return folder


def test_the_encoder_may_lie_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = move_encoder(write_folder(tmp_path, pooling_mode_cls_token=True))
    assert resolve(folder, task="embedding").folder == folder / "0_Transformer"
    assert resolve(folder, task="features").config.hidden_size == WIDTH
    torch.testing.assert_close(vectors(folder), their_vectors(folder), atol=1e-6, rtol=0)


def test_a_folder_without_modules_is_pooled_by_the_mean_to_unit_length(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert read_parts(folder) is None
    assert not is_sentence_folder(folder)
    made = vectors(folder)
    torch.testing.assert_close(made.norm(dim=-1), torch.ones(len(TEXTS)))


def test_the_dense_layer_is_in_the_prediction_and_in_random_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "Dense", "Normalize")
    plain = write_model(tmp_path / "plain")
    job = {"task": "embedding", "mode": "infer", "batch": 2, "seq": 16, "gpu": "t4"}
    with_dense, without = (vramfit.estimate(str(path), **job).breakdown["weights"] for path in (folder, plain))
    assert with_dense - without == 4 * (WIDTH * 12 + 12) + padding(4 * WIDTH * 12) + padding(4 * 12)
    model, report = vramfit.load(str(folder), task="embedding", device="cpu", random_weights=True)
    assert "embedding_head.layers.0.linear.weight" in report.fresh
    assert model.embedding_head.layers[0].linear.weight.std() > 0  # type: ignore[union-attr, index]


def test_a_plan_is_not_remembered_for_another_head(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "Dense")
    request = Request.of({"task": "embedding", "batch": 4, "seq": 16, "gpu": "t4"})
    before = Job.of(str(folder), request).question()
    assert before == Job.of(str(folder), request).question()
    list_modules(folder, "Pooling")
    assert before != Job.of(str(folder), request).question()


def padding(num_bytes: int) -> int:
    """What the allocator adds: it gives whole blocks of 512 bytes."""
    return -num_bytes % 512


def test_pooling_can_be_asked_for_unless_the_dense_layer_is_of_another_width(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "one", "Dense", pooling_mode_mean_tokens=True)
    asked = vectors(folder, pooling="cls")
    write_pooling(folder, pooling_mode_cls_token=True)
    assert torch.equal(asked, vectors(folder))
    joined = write_folder(tmp_path / "joined", "Dense", pooling_mode=["mean", "max"])
    write_dense(joined, wide=2 * WIDTH)
    with pytest.raises(WorkloadError, match=r"pooling cls does not go with the model's dense layer.*mean\+max"):
        vectors(joined, pooling="cls")


def test_texts_are_cut_and_lowered_as_the_folder_says(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert resolve(folder, task="embedding").max_length is None
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True})
    assert resolve(folder, task="embedding").max_length == 9
    assert resolve(folder, task="features").max_length is None
    tokenizer = load_tokenizer(folder)
    assert tokenizer("The FILM")["input_ids"] == tokenizer("the film")["input_ids"]
    assert tokenizer.unk_token_id not in tokenizer("The FILM")["input_ids"]


def refusals() -> dict[str, tuple[Callable[[Path], object], str, str]]:
    """Name → what to do to a folder with a dense layer, the file that is named, and what is said of it."""

    def change(name: str, **changes: Any) -> Callable[[Path], object]:
        return lambda folder: write_json(folder / name, json.loads((folder / name).read_text()) | changes)

    def shorten(folder: Path) -> None:
        file = folder / "2_Dense" / "model.safetensors"
        save_file({"linear.weight": load_file(file)["linear.weight"]}, file)

    dense, pooling = "2_Dense/config.json", "1_Pooling/config.json"
    return {
        "no-pooling-config": (lambda f: (f / pooling).unlink(), pooling, "is not there"),
        "no-dense-config": (lambda f: (f / dense).unlink(), dense, "is not there"),
        "no-dense-weights": (
            lambda f: (f / "2_Dense" / "model.safetensors").unlink(),
            "2_Dense/model.safetensors",
            "holds no weights",
        ),
        "modules-not-json": (lambda f: (f / "modules.json").write_text("[{"), "modules.json", "cannot be read as JSON"),
        "modules-no-list": (lambda f: write_json(f / "modules.json", {}), "modules.json", "no list of modules"),
        "pooling-not-json": (lambda f: (f / pooling).write_bytes(b"\xff\xfe"), pooling, "cannot be read as JSON"),
        "pooling-a-list": (lambda f: write_json(f / pooling, []), pooling, "holds no JSON object"),
        "unknown-module": (
            lambda f: list_modules(f, "Pooling", "CNN"),
            "modules.json",
            "names a module CNN, which vramfit does not have",
        ),
        "words": (lambda f: list_modules(f, "WordEmbeddings", "Pooling"), "modules.json", "module WordEmbeddings"),
        "no-pooling": (lambda f: list_modules(f, "Normalize"), "modules.json", "not one Transformer, one Pooling"),
        "own-code": (
            lambda f: (f / "modules.json").write_text(
                (f / "modules.json").read_text().replace("sentence_transformers.models.Dense", "own_code.Dense")
            ),
            "modules.json",
            "module own_code.Dense",
        ),
        "outside": (
            lambda f: list_modules(f, "Pooling", encoder="../other"),
            "modules.json",
            "is not inside this one",
        ),
        "mode": (change(pooling, pooling_mode_mean_sqrt_len_tokens=True), pooling, "mean_sqrt_len_tokens"),
        "mode-name": (change(pooling, pooling_mode="average"), pooling, 'pools by "average"'),
        "activation": (change(dense, activation_function="os.system"), dense, "os.system"),
        "residual": (change(dense, use_residual=True), dense, "use_residual"),
        "of-tokens": (change(dense, module_input_name="token_embeddings"), dense, "token_embeddings"),
        "width-no-number": (change(dense, out_features="12"), dense, 'out_features "12"'),
        "width": (change(dense, in_features=64), dense, "takes vectors of 64 numbers.*gives 32"),
        "shape": (change(dense, out_features=13), "2_Dense/model.safetensors", "12×32.*13×32"),
        "no-bias": (shorten, "2_Dense/model.safetensors", "lacks linear.bias"),
        "surplus": (change(dense, bias=False), "2_Dense/model.safetensors", "holds linear.bias"),
        "cut-file": (
            lambda f: (f / "2_Dense" / "model.safetensors").write_bytes(b"\x00" * 20),
            "2_Dense/model.safetensors",
            "safetensors",
        ),
        "length": (
            lambda f: write_json(f / "sentence_bert_config.json", {"max_seq_length": "long"}),
            "sentence_bert_config.json",
            'max_seq_length "long"',
        ),
        "other-task": (
            lambda f: write_json(f / "sentence_bert_config.json", {"transformer_task": "fill-mask"}),
            "sentence_bert_config.json",
            "fill-mask",
        ),
        "other-model": (
            lambda f: write_json(f / "config_sentence_transformers.json", {"model_type": "SparseEncoder"}),
            "config_sentence_transformers.json",
            "SparseEncoder",
        ),
    }


@pytest.mark.parametrize("name", list(refusals()))
def test_faults_are_named_with_their_file(tmp_path: Path, name: str) -> None:
    spoil, file, said = refusals()[name]
    folder = write_folder(tmp_path, "Dense", "Normalize")
    spoil(folder)
    with pytest.raises(CheckpointError, match=said) as failure:
        vramfit.load(str(folder), task="embedding", device="cpu")
    assert failure.value.file == str(folder / file)
    assert failure.value.hint


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "\x00",
    "../x",
    "x" * 5000,
    [],
    {},
    ["mean", ["x"]],
    {"text": 1},
)


def test_no_value_of_any_field_is_more_than_an_error(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "Dense", "Normalize", pooling_mode="mean", include_prompt=True)
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 9, "modality_config": text})
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SentenceTransformer", "prompts": {}})
    num_refused = 0
    for file in [
        path for path in folder.rglob("*.json") if "token" not in path.name and path != folder / "config.json"
    ]:
        whole = file.read_text()
        rows = json.loads(whole)
        for place in range(len(rows)) if isinstance(rows, list) else (None,):
            for key in rows[0] if place is not None else rows:
                for value in ODD:
                    changed = json.loads(whole)
                    (changed if place is None else changed[place])[key] = value
                    write_json(file, changed)
                    try:
                        read_parts(folder)
                    except CheckpointError as error:
                        num_refused += bool(error.hint)
        file.write_text(whole)
    assert num_refused > 100


def test_other_tasks_do_not_mind_a_folder_that_cannot_be_pooled(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "CNN")
    assert resolve(folder, task="features").parts is None
    (folder / "modules.json").write_text("{")
    assert resolve(folder, task="features").folder == folder


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    for modes in ({"pooling_mode": ["mean", "cls"]}, {"pooling_mode_max_tokens": True, "include_prompt": False}):
        folder = write_folder(tmp_path / str(len(modes)), "Normalize", "Dense", **modes)
        write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
        parts = read_parts(folder)
        assert parts is not None
        for path, content in files_of(parts, WIDTH, 20).items():
            write_json(folder / path, content)
        again = read_parts(folder)
        assert again is not None
        assert again.max_length == 20
        assert (again.pooling, again.layers, again.includes_prompt) == (
            parts.pooling,
            parts.layers,
            parts.includes_prompt,
        )
        assert json.loads(again.settings) == {"prompts": {"query": "q: "}}
