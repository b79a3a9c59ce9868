"""Tensors opened by name, and the scan of their data: in every dtype and kind of file, in pieces."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vramfit.checkpoints import reading
from vramfit.checkpoints.pickle_file import read_bin
from vramfit.checkpoints.safetensors_file import TensorEntry, read_header
from vramfit.errors import CheckpointError


def entries_of(tmp_path: Path, **tensors: torch.Tensor) -> list[TensorEntry]:
    save_file(tensors, tmp_path / "x.safetensors")
    return list(read_header(tmp_path / "x.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_nan_and_infinite_are_counted_in_every_dtype(dtype: torch.dtype) -> None:
    values = torch.ones(100)
    values[3], values[50], values[51] = float("nan"), float("inf"), float("-inf")
    found = reading.scan_tensor(values.to(dtype))
    assert (found.num_nan, found.num_infinite, found.all_zero) == (1, 2, False)


def test_a_large_tensor_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    usual = torch.isfinite

    def counted(values: torch.Tensor) -> torch.Tensor:
        largest.append(values.numel())
        return usual(values)

    monkeypatch.setattr(torch, "isfinite", counted)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1000)
    values = torch.zeros(5_000)
    values[-1] = float("nan")
    assert reading.scan_tensor(values).num_nan == 1
    assert max(largest) == 250


def test_zero_biases_are_no_finding_but_zero_weights_are(tmp_path: Path) -> None:
    zeros = {"a.bias": torch.zeros(9), "b.weight": torch.zeros(3, 3), "LayerNorm.weight": torch.zeros(3)}
    found = reading.check_values(entries_of(tmp_path, **zeros), "safetensors")
    assert [f.severity for f in found] == ["warning", "warning"]
    assert all("x.safetensors" in f.what for f in found)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pickles_are_scanned_too(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.bin"
    state = {"a": torch.ones(4, 3).t(), "b": torch.tensor([1.0, float("nan")])}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    (found,) = reading.check_values(read_bin(path), "bin")
    assert "tensor b in x.bin: 1 of 2 numbers are NaN" in found.what


def test_whole_numbers_and_empty_tensors_are_passed_over(tmp_path: Path) -> None:
    entries = entries_of(tmp_path, ids=torch.zeros(4, dtype=torch.int64), e=torch.zeros(0, 3))
    (found,) = reading.check_values(entries, "safetensors")
    assert found.severity == "ok"


def test_the_list_of_findings_is_bounded(tmp_path: Path) -> None:
    many = {f"{i}.weight": torch.full((2, 2), float("nan")) for i in range(60)}
    assert len(reading.check_values(entries_of(tmp_path, **many), "safetensors")) == reading.MAX_LISTED


def test_a_file_that_shrank_since_its_header_was_read_is_told_so(tmp_path: Path) -> None:
    entries = entries_of(tmp_path, a=torch.ones(1000))
    path = tmp_path / "x.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        reading.check_values(entries, "safetensors")
    assert caught.value.file == str(path)
