"""The four functions of SageMaker's inference toolkits, as these call them."""

import json
from pathlib import Path

import pytest
from tests.unit.serve.small_servers import write_head

from vramfit.errors import VramfitError, WorkloadError
from vramfit.integrations.sagemaker import input_fn, model_fn, output_fn, predict_fn
from vramfit.integrations.sagemaker.__main__ import run, serve_arguments


def test_a_request_goes_through_all_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAMFIT_SERVE", "--device emulated --memory 120MiB --seq 32")
    model = model_fn(str(write_head(tmp_path, "sequence-classification")))
    assert (model.max_length, model.run_device.name) == (32, "emulated")
    body = json.dumps({"inputs": ["the film was great", "anna"]})
    for given in (body, body.encode()):
        rows = json.loads(output_fn(predict_fn(input_fn(given, "application/json"), model), "application/json"))
        assert [set(row) for row in rows] == [{"label", "probability"}] * 2
    with pytest.raises(VramfitError, match="text is empty"):
        predict_fn(input_fn('{"inputs": ""}', "application/json; charset=utf-8"), model)


def test_other_kinds_than_json_are_refused_in_words() -> None:
    assert input_fn("{}", "") == b"{}"  # as some toolkits say nothing
    with pytest.raises(VramfitError, match="text/csv is not application/json"):
        input_fn("a,b", "text/csv")
    with pytest.raises(VramfitError, match="text/csv cannot be given"):
        output_fn([], "text/csv")
    assert output_fn([1], "text/html, */*;q=0.1") == "[1]"


@pytest.mark.parametrize("options", ["--memry 2GiB", "--memory", "--seq long", "--memory '2GiB"])
def test_wrong_options_are_named(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAMFIT_SERVE", options)
    with pytest.raises(WorkloadError, match="VRAMFIT_SERVE"):
        model_fn("anywhere")


def test_a_container_serves_what_a_job_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAMFIT_SERVE", "--memory 2GiB")
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "9000")
    monkeypatch.delenv("SAGEMAKER_BASE_DIR", raising=False)
    assert serve_arguments([]) == ["/opt/ml/model", "--host", "0.0.0.0", "--port", "9000", "--memory", "2GiB"]
    monkeypatch.setenv("VRAMFIT_SERVE", "--memory '2GiB")
    with pytest.raises(SystemExit, match=r"Error: VRAMFIT_SERVE is .*no closing quotation"):
        run(["serve"])
    with pytest.raises(SystemExit, match="train or with serve"):
        run(["dance"])
