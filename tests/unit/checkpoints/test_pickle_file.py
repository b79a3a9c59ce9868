"""`.bin` files: tensors found without running anything, and nothing in them can make us run it."""

import io
import os
import pickle
import re
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.counting import num_bytes_read

from vramfit.checkpoints.pickle_file import MAX_OPCODES, MAX_PICKLE_BYTES, MAX_TUPLES, load_state_dict, read_bin
from vramfit.checkpoints.safetensors_file import TORCH_DTYPES
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
def test_every_tensor_is_described_and_loaded_as_it_was_saved(
    tmp_path: Path, state: dict[str, torch.Tensor], zipped: bool
) -> None:
    path = save(tmp_path / "pytorch_model.bin", state, zipped=zipped)
    entries = {entry.name: entry for entry in read_bin(path)}
    loaded = load_state_dict(path)
    assert list(entries) == list(loaded) == list(state)
    for name, entry in entries.items():
        assert entry.shape == tuple(state[name].shape)
        assert getattr(torch, TORCH_DTYPES[entry.dtype]) is state[name].dtype
        assert torch.equal(loaded[name], state[name])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_storage_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(10**6)})
    read_bin(path)
    assert num_bytes_read(lambda: read_bin(path)) < 400_000


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
        (b"cbuiltins\nbytearray\n(I9999999999\ntR.", "builtins.bytearray"),
        (b"ctorch.serialization\nload\n.", "torch.serialization.load"),
        (b"\x82\x01.", "1"),
        (b"\x80\x04}}}\x92.", "NEWOBJ_EX"),
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
    assert "cut off" in str(failure(path)) or "unexpected EOF" in str(failure(path))


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


def test_compressed_storages_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(1000)})
    rewrite(path, compress=True)
    assert "has members twice or compressed" in str(failure(path))


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(4)})
    rewrite(path, byteorder=b"big")
    assert "big-endian" in str(failure(path))


def damaged(content: bytes, was: bytes, becomes: bytes) -> bytes:
    made, count = re.subn(was, lambda _: becomes, content)
    assert count == 1
    return made


@BOTH
@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (rb"K\x0a\x85", b"K\xc8\x85"),  # the shape (10,) becomes (200,)
        (rb"(?<=cpuq.K)\x0a", b"\xc8"),  # and the storage one of 200 elements
    ],
    ids=["shape", "storage"],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(
    tmp_path: Path, zipped: bool, was: bytes, becomes: bytes
) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(10)}, zipped=zipped)
    if zipped:
        with zipfile.ZipFile(path) as archive:
            content = archive.read("x/data.pkl")
        rewrite(path, data_pkl=damaged(content, was, becomes))
    else:
        path.write_bytes(damaged(path.read_bytes(), was, becomes))
    assert "is damaged" in str(failure(path))


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x02}" + b"}" * (MAX_OPCODES + 1) + b".",
        b"\x80\x02)" + b"\x85" * (MAX_TUPLES + 1) + b".",
        b"\x80\x02})" + b"\x85" * (MAX_TUPLES - 1) + b"Ns.",
        b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
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
    save(path, {"a": torch.ones(2)})
    rewrite(path, data_pkl=opcodes)
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
