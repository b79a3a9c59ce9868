"""From whatever names a model to its configuration and class."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, GPT2Config

import vramfit
from vramfit.errors import CheckpointError, UnknownModel, WorkloadError
from vramfit.models import find_entry, model_names, resolve

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BertConfig(**SMALL, num_labels=5).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", model_names())
def test_every_catalogue_name_resolves_offline(name: str) -> None:
    resolved = resolve(name)
    assert (resolved.name, resolved.origin) == (name, "catalogue")
    assert resolved.task == "sequence-classification"
    assert resolved.model_class.__name__.endswith("ForSequenceClassification")
    entry = find_entry(name)
    assert entry is not None
    assert resolved.config.num_labels == len(entry.config_data().get("id2label", "ab"))


def test_a_hub_id_of_the_catalogue_resolves_to_its_name() -> None:
    assert resolve("FacebookAI/roberta-base").name == "roberta-base"


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("sequence-classification", "BertForSequenceClassification"),
        ("token-classification", "BertForTokenClassification"),
        ("question-answering", "BertForQuestionAnswering"),
        ("masked-lm", "BertForMaskedLM"),
        ("pretraining", "BertForPreTraining"),
        ("features", "BertModel"),
    ],
)
def test_the_task_chooses_the_class(task: str, name: str) -> None:
    assert resolve("bert-tiny", task=task).model_class.__name__ == name


def test_the_version_it_was_saved_with_is_kept() -> None:
    assert resolve("bert-base-uncased").saved_with == "4.6.0.dev0"


def test_a_folder_its_file_and_a_path_object_are_the_same_model(folder: Path) -> None:
    for way in (str(folder), folder, folder / "config.json", os.fsencode(folder).decode()):
        resolved = resolve(way)
        assert (resolved.origin, resolved.folder) == ("folder", folder)
        assert resolved.config.num_labels == 5


def test_a_folder_named_like_a_catalogue_entry_wins_as_in_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(folder.parent / "bert-base-uncased")
    monkeypatch.chdir(folder.parent)
    assert resolve("bert-base-uncased").config.hidden_size == 16


def test_a_folder_without_configuration_does_not_hide_a_catalogue_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bert-base-uncased").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("bert-base-uncased").origin == "catalogue"


def test_num_labels_is_set_on_our_copy() -> None:
    assert resolve("bert-tiny", num_labels=7).config.num_labels == 7
    assert resolve("bert-tiny").config.num_labels == 2


@pytest.mark.parametrize("num_labels", [0, -1, 10**9, 2.0, "3", True])
def test_a_number_of_labels_that_is_no_count_is_refused(num_labels: object) -> None:
    with pytest.raises(WorkloadError, match="num_labels"):
        resolve("bert-tiny", num_labels=num_labels)  # type: ignore[arg-type]


def test_no_labels_are_the_encoder_alone() -> None:
    said = "num_labels 0 is not a whole number from 1 to [0-9,]+: the encoder without a head is task features"
    for use in (resolve, vramfit.estimate):
        with pytest.raises(WorkloadError, match=said):
            use("bert-tiny", num_labels=0)


def test_a_configuration_object_is_copied_and_never_changed() -> None:
    config = BertConfig(**SMALL)
    before = copy.deepcopy(config.to_dict())
    resolved = resolve(config, num_labels=9, task="token-classification")
    assert resolved.origin == "config"
    assert resolved.config is not config
    assert resolved.config.num_labels == 9
    assert config.to_dict() == before
    assert config._attn_implementation is None


def test_an_absurd_configuration_object_is_refused_too() -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000000"):
        resolve(BertConfig(num_hidden_layers=10**6))


def test_a_module_keeps_its_class_and_tells_its_task() -> None:
    module = BertForTokenClassification(BertConfig(**SMALL))
    resolved = resolve(module)
    assert (resolved.origin, resolved.name) == ("module", "BertForTokenClassification")
    assert resolved.task == "token-classification"
    assert resolved.model_class is BertForTokenClassification
    assert resolved.module is module
    assert resolved.config is not module.config


def test_a_module_with_other_labels_than_asked_for_is_a_contradiction() -> None:
    module = BertForSequenceClassification(BertConfig(**SMALL))
    assert resolve(module, num_labels=2).config.num_labels == 2
    with pytest.raises(WorkloadError, match="num_labels 3 is asked for, but the module given has 2"):
        resolve(module, num_labels=3)


def test_other_families_of_transformers_work_through_the_same_door() -> None:
    assert resolve(GPT2Config(n_layer=2)).model_class.__name__ == "GPT2ForSequenceClassification"


@pytest.mark.parametrize("thing", [None, 7, ["bert-tiny"], torch.zeros(1)])
def test_anything_else_is_told_what_a_model_is(thing: object) -> None:
    with pytest.raises(WorkloadError, match="a model is a name, a folder"):
        resolve(thing)


@pytest.mark.parametrize(
    "name",
    [
        "bert-bas-uncased",
        "no/such/folder/here",
        "/nowhere",
        "",
        " ",
        "x" * 5000,
        "a\0b",
        "~nobody-x/y",
        "a\nb",
    ],
)
def test_an_unknown_name_is_one_line(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"^unknown model ") as caught:
        resolve(name)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert "folder with config.json" in str(caught.value.hint)


def test_a_typing_error_finds_what_was_meant() -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve("bert-bas-uncased")
    assert caught.value.nearest[0] == "bert-base-uncased"
    assert len(caught.value.nearest) == 3
    assert str(caught.value).endswith(f"nearest: {', '.join(caught.value.nearest)}")


@pytest.mark.parametrize("name", ["nosuch", "gpt2", "meta-llama/Llama-2-7b-hf", "./my-model"])
def test_a_name_that_is_like_none_is_told_none(name: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve(name)
    assert caught.value.nearest == ()
    assert "nearest" not in str(caught.value)
    assert "vramfit models" in str(caught.value.hint)


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose model brings code that leaves a canary when it runs."""
    source = tmp_path / "theirs"
    source.mkdir()
    (source / "configuration_theirs.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'canary')!r}).touch()\n"
        "from transformers import BertConfig\n"
        "class TheirConfig(BertConfig):\n    model_type = 'theirs'\n"
    )
    (source / "modeling_theirs.py").write_text(
        "from transformers import BertForSequenceClassification\n"
        "from .configuration_theirs import TheirConfig\n"
        "class TheirModel(BertForSequenceClassification):\n    config_class = TheirConfig\n"
    )
    auto_map = {
        "AutoConfig": "configuration_theirs.TheirConfig",
        "AutoModelForSequenceClassification": "modeling_theirs.TheirModel",
    }
    data = SMALL | {"model_type": "theirs", "auto_map": auto_map}
    (source / "config.json").write_text(json.dumps(data))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return source


def test_code_that_comes_with_a_model_is_not_run_unasked(own_code: Path) -> None:
    with pytest.raises(CheckpointError, match='model_type "theirs" is not one') as caught:
        resolve(own_code)
    assert "trust_remote_code=True" in str(caught.value.hint)
    assert "--trust-remote-code" in str(caught.value.hint)
    assert not (own_code.parent / "canary").exists()


def test_nor_is_it_run_where_the_library_knows_the_family_itself(own_code: Path) -> None:
    data = json.loads((own_code / "config.json").read_text())
    (own_code / "config.json").write_text(json.dumps(data | {"model_type": "bert"}))
    assert resolve(own_code).model_class is BertForSequenceClassification
    assert not (own_code.parent / "canary").exists()


def test_with_trust_it_is_run_and_its_classes_are_used(own_code: Path) -> None:
    resolved = resolve(own_code, trust_remote_code=True)
    assert (own_code.parent / "canary").exists()
    assert resolved.model_class.__name__ == "TheirModel"
    assert resolved.config.hidden_size == 16


def test_trusted_code_that_fails_is_one_line(own_code: Path) -> None:
    (own_code / "configuration_theirs.py").write_text("raise RuntimeError('no\\nluck')\n")
    with pytest.raises(CheckpointError, match="the model's own code failed: RuntimeError: no luck"):
        resolve(own_code, trust_remote_code=True)


def test_the_catalogue_is_not_changed_by_what_is_done_to_a_resolved_configuration() -> None:
    resolve("bert-tiny").config.hidden_size = 3
    entry = find_entry("bert-tiny")
    assert entry is not None
    assert resolve("bert-tiny").config.hidden_size == entry.hidden_size == 128


def test_a_configuration_that_is_a_link_out_of_its_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "config.json").symlink_to("../config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link that leaves the folder"):
        resolve(inside)
    (inside / "config.json").unlink()
    (inside / "config.json").symlink_to("gone.json")
    with pytest.raises(CheckpointError, match="which does not exist"):
        resolve(inside)


def test_a_configuration_may_be_a_link_inside_its_folder_or_its_folder_a_link(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(folder / "real.json")
    (folder / "config.json").symlink_to("real.json")
    (tmp_path / "elsewhere").symlink_to(folder)
    assert resolve(tmp_path / "elsewhere").config.num_labels == 5


def test_a_snapshot_of_the_hub_cache_is_links_to_blobs_of_its_repository(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (folder / "config.json").rename(blobs / "f00d")
    (snapshot / "config.json").symlink_to("../../blobs/f00d")
    assert resolve(snapshot).config.num_labels == 5
    (tmp_path / "my-model").symlink_to(snapshot)
    assert resolve(tmp_path / "my-model").config.num_labels == 5
    (tmp_path / "models--owner--other" / "blobs").mkdir(parents=True)
    (blobs / "f00d").rename(tmp_path / "models--owner--other" / "blobs" / "f00d")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../models--owner--other/blobs/f00d")
    with pytest.raises(CheckpointError, match="leaves the folder"):
        resolve(snapshot)
