"""Checkpoints: whole or not there, whatever happens while they are written."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vramfit.errors import VramfitError
from vramfit.runtime.training import checkpoints
from vramfit.runtime.training.checkpoints import CheckpointStore, is_whole
from vramfit.runtime.training.saving import TYPES, write_tensors


def tensors(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": {"w": torch.full((3, 2), value), "b": torch.zeros(2)}, "random": {"host": torch.get_rng_state()}}


def save(store: CheckpointStore, *steps: int, best: int | None = None) -> None:
    for step in steps:
        store.save(step, tensors(step), {"step": step}, best=best)


def test_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    written = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in TYPES}
    written |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "view": torch.arange(8.0).reshape(2, 4).T}
    write_tensors(tmp_path / "t.safetensors", written)
    read = load_file(tmp_path / "t.safetensors")
    assert set(read) == set(written)
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_newest_whole_checkpoint_is_found_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=2)
    assert store.newest() is None
    save(store, 1, 2, 3, 4, best=1)
    assert store.steps() == [1, 3, 4]
    found = store.newest()
    assert found is not None
    assert found.state() == {"step": 4}
    assert torch.equal(found.tensors("weights")["w"], torch.full((3, 2), 4.0))


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "no manifest", "half a manifest"])
def test_a_damaged_one_is_recognised_and_the_one_before_taken(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path / "c")
    save(store, 10, 20)
    folder = tmp_path / "c" / "step-00000020"
    file, manifest = folder / "weights.safetensors", folder / "manifest.json"
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        file.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:40])
    found = store.newest()
    assert found is not None
    assert found.step == 10
    assert store.damaged == ["step-00000020"]
    save(store, 20)  # the run has come there again
    assert is_whole(folder)


def test_what_a_kill_left_half_done_is_cleared_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    save(store, 1)
    half = tmp_path / "c" / ".step-00000002.new"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    assert store.steps() == [1]
    store.clean()
    assert not half.exists()


def test_a_full_disk_keeps_the_last_good_one_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path / "c")
    save(store, 30)

    def full(path: Path, content: Any) -> None:
        path.write_bytes(b"as much as there was room for")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_tensors", full)
    with pytest.raises(VramfitError, match=r"disk is full.*step 40.*the checkpoint of step 30 is whole") as caught:
        save(store, 40)
    assert "--resume" in str(caught.value.hint)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000030"]
    found = store.newest()
    assert found is not None
    assert found.step == 30


def damage(store: CheckpointStore, step: int) -> None:
    (store.folder / f"step-{step:08d}" / "manifest.json").write_text("garbage")


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_just_saved_stays_beside_damaged_ones_of_later_steps(tmp_path: Path, keep: int) -> None:
    before = CheckpointStore(tmp_path / "c", keep=keep)
    save(before, 300, 500, 501, best=300)
    for step in before.steps()[1:]:
        damage(before, step)
    store = CheckpointStore(tmp_path / "c", keep=keep)
    found = store.newest()
    assert found is not None
    assert found.step == 300
    save(store, 320, 340, 360, best=300)
    found = CheckpointStore(tmp_path / "c", keep=keep).newest()
    assert found is not None
    assert found.step == 360


def test_a_damaged_one_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path / "c"), 10, 20)
    damage(CheckpointStore(tmp_path / "c"), 20)
    store = CheckpointStore(tmp_path / "c")
    assert store.newest() is not None
    save(store, 15, 30, 40)
    assert [step for step in store.steps() if is_whole(tmp_path / "c" / f"step-{step:08d}")] == [30, 40]
    save(store, 50)
    damage(store, 50)
    assert store.newest() is not None
    save(store, 50, 60, 70)  # the run has come there again: it is whole, and goes when its turn comes
    assert 50 not in store.steps()
