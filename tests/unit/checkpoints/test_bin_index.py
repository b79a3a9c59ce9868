"""`.bin` files: tensors found without running anything, and nothing in them can make us run it."""

import io
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.checkpoints.bin_index import MAX_PICKLE_BYTES, read_bin
from vramfit.checkpoints.entry import TORCH_DTYPES
from vramfit.errors import CheckpointError

BOTH = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


def save(path: Path, value: object, *, zipped: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def failure(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_bin(path)
    assert caught.value.file == str(path)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    base = torch.arange(12.0)
    return {
        "matrix": torch.randn(3, 4),
        "transposed": torch.randn(3, 5).t(),
        "part": base[3:7],
        "tied": base,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "half": torch.randn(4).half(),
        "brain": torch.randn(2, 2).bfloat16(),
        "ids": torch.arange(6).view(1, 6),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "flag": torch.tensor([True, False]),
    }


@BOTH
def test_every_tensor_is_where_it_is_said_to_be(tmp_path: Path, state: dict[str, torch.Tensor], zipped: bool) -> None:
    path = save(tmp_path / "pytorch_model.bin", state, zipped=zipped)
    content = path.read_bytes()
    entries = {entry.name: entry for entry in read_bin(path)}
    assert list(entries) == list(state)
    for name, entry in entries.items():
        tensor = state[name]
        assert entry.shape == tuple(tensor.shape)
        assert getattr(torch, TORCH_DTYPES[entry.dtype]) is tensor.dtype
        if entry.num_elements:
            flat = torch.frombuffer(bytearray(content[entry.begin : entry.end]), dtype=tensor.dtype)
            stride = entry.stride or torch.empty(entry.shape).stride()
            assert torch.equal(torch.as_strided(flat, entry.shape, stride), tensor)


def test_dtypes_without_a_storage_class_are_read_too(tmp_path: Path) -> None:
    path = save(
        tmp_path / "x.bin", {"u": torch.zeros(3, dtype=torch.uint16), "f": torch.zeros(2).to(torch.float8_e5m2)}
    )
    assert [(e.dtype, e.num_bytes) for e in read_bin(path)] == [("U16", 6), ("F8_E5M2", 2)]


def test_a_state_dict_of_a_real_model_is_read(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    path = save(tmp_path / "x.bin", module.state_dict())  # an OrderedDict with _metadata
    assert [e.name for e in read_bin(path)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@BOTH
def test_a_pickle_with_code_does_not_run_it(tmp_path: Path, zipped: bool) -> None:
    canary = tmp_path / "canary"
    path = save(tmp_path / "x.bin", {"a": torch.ones(2), "b": Code(canary)}, zipped=zipped)
    error = failure(path)
    assert f"asks for {os.system.__module__}.system" in str(error)
    assert not canary.exists()
    pickle_would_run_it = tmp_path / "proof.pkl"
    pickle_would_run_it.write_bytes(pickle.dumps(Code(canary)))
    pickle.loads(pickle_would_run_it.read_bytes())
    assert canary.exists()  # the canary is a real one


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_found_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(pickle.dumps(Code(tmp_path / "canary"), protocol))
    assert "system" in str(failure(path))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("opcodes", "wanted"),
    [
        (b"(S'true'\nios\nsystem\n.", "os.system"),
        (b"(cos\nsystem\nS'true'\no.", "os.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.", "posix.system"),
        (b"ctorch\nload\n)R.", "torch.load"),
        (b"ctorch\nfloat32.__class__\n.", "torch.float32.__class__"),
        (b"ctorch\nFloatStorage\n)R.", "torch.FloatStorage()"),
        (b"ctorch.serialization\nload\n.", "torch.serialization.load"),
        (b"\x82\x01.", "extension 1 of copyreg"),
        (b"\x80\x04}}}\x92.", "an object"),
    ],
)
def test_every_way_to_name_code_is_refused_by_its_name(tmp_path: Path, opcodes: bytes, wanted: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(opcodes)
    assert f"asks for {wanted}" in str(failure(path))


def test_a_whole_pickled_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    error = failure(save(tmp_path / "x.bin", torch.nn.Linear(2, 2)))
    assert "torch.nn.modules.linear.Linear" in str(error)
    assert "state_dict" in str(error.hint)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"epoch": 1, "state_dict": {"a": 1}}, "the model lies under 'state_dict'"),
        ({"a": 3}, "a int under the name a"),
        ([1, 2], "a list, not a state dict"),
        ({}, "an empty dict"),
        (torch.ones(2), "one tensor, not a state dict"),
        ({3: torch.ones(2)}, "which is no text"),
    ],
)
def test_what_is_no_state_dict_is_told_so(tmp_path: Path, value: object, says: str) -> None:
    assert says in str(failure(save(tmp_path / "x.bin", value)))


@BOTH
def test_a_file_that_is_cut_off_is_told_so(tmp_path: Path, zipped: bool) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.ones(1000), "b": torch.ones(1000)}, zipped=zipped)
    path.write_bytes(path.read_bytes()[:-3000])
    assert "cut off" in str(failure(path)) or "reaches to byte" in str(failure(path))


def test_other_formats_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    for content, says in (
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"<html>", "a web page"),
        ((2).to_bytes(8, "little") + b"{}", "safetensors file by its content"),
    ):
        path.write_bytes(content)
        assert says in str(failure(path))
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("tensors"), io.BytesIO())
    assert "tar file" in str(failure(path))
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("a.txt", "a")
    assert "without data.pkl" in str(failure(path))


def rewrite(path: Path, *, compress: bool = False, **changes: bytes) -> None:
    """The same archive with members replaced."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, changes.get(name.rpartition("/")[2].replace(".", "_"), content))


def test_a_zip_bomb_is_refused_unread(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.ones(2)})
    rewrite(path, compress=True, data_pkl=b"\0" * (MAX_PICKLE_BYTES + 1))
    assert path.stat().st_size < 10**6
    assert "too large" in str(failure(path))


def test_compressed_and_missing_storages_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(1000)})
    rewrite(path, compress=True)
    error = failure(path)
    assert "is compressed" in str(error)
    assert error.tensor == "a"


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(4)})
    rewrite(path, byteorder=b"big")
    assert "big-endian" in str(failure(path))


def test_a_tensor_that_reaches_beyond_its_storage_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(10)})
    with zipfile.ZipFile(path) as archive:
        content = archive.read("x/data.pkl")
    rewrite(path, data_pkl=content.replace(b"K\x0a\x85", b"K\xc8\x85"))  # the shape (10,) becomes (200,)
    error = failure(path)
    assert "reaches to byte 800 of a storage of 40" in str(error)
    assert error.tensor == "a"


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x02}" + b"}" * 600_000 + b".",
        b"\x80\x02)" + b"\x85" * 400_000 + b".",
        b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.",
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"abc.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x02Rq\x00.",
        b"\x80\x02h\x07.",
        b"\x80\x02\x86.",
        b"\x80\x02}e.",
        b"\x80\x02Q.",
        b"\x80",
        b"I" + b"9" * 100_000 + b"\n.",
    ],
)
def test_hostile_opcodes_end_in_an_error_of_ours(tmp_path: Path, opcodes: bytes) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(opcodes)
    failure(path)


def test_random_damage_ends_in_an_error_of_ours(tmp_path: Path) -> None:
    import random

    rng = random.Random(7)
    num_refused = 0
    for zipped in (True, False):
        path = save(tmp_path / "x.bin", {"a": torch.ones(5, 3), "b": torch.ones(2)}, zipped=zipped)
        content = path.read_bytes()
        for _ in range(300):
            damaged = bytearray(content)
            for _ in range(rng.randrange(1, 6)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                read_bin(path)
            except CheckpointError:
                num_refused += 1
    assert 0 < num_refused < 600  # any other error ends the test; damage to the numbers alone is not visible
