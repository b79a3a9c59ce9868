"""Configurations that are damaged, hostile or impossible: one line, which file, which field."""

import json
from pathlib import Path

import pytest
from tests.counting import num_calls

from vramfit.errors import CheckpointError
from vramfit.models import find_entry, resolve
from vramfit.models.configuration import MAX_FILE_BYTES, make_config


def folder_with(tmp_path: Path, content: str | bytes) -> Path:
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "config.json").write_bytes(raw)
    return tmp_path


def bert_with(tmp_path: Path, **changes: object) -> Path:
    entry = find_entry("bert-tiny")
    assert entry is not None
    return folder_with(tmp_path, json.dumps(entry.config_data() | changes))


def failure(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        resolve(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    assert caught.value.file == str(folder / "config.json")
    return caught.value


def test_a_folder_without_config_json_says_so(tmp_path: Path) -> None:
    assert "has no config.json" in str(failure(tmp_path))


def test_a_config_json_that_is_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "is a folder, not a file" in str(failure(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        '{"model_type": "bert",',
        b"\xff\xfe\x00",
        '{"hidden_size": NaN}',
        "[" * 100_000,
        '{"hidden_size": ' + "9" * 5000 + "}",
    ],
    ids=["empty", "words", "cut-off", "binary", "nan", "deep", "digits"],
)
def test_what_is_not_json_is_told_so(tmp_path: Path, content: str | bytes) -> None:
    assert "is not JSON" in str(failure(folder_with(tmp_path, content)))


@pytest.mark.parametrize(
    ("content", "kind"),
    [("[]", "list"), ('"bert"', "string"), ("3", "number"), ("null", "null"), ("true", "boolean")],
)
def test_json_that_is_no_object_is_told_so(tmp_path: Path, content: str, kind: str) -> None:
    assert f"holds a JSON {kind}, not an object" in str(failure(folder_with(tmp_path, content)))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert f"is {MAX_FILE_BYTES + 1:,} bytes, too large" in str(failure(tmp_path))


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    folder = bert_with(tmp_path)
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert resolve(folder).config.hidden_size == 128


def test_a_missing_model_type_is_named(tmp_path: Path) -> None:
    error = failure(folder_with(tmp_path, '{"hidden_size": 8}'))
    assert "has no model_type" in str(error)
    assert "model_type" in str(error.hint)


@pytest.mark.parametrize("value", [7, [], ""])
def test_a_model_type_that_is_no_name_is_shown(tmp_path: Path, value: object) -> None:
    assert f"has model_type {json.dumps(value)}" in str(failure(bert_with(tmp_path, model_type=value)))


def test_an_unknown_model_type_comes_with_the_nearest(tmp_path: Path) -> None:
    error = failure(bert_with(tmp_path, model_type="bertt"))
    assert 'model_type "bertt" is not one that the installed transformers knows' in str(error)
    assert "bert" in str(error.hint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 10**9),
        ("hidden_size", 0),
        ("hidden_size", -768),
        ("hidden_size", "768"),
        ("hidden_size", 768.0),
        ("hidden_size", True),
        ("hidden_size", [768]),
        ("num_hidden_layers", 10**6),
        ("num_hidden_layers", 0),
        ("num_attention_heads", -1),
        ("intermediate_size", 10**12),
        ("vocab_size", 10**12),
        ("max_position_embeddings", 0),
        ("type_vocab_size", -1),
        ("num_labels", 10**9),
        ("pooler_fc_size", 10**15),
    ],
)
def test_a_size_no_model_has_is_refused_by_its_name_and_at_once(tmp_path: Path, field: str, value: object) -> None:
    sound = num_calls(lambda: resolve(bert_with(tmp_path)))
    folder = bert_with(tmp_path, **{field: value})
    refused = num_calls(lambda: failure(folder))
    message = str(failure(folder))
    assert refused < sound / 2  # before anything is made of the configuration
    assert f"{field} is {json.dumps(value)}; it must be " in message


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_a_size_that_is_null_is_refused(tmp_path: Path, field: str) -> None:
    assert field in str(failure(bert_with(tmp_path, **{field: None})))


def test_a_family_with_names_of_its_own_is_checked_by_them(tmp_path: Path) -> None:
    entry = find_entry("distilbert-base-uncased")
    assert entry is not None
    folder = folder_with(tmp_path, json.dumps(entry.config_data() | {"n_layers": 10**6}))
    assert "n_layers is 1000000; it must be a whole number from 1 to 1,000" in str(failure(folder))


def test_sizes_inside_a_part_of_the_configuration_are_checked_too(tmp_path: Path) -> None:
    data = {"model_type": "clip", "text_config": {"hidden_size": 10**9}}
    assert "text_config.hidden_size is 1000000000" in str(failure(folder_with(tmp_path, json.dumps(data))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_norm_eps", "tiny"),
        ("hidden_dropout_prob", "often"),
        ("torch_dtype", "floaty"),
        ("id2label", ["a", "b"]),
        ("id2label", {"first": "a"}),
        ("hidden_act", 5),
        ("self", 1),
    ],
)
def test_what_transformers_rejects_is_one_line_of_ours(tmp_path: Path, field: str, value: object) -> None:
    assert "BertConfig rejects it: " in str(failure(bert_with(tmp_path, **{field: value})))


@pytest.mark.parametrize("field", ["to_dict", "__class__", "from_pretrained", "__init__"])
def test_a_field_that_would_replace_code_is_refused(tmp_path: Path, field: str) -> None:
    assert f"'{field}' is not a configuration field" in str(failure(bert_with(tmp_path, **{field: "x"})))


def test_fields_nobody_knows_do_no_harm(tmp_path: Path) -> None:
    folder = bert_with(tmp_path, my_own_note="hello", gap_size=0, pooler_type="first_token_transform")
    assert resolve(folder).config.my_own_note == "hello"


def test_a_configuration_without_optional_fields_gets_the_library_defaults() -> None:
    assert make_config({"model_type": "bert"}, where="here").hidden_size == 768
