"""A plan that is given as a file: for this model and this device, or not."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.runtime.training.small_runs import request_of, write_model

from vramfit.errors import WorkloadError
from vramfit.planner.plan import plan
from vramfit.records.plan import Plan
from vramfit.runtime.device import RunDevice
from vramfit.runtime.training.events import Event, Note
from vramfit.runtime.training.preparation import _of_data, adapted_plan, saved_plan
from vramfit.runtime.training.train import train
from vramfit.workload import Workload


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan("bert-tiny", batch=8, seq=24, memory="300MiB", precision="amp-fp16", gpu="t4")


def saved(made: Plan, folder: Path, model: str | None = None) -> str:
    file = folder / "plan.json"
    replace(made, workload=replace(made.workload, model=model or made.workload.model)).save(file)
    return str(file)


def notes(said: list[Event]) -> list[str]:
    return [event.text for event in said if isinstance(event, Note)]


def test_a_plan_for_another_model_is_refused_with_both_names_and_the_command(made: Plan, tmp_path: Path) -> None:
    request = request_of(tmp_path, plan=saved(made, tmp_path))
    with pytest.raises(WorkloadError) as caught:
        train(request)
    assert "the plan is for bert-tiny (hidden_size 128" in str(caught.value)
    assert f"not {request.model} (hidden_size 32" in str(caught.value)
    assert f"vramfit plan {request.model}" in str(caught.value.hint)
    assert not Path(request.output).exists()


def test_a_plan_for_a_model_of_the_same_sizes_under_another_name_is_taken(made: Plan, tmp_path: Path) -> None:
    twin = write_model(tmp_path / "twin")
    request = request_of(tmp_path, plan=saved(made, tmp_path, str(twin)))
    said: list[Event] = []
    assert saved_plan(request, said.append) is not None
    assert not said


def test_a_plan_for_a_model_that_is_not_here_is_taken_and_that_is_said(made: Plan, tmp_path: Path) -> None:
    request = request_of(tmp_path, plan=saved(made, tmp_path, "./elsewhere"))
    said: list[Event] = []
    assert saved_plan(request, said.append) is not None
    assert notes(said) == [f"The plan is for ./elsewhere, which is not here: is it as large as {request.model}?"]


def test_half_precision_of_a_plan_is_not_run_on_a_cpu(made: Plan, tmp_path: Path) -> None:
    request = request_of(tmp_path)
    request = replace(request, plan=saved(made, tmp_path, request.model))
    said: list[Event] = []
    record = train(request, on_event=said.append)
    assert record.settings["precision"] == "fp32"
    assert "The plan says amp-fp16, which is slow on a CPU: fp32 is taken." in notes(said)


def test_a_plan_keeps_its_precision_on_an_emulated_gpu(made: Plan) -> None:
    said: list[Event] = []
    assert adapted_plan(made, RunDevice("emulated", memory="300MiB"), None, said.append) == made
    assert "slow here: the emulated GPU computes on the CPU" in notes(said)[0]


@pytest.mark.parametrize(("gpu", "num_notes"), [("t4", 0), ("h200", 1), (None, 0)])
def test_a_plan_for_another_gpu_is_followed_and_that_is_said(made: Plan, gpu: str | None, num_notes: int) -> None:
    fp32 = replace(made, workload=replace(made.workload, precision="fp32"))
    said: list[Event] = []
    assert adapted_plan(fp32, RunDevice("cpu"), gpu, said.append) == fp32
    assert len(said) == num_notes
    assert all(text.startswith("The plan is for t4, and this is h200") for text in notes(said))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "fp32"}, "the plan says precision amp-fp16, not fp32"),
        ({"micro_batch": 3}, "the plan says micro_batch 8, not 3"),
        ({"freeze": "embeddings"}, "the plan says freeze None, not embeddings"),
        ({"graphs": True}, "the plan says graphs False, not True"),
    ],
)
def test_settings_that_the_plan_has_otherwise_are_refused(
    made: Plan, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    request = request_of(tmp_path)
    request = replace(request, plan=saved(made, tmp_path, request.model), **settings)
    with pytest.raises(WorkloadError, match=words) as caught:
        saved_plan(request, lambda event: None)
    assert "leave out what the plan says" in str(caught.value.hint)


def test_settings_that_the_plan_has_too_are_taken(made: Plan, tmp_path: Path) -> None:
    request = request_of(tmp_path)
    request = replace(request, plan=saved(made, tmp_path, request.model), precision="amp-fp16", micro_batch=8)
    assert saved_plan(request, lambda event: None) is not None


def test_recorded_passes_of_a_plan_are_left_out_on_a_cpu(tmp_path: Path) -> None:
    planned = plan("bert-tiny", batch=8, lengths=[5, 24], gpu="h200", memory="2GiB", graphs=True)
    assert planned.workload.graphs
    found = adapted_plan(planned, RunDevice("cpu"), None, lambda event: None)
    assert not found.workload.graphs
    assert found.workload.precision == "fp32"


@pytest.mark.parametrize(
    ("of_row", "problem"),
    [({"num_texts": 3}, "texts 2 was planned"), ({"num_texts": 2, "scores": (1.0,)}, "loss in-batch was planned")],
)
def test_a_plan_that_names_no_texts_or_loss_is_for_the_usual_ones(of_row: dict[str, Any], problem: str) -> None:
    planned = Workload(model="bert-tiny", task="embedding", batch=8, seq=16, loop="stepper")
    request: Any = SimpleNamespace(task="embedding", loss=None, texts=None)
    pairs, data = (_data(row) for row in ({"num_texts": 2}, of_row))
    assert _of_data(request, pairs, planned) == {"texts": 2, "loss": "in-batch"}
    with pytest.raises(WorkloadError, match=problem):
        _of_data(request, data, planned)


def _data(row: dict[str, Any]) -> Any:
    return SimpleNamespace(teacher_width=None, train=SimpleNamespace(references=[row]))
