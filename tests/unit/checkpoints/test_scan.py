"""The scan of the data: in every dtype, in bounded memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vramfit.checkpoints import scan
from vramfit.checkpoints.safetensors_header import read_header
from vramfit.errors import CheckpointError


def entries_of(tmp_path: Path, **tensors: torch.Tensor) -> list[scan.TensorEntry]:
    save_file(tensors, tmp_path / "x.safetensors")
    return list(read_header(tmp_path / "x.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_nan_and_infinite_are_counted_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.ones(100)
    values[3], values[50], values[51] = float("nan"), float("inf"), float("-inf")
    (entry,) = entries_of(tmp_path, a=values.to(dtype))
    found = scan.scan_tensor(entry)
    assert (found.num_nan, found.num_infinite, found.all_zero) == (1, 2, False)


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CHUNK_BYTES", 1000)
    values = torch.zeros(5_000)
    values[-1] = float("nan")
    (entry,) = entries_of(tmp_path, a=values)
    assert all(len(chunk) <= 1000 for chunk in scan._chunks(entry))
    assert scan.scan_tensor(entry).num_nan == 1


def test_zero_biases_are_no_finding_but_zero_weights_are(tmp_path: Path) -> None:
    zeros = {"a.bias": torch.zeros(9), "b.weight": torch.zeros(3, 3), "LayerNorm.weight": torch.zeros(3)}
    found = scan.check_values(entries_of(tmp_path, **zeros))
    assert [f.severity for f in found] == ["warning", "warning"]
    assert all("x.safetensors" in f.what for f in found)


def test_whole_numbers_and_empty_tensors_are_passed_over(tmp_path: Path) -> None:
    (found,) = scan.check_values(entries_of(tmp_path, ids=torch.zeros(4, dtype=torch.int64), e=torch.zeros(0, 3)))
    assert found.severity == "ok"


def test_the_list_of_findings_is_bounded(tmp_path: Path) -> None:
    many = {f"{i}.weight": torch.full((2, 2), float("nan")) for i in range(60)}
    assert len(scan.check_values(entries_of(tmp_path, **many))) == scan.MAX_LISTED


def test_a_file_that_shrank_since_its_header_was_read_is_told_so(tmp_path: Path) -> None:
    (entry,) = entries_of(tmp_path, a=torch.ones(1000))
    path = Path(entry.file)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="ends inside tensor a") as caught:
        scan.scan_tensor(entry)
    assert caught.value.tensor == "a"
