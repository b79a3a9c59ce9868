"""The predicted stream as PyTorch's memory visualiser reads it."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate

WORKLOADS: list[dict[str, Any]] = [
    {},
    {"mode": "infer", "gpu": "t4"},
    {"precision": "amp-bf16", "checkpointing": "full"},
    {"allocator": "expandable"},
]


def snapshot(**keywords: Any) -> dict[str, Any]:
    e = estimate("bert-tiny", **({"batch": 8, "seq": 64, "gpu": "h200"} | keywords))
    assert e.snapshot is not None
    return e.snapshot()


@pytest.mark.parametrize("keywords", WORKLOADS, ids=str)
def test_every_free_has_its_request_and_what_is_left_lies_in_the_segments(keywords: dict[str, Any]) -> None:
    made = snapshot(**keywords)
    (entries,) = made["device_traces"]
    live: dict[int, int] = {}
    for entry in entries:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
    held = {
        block["address"]: block["requested_size"]
        for segment in made["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert held == live
    counts = Counter(entry["action"] for entry in entries)
    assert counts["free_requested"] == counts["free_completed"]


@pytest.mark.parametrize("keywords", WORKLOADS, ids=str)
def test_segments_are_filled_by_their_blocks_without_gaps(keywords: dict[str, Any]) -> None:
    for segment in snapshot(**keywords)["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
        assert segment["requested_size"] <= segment["allocated_size"] <= segment["total_size"]


def test_what_is_reserved_at_the_end_is_what_the_estimate_says() -> None:
    e = estimate("bert-tiny", batch=8, seq=64, gpu="h200")
    assert sum(s["total_size"] for s in snapshot()["segments"]) == e.peak_reserved_bytes


def test_every_request_names_operator_module_and_part() -> None:
    (entries,) = snapshot()["device_traces"]
    named = {tuple(f["name"] for f in e["frames"]) for e in entries if e["action"] == "alloc"}
    assert ("parameter", "bert.embeddings.word_embeddings", "load") in named
    assert ("addmm", "bert.encoder.layer.0.attention.self.query", "forward") in named
    assert ("embedding_dense_backward", "bert.embeddings.word_embeddings", "backward") in named


@pytest.mark.parametrize("keywords", WORKLOADS, ids=str)
def test_the_visualiser_draws_what_was_written(keywords: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    estimate("bert-tiny", **({"batch": 8, "seq": 64} | keywords)).save_snapshot(file)
    data = pickle.loads(file.read_bytes())
    assert "segments" in _memory_viz.segsum(data)
    assert f"{len(data['device_traces'][0])} entries" in _memory_viz.trace(data)
    assert "<script" in _memory_viz.trace_plot(data)
    assert "<script" in _memory_viz.segment_plot(data)
    assert [p.name for p in tmp_path.iterdir()] == ["step.pickle"]


@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_segments_that_are_there_at_the_end_have_come_on_the_way(allocator: str) -> None:
    made = snapshot(allocator=allocator)
    come = sum(e["size"] for e in made["device_traces"][0] if e["action"] in ("segment_alloc", "segment_map"))
    gone = sum(e["size"] for e in made["device_traces"][0] if e["action"] in ("segment_free", "segment_unmap"))
    assert come - gone == sum(s["total_size"] for s in made["segments"])


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(VramfitError, match=r"cannot write .*No such file or directory"):
        estimate("bert-tiny").save_snapshot(tmp_path / "nowhere" / "step.pickle")
