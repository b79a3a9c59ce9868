"""Which files of a folder are taken, and what is said of those that nobody reads."""

import json
import os
from pathlib import Path

import pytest

from vramfit.checkpoints.files import find_checkpoint, is_plain_name, read_json_object
from vramfit.checkpoints.reading import read_entries
from vramfit.errors import CheckpointError

EMPTY = (2).to_bytes(8, "little") + b"{}"


def failure(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(folder)
    assert caught.value.file
    return caught.value


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(EMPTY)


def index(folder: Path, weight_map: object, name: str = "model.safetensors") -> None:
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_safetensors_come_before_bin_and_the_rest_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "pytorch_model.bin", "tf_model.h5", "training_args.bin", "config.json")
    found = find_checkpoint(tmp_path)
    assert found.kind == "safetensors"
    assert [p.name for p in found.paths] == ["model.safetensors"]
    assert found.others == ("pytorch_model.bin", "tf_model.h5")


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    touch(tmp_path, "b.safetensors", "a.safetensors")
    index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    found = find_checkpoint(tmp_path)
    assert [p.name for p in found.paths] == ["a.safetensors", "b.safetensors"]
    assert found.index == tmp_path / "model.safetensors.index.json"


def test_bin_and_its_shards_are_found_where_there_is_nothing_better(tmp_path: Path) -> None:
    touch(tmp_path, "pytorch_model-1.bin")
    index(tmp_path, {"x": "pytorch_model-1.bin"}, "pytorch_model.bin")
    assert find_checkpoint(tmp_path).kind == "bin"
    touch(tmp_path, "pytorch_model.bin")
    assert [p.name for p in find_checkpoint(tmp_path).paths] == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    ("name", "says", "hint"),
    [
        ("tf_model.h5", "TensorFlow weights", "from_tf=True"),
        ("bert_model.ckpt.index", "TensorFlow 1 checkpoint", "convert_bert_original_tf_checkpoint"),
        ("model.ckpt", "TensorFlow 1 checkpoint", "model.safetensors"),
        ("flax_model.msgpack", "Flax weights", "from_flax=True"),
        ("model.onnx", "ONNX", "model.safetensors"),
        ("model.gguf", "GGUF", "model.safetensors"),
        ("best.pt", "PyTorch files of another name", "pytorch_model.bin"),
        ("best.pth", "PyTorch files of another name", "pytorch_model.bin"),
        ("weights.safetensors", "safetensors of another name", "rename"),
        ("adapter_model.safetensors", "LoRA adapter", "merge"),
    ],
)
def test_other_weights_are_recognised_with_what_to_do(tmp_path: Path, name: str, says: str, hint: str) -> None:
    touch(tmp_path, name, "config.json", "training_args.bin")
    error = failure(tmp_path)
    assert says in str(error)
    assert name in str(error)
    assert hint in str(error.hint)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    touch(tmp_path, "config.json", "optimizer.pt", "rng_state_0.pth")
    assert "holds no weights" in str(failure(tmp_path))


def test_a_folder_that_is_none_is_an_error_of_ours(tmp_path: Path) -> None:
    assert "cannot be read" in str(failure(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "C:x", "a\0b", "x" * 300, "\n"],
)
def test_a_shard_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    index(tmp_path, {"tensor": name})
    error = failure(tmp_path)
    assert "no name of a file in this folder" in str(error)
    assert error.tensor == "tensor"
    assert not is_plain_name(name)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 3])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    index(tmp_path, weight_map)
    assert "has no weight_map" in str(failure(tmp_path))


@pytest.mark.parametrize("weight_map", [{"a": 3}, {"a": None}, {"a": ["x"]}])
def test_a_shard_that_is_no_text_is_refused(tmp_path: Path, weight_map: object) -> None:
    index(tmp_path, weight_map)
    assert failure(tmp_path).tensor == "a"


def test_an_absent_shard_is_named_with_what_is_lost(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors")
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"})
    error = failure(tmp_path)
    assert "b.safetensors is named in model.safetensors.index.json but is not in" in str(error)
    assert "2 tensors are lost" in str(error)
    assert error.tensor == "y"


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors")
    index(tmp_path, {"x": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors lacks tensor x") as caught:
        read_entries(find_checkpoint(tmp_path))
    assert caught.value.tensor == "x"


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    touch(tmp_path, "real.safetensors")
    (tmp_path / "model.safetensors").symlink_to("real.safetensors")
    assert find_checkpoint(tmp_path).paths[0].name == "model.safetensors"


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "outside.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../outside.safetensors")
    assert "a link that leaves the folder" in str(failure(folder))


def test_a_link_to_nowhere_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    assert "which does not exist" in str(failure(tmp_path))


def test_a_circle_of_links_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    failure(tmp_path)


def make_cache(root: Path) -> tuple[Path, Path]:
    """The hub's cache with one repository: its snapshot and its blobs."""
    repository = root / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00d").write_bytes(EMPTY)
    return snapshot, blobs


def test_blobs_that_are_a_link_stay_in_their_repository_but_for_the_users_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, blobs = make_cache(tmp_path)
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    blobs.rename(inside := blobs.with_name("store"))
    blobs.symlink_to(inside)
    assert find_checkpoint(snapshot).paths[0].name == "model.safetensors"
    blobs.unlink()
    inside.rename(outside := tmp_path / "elsewhere")
    blobs.symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"is a link that leaves the folder, to .*elsewhere"):
        find_checkpoint(snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(snapshot.parents[2]))
    assert find_checkpoint(snapshot).paths[0].name == "model.safetensors"


def test_links_of_the_hub_cache_lead_to_the_blobs_of_their_own_repository(tmp_path: Path) -> None:
    snapshot, _ = make_cache(tmp_path)
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    assert find_checkpoint(snapshot).paths == (snapshot / "model.safetensors",)


def test_links_of_the_hub_cache_lead_nowhere_else(tmp_path: Path) -> None:
    snapshot, _ = make_cache(tmp_path)
    touch(tmp_path, "secret")
    (snapshot / "model.safetensors").symlink_to("../../../secret")
    assert "a link that leaves the folder" in str(failure(snapshot))


def test_a_pipe_or_a_folder_in_place_of_the_weights_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "a device or a pipe" in str(failure(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    assert "is a folder, not a file" in str(failure(tmp_path))


@pytest.mark.parametrize(
    ("content", "says"),
    [("[1]", "no JSON object"), ("{", "is not JSON"), ("[" * 100_000, "nested too deeply"), ("\ufeff[]", "no JSON")],
)
def test_a_json_file_that_is_none_is_told_so(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=says):
        read_json_object(path, what="index")


def test_a_json_file_of_millions_of_lists_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": [' + "[]," * 1_600_000 + "0]}")
    with pytest.raises(CheckpointError, match="more than 1,500,000 lists"):
        read_json_object(path, what="index")
