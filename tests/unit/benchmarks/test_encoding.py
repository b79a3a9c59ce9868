"""The benchmark of the drop-ins: all sides run, and give the same."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

pytest.importorskip("sentence_transformers")

import encoding
from tests.unit.loader.checkpoints import minilm


def _asked(folder: Path) -> list[str]:
    texts = [f"a text of {n} words, or so" + " and more" * n for n in range(45)]
    (folder / "texts.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in texts), encoding="utf-8")
    rows = "".join(f"{text}\t{text[::-1]}\n" for text in texts)
    (folder / "pairs.tsv").write_text("sentence1\tsentence2\n" + rows, encoding="utf-8")
    data = ["--data", str(folder / "texts.csv"), "--pairs", str(folder / "pairs.tsv")]
    return [*data, "--tokenizer", str(minilm())]


@pytest.mark.slow
def test_the_work_of_the_host_is_measured_around_a_model_that_costs_nothing(tmp_path: Path) -> None:
    out = tmp_path / "host.jsonl"
    assert encoding.main([*_asked(tmp_path), "--host", "--small", "--label", "now", "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found = [(line["work"], line["parallel"]) for line in lines]
    assert found == [("encode", True), ("encode", False), ("rerank", True), ("rerank", False)]
    for line in lines:
        assert line["cpu_s"].keys() == {"batch-32", "batch-256", "vramfit", "tokenizer"}
        assert line["largest_difference"] < 1e-5
        assert line["num_inputs"] == encoding.NUM_SMALL
        assert line["label"] == "now"


@pytest.mark.slow
def test_a_small_run_on_a_cpu_has_all_sides_with_the_same_results(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    asked = [*_asked(tmp_path), "--device", "cpu", "--small", "--out", str(out)]
    assert encoding.main(asked) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["work"] for line in lines] == ["encode", "rerank"]
    for line in lines:
        assert line["sides"].keys() == {"batch-32", "batch-64", "vramfit"}
        assert all(len(side["seconds"]) == encoding.NUM_TURNS for side in line["sides"].values())
        assert all(side["largest_difference"] < 1e-5 for side in line["sides"].values())
        assert line["num_inputs"] == encoding.NUM_SMALL
        assert line["best"] in ("batch-32", "batch-64")
    assert encoding.main(asked) == 0
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2


def test_a_side_that_ran_out_of_memory_is_no_best(tmp_path: Path) -> None:
    made = [0.5]
    found = {
        "batch-32": {"seconds": [4.0, 2.0, 3.0], "made": made},
        "batch-64": {"seconds": [], "out_of_memory": "CUDA out of memory"},
        "batch-128": {"seconds": [2.0, 2.0, 2.0], "made": made},
        "vramfit": {"seconds": [1.0, 1.0, 1.0], "made": made},
    }
    line = encoding.summary(found, num_inputs=6, num_tokens=60)
    assert line["best"] == "batch-128"
    assert (line["times_best"], line["times_default"]) == (2.0, 3.0)
    assert line["sides"]["vramfit"]["tokens_per_s"] == 60
    assert line["sides"]["batch-64"] == {"out_of_memory": "CUDA out of memory"}
