"""Headers of safetensors files: sound ones agree with the safetensors library, each bad one has its own message."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
from tests.counting import num_bytes_read, num_calls
from tests.unit.checkpoints.broken import load_script

from vramfit.checkpoints.safetensors_file import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    MAX_MARKS,
    MAX_TENSORS,
    TORCH_DTYPES,
    read_header,
)
from vramfit.errors import CheckpointError

SOUND = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def write(tmp_path: Path, header: object, data: bytes = b"\0" * 24, *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def failure(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)
    assert caught.value.file == str(path)
    assert caught.value.hint
    return caught.value


def changed(**fields: Any) -> dict[str, Any]:
    return {"a": SOUND["a"] | fields}


def test_a_sound_header_gives_names_dtypes_and_shapes(tmp_path: Path) -> None:
    path = write(tmp_path, SOUND)
    (entry,) = read_header(path)
    assert (entry.name, entry.dtype, entry.shape, entry.file) == ("a", "F32", (2, 3), path)
    assert entry.num_bytes == 24


def test_metadata_spaces_and_empty_tensors_are_allowed(tmp_path: Path) -> None:
    header = b'{ "__metadata__" : {"format": "pt", "x": "{\\"a\\": [1]}"} , "e":{"dtype":"I64","shape":[0,4],' + (
        b'"data_offsets":[0,0]}, "s" : {"shape":[],"dtype":"U8","data_offsets":[0,1]}}   \n'
    )
    entries = read_header(write(tmp_path, header, b"\7"))
    assert [(e.name, e.shape) for e in entries] == [("e", (0, 4)), ("s", ())]


def test_a_file_without_tensors_has_none(tmp_path: Path) -> None:
    assert read_header(write(tmp_path, b"{}", b"")) == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty (0 bytes)"),
        (b"\x10\0\0", "is 3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + b"\0" * 40, "a zip file"),
        (b"\x80\x02}q\x00." + b"\0" * 40, "a pickle"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 40, "HDF5"),
        (b"GGUF\x03\0\0\0" + b"\0" * 40, "GGUF"),
    ],
)
def test_what_is_no_safetensors_file_is_recognised(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert says in str(failure(path))


@pytest.mark.parametrize(
    ("length", "says"),
    [
        (10**6, "says its header is 1,000,000 bytes, but only"),
        (MAX_HEADER_BYTES + 1, "the format allows 100,000,000"),
        (2**64 - 1, "the format allows"),
        (0, "too short"),
        (1, "too short"),
    ],
)
def test_a_header_length_that_cannot_be_is_refused(tmp_path: Path, length: int, says: str) -> None:
    assert says in str(failure(write(tmp_path, SOUND, length=length)))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[1, 2]", "no JSON object"),
        (b'"text"', "no JSON object"),
        (b'{"a": ', "not JSON"),
        (b'{"a" {}}', "not JSON: Expecting ':'"),
        (b'{"a: {}}', "not JSON: Unterminated string"),
        (b"{1: 2}", "not JSON: Expecting property name"),
        (b'{"a": {"dtype": NaN}}', "describes tensor a wrongly: it lacks data_offsets"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "dtype twice"),
        (b'{"\\ud800": {}}', "surrogates not allowed"),
        (b'{"__metadata__": 3}', "__metadata__ that is no object of texts"),
        (b'{"__metadata__": {"a": 3}}', "__metadata__ that is no object of texts"),
        (b"{} {}", "not JSON: Extra data"),
        (b'{"a": [1]}', "[1] is no JSON object"),
        (b'{"a": {"b": {"c": 1}}}', "it lacks data_offsets"),
        (b'{"a": {"dtype": "F32"}}', "describes tensor a wrongly: it lacks data_offsets"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": {"x":' + b"[" * 3_000 + b"}}", "not JSON"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "is no JSON object"),
    ],
)
def test_a_header_that_is_no_such_json_is_refused(tmp_path: Path, header: bytes, says: str) -> None:
    assert says in str(failure(write(tmp_path, header)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dtype": "F33"}, "the dtype F33 is none of safetensors (nearest: F32"),
        ({"dtype": 4}, "the dtype 4"),
        ({"shape": [-2, -3]}, "the shape [-2, -3] is one which no tensor has"),
        ({"shape": [2.0, 3]}, "which no tensor has"),
        ({"shape": [True, 6]}, "which no tensor has"),
        ({"shape": 6}, "which no tensor has"),
        ({"shape": [2**64]}, "which no tensor has"),
        ({"shape": [2**40, 2**40]}, "takes more than any file holds"),
        ({"shape": [1] * 65}, "which no tensor has"),
        ({"shape": [2, 4]}, "24 bytes, but F32 2×4 takes 32"),
        ({"dtype": "F16"}, "24 bytes, but F16 2×3 takes 12"),
        ({"data_offsets": [24, 0]}, "no begin and end"),
        ({"data_offsets": [-24, 0]}, "no begin and end"),
        ({"data_offsets": [0]}, "no begin and end"),
        ({"data_offsets": [0, 24.0]}, "no begin and end"),
        ({"data_offsets": [8, 32]}, "leaves a hole of 8 bytes before tensor a"),
        ({"shape": [2, 4], "data_offsets": [0, 32]}, "is cut off: it holds 24 bytes of data"),
        ({"shape": [2, 2], "data_offsets": [0, 16]}, "8 bytes after its last tensor"),
    ],
)
def test_a_tensor_that_is_described_wrongly_is_named(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    error = failure(write(tmp_path, changed(**fields)))
    assert says in str(error)
    assert error.tensor == ("" if "after its last" in says else "a")


def test_overlapping_tensors_are_both_named(tmp_path: Path) -> None:
    header = {**SOUND, "b": {"dtype": "F32", "shape": [3], "data_offsets": [12, 24]}}
    assert "puts tensor b over a: their bytes overlap" in str(failure(write(tmp_path, header)))


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(SOUND["a"])
    error = failure(write(tmp_path, f'{{"a": {one}, "a": {one}}}'.encode()))
    assert "names the tensor a twice" in str(error)
    assert error.tensor == "a"


def test_a_tensor_may_have_the_name_of_a_field(tmp_path: Path) -> None:
    header = {"__metadata__": {"data_offsets": "[0, 24]"}, "data_offsets": SOUND["a"]}
    assert [entry.name for entry in read_header(write(tmp_path, header))] == ["data_offsets"]


def test_too_many_tensors_are_refused(tmp_path: Path) -> None:
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = "{" + ",".join(f'"{i}":{empty}' for i in range(MAX_TENSORS + 1)) + "}"
    assert "more than 100,000 tensors" in str(failure(write(tmp_path, header.encode(), b"")))


def test_control_characters_in_a_name_do_not_reach_the_terminal(tmp_path: Path) -> None:
    header = {"\x1b[31mred": SOUND["a"] | {"dtype": "F33"}}
    assert "\x1b" not in str(failure(write(tmp_path, header)))


def test_hostile_json_costs_no_more_memory_than_its_length(tmp_path: Path) -> None:
    import tracemalloc

    header = b'{"a": [' + b"{}," * 3_000_000 + b"{}]}"
    path = write(tmp_path, header)
    tracemalloc.start()
    failure(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(header)


def test_what_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    assert "cannot be read" in str(failure(tmp_path))


def test_every_dtype_of_torch_is_a_dtype_of_safetensors() -> None:
    import torch

    assert set(TORCH_DTYPES) <= set(DTYPE_BITS)
    for name, attribute in TORCH_DTYPES.items():
        assert getattr(torch, attribute).itemsize * 8 == DTYPE_BITS[name]


def with_tensors(path: Path, number: int) -> Path:
    described = {
        f"encoder.layer.{i}.dense.weight": {
            "dtype": "F32",
            "shape": [1024],
            "data_offsets": [i * 4096, i * 4096 + 4096],
        }
        for i in range(number)
    }
    load_script().write_raw(path, described, b"\0" * 4096 * number)
    assert len(read_header(path)) == number
    return path


def test_reading_a_header_takes_work_in_proportion_to_its_tensors(tmp_path: Path) -> None:
    few, many = (num_calls(partial(read_header, with_tensors(tmp_path / f"{n}", n))) for n in (200, 400))
    assert 100 * 200 > few > 200
    assert many < 2.2 * few


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_but_the_header_is_read(tmp_path: Path) -> None:
    path = with_tensors(tmp_path / "x.safetensors", 400)  # 1.6 MB of data
    assert num_bytes_read(lambda: read_header(path)) < 200_000


@pytest.mark.parametrize(
    "header",
    [
        {"__metadata__": {str(n): "" for n in range(MAX_MARKS // 5 + 1)}, **SOUND},
        changed(shape=[1] * (MAX_MARKS + 2)),
    ],
    ids=["metadata", "shape"],
)
def test_a_header_without_end_is_refused_unparsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: dict[str, Any]
) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("it was parsed")

    path = write(tmp_path, header)
    monkeypatch.setattr(json, "loads", parse)
    monkeypatch.setattr(safetensors, "safe_open", parse)
    assert "more quotes and commas than 100,000 tensors need" in str(failure(path))


def test_a_header_with_ten_thousand_texts_is_read(tmp_path: Path) -> None:
    many = {str(n): "" for n in range(10_000)}
    assert len(read_header(write(tmp_path, {"__metadata__": many, **SOUND}))) == 1
