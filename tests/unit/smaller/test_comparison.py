"""Models side by side: what a table of them says, and what it refuses."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.runtime.training.small_runs import run, write_tags

import vramfit
from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.records.codec import from_json, to_json
from vramfit.records.measurement import ModelTable
from vramfit.report.html.page import render_report
from vramfit.report.html.subject import read_subject
from vramfit.report.models import render_models


@pytest.fixture(scope="module")
def compared(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelTable:
    small = tmp_path_factory.mktemp("small") / "small"
    vramfit.distill(
        str(taught / "teacher"), str(taught / "train.csv"), output=str(small), max_steps=2, batch=8, device="cpu"
    )
    return vramfit.compare([str(taught / "teacher"), str(small)], str(taught / "dev.csv"), device="cpu", batch=4)


def test_a_table_has_what_the_verbs_say_of_each_model(compared: ModelTable, taught: Path) -> None:
    teacher, small = compared.rows
    assert (teacher.num_layers, small.num_layers) == (4, 2)
    assert teacher.num_parameters > small.num_parameters
    assert teacher.disk_bytes == (taught / "teacher" / "model.safetensors").stat().st_size
    sizes = {"batch": 4, "seq": compared.seq, "num_labels": 2}
    assert teacher.training_bytes == estimate(teacher.model, **sizes).safe_reserved_bytes
    assert small.serving_bytes == estimate(small.model, mode="infer", **sizes).safe_reserved_bytes
    assert compared.metric == "accuracy"
    assert teacher.quality == teacher.metrics["accuracy"] > 0.8
    assert all(row.samples_per_s > 0 and 0 < row.latency_s <= row.worst_latency_s for row in compared.rows)


def test_a_table_is_shown_on_a_terminal_as_json_and_as_a_report(compared: ModelTable, tmp_path: Path) -> None:
    assert from_json(ModelTable, to_json(compared)) == compared
    console = Console(width=160, record=True)
    console.print(render_models(compared))
    text = console.export_text()
    assert "teacher" in text
    assert "small" in text
    assert f"{100 * compared.rows[1].quality / compared.rows[0].quality:.1f} %" in text
    assert "Measured on CPU" in text
    file = tmp_path / "compared.json"
    file.write_text(to_json(compared))
    html = render_report(read_subject(file))
    drawn = json.loads(html.partition('id="figures">')[2].partition("</script>")[0])
    assert len(drawn) == 4
    assert [len(figure["data"]) for figure in drawn.values()] == [2] * 4
    assert drawn["models-latency"]["data"][1]["y"] == [compared.rows[1].quality]
    assert "What is not shown" not in html


def test_models_of_different_tasks_are_not_compared(taught: Path, tmp_path: Path) -> None:
    data = str(write_tags(tmp_path / "tags.jsonl"))
    run(taught, task="token-classification", data=data, output=str(tmp_path / "tagger"), max_steps=1)
    with pytest.raises(WorkloadError, match=r"has task token-classification, and .* sequence-classification"):
        vramfit.compare([str(taught / "teacher"), str(tmp_path / "tagger")], str(taught / "dev.csv"), device="cpu")


def test_one_model_is_nothing_to_compare(taught: Path) -> None:
    with pytest.raises(WorkloadError, match="give two models or more"):
        vramfit.compare([str(taught / "teacher")], str(taught / "dev.csv"))
    with pytest.raises(WorkloadError, match="named twice"):
        vramfit.compare([str(taught / "teacher")] * 2, str(taught / "dev.csv"))
