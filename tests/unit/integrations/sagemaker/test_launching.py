"""Requests for training jobs: on the smallest instance that fits, and such as botocore takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.errors import NoPlanFits, VramfitError, WorkloadError
from vramfit.integrations.sagemaker.job import make_request, read_job
from vramfit.integrations.sagemaker.launching import LaunchSettings, choose_instance, submit
from vramfit.records.plan import InstanceFit

boto3 = pytest.importorskip("boto3", reason='requests to AWS: pip install "vramfit[sagemaker]"')
from botocore.stub import Stubber  # noqa: E402

WHOLE: dict[str, Any] = {
    "model": "bert-large-uncased",
    "data": "s3://bucket/train.csv",
    "eval_data": "s3://bucket/dev.csv",
    "weights": "s3://bucket/model/",
    "output": "s3://bucket/runs/",
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/vramfit:latest",
    "role": "arn:aws:iam::123456789012:role/train",
    "name": "first-try",
    "spot": True,
    "hyperparameters": {"epochs": "2", "fp16": "True"},
}
ARN = "arn:aws:sagemaker:eu-west-1:123456789012:training-job/first-try"


def client() -> Any:
    return boto3.client(
        "sagemaker", region_name="eu-west-1", aws_access_key_id="nobody", aws_secret_access_key="nothing"
    )


def fit(instance: str, gpu: str, budget: int, fits: bool) -> InstanceFit:
    return InstanceFit(
        instance=instance, gpu=gpu, num_gpus=1, budget_bytes=budget, fits=fits, settings="" if fits else "too small"
    )


@pytest.mark.parametrize("leave_out", [(), ("eval_data", "weights", "spot", "name", "hyperparameters")])
def test_botocore_takes_the_request_as_it_is(leave_out: tuple[str, ...]) -> None:
    settings = LaunchSettings(**{name: value for name, value in WHOLE.items() if name not in leave_out})
    assert settings.missing == ()
    request = settings.request("ml.g4dn.xlarge")
    mine = client()
    with Stubber(mine) as stub:
        stub.add_response("create_training_job", {"TrainingJobArn": ARN}, request)
        assert submit(request, client=mine) == ARN
        stub.assert_no_pending_responses()


def test_a_request_that_botocore_refuses_is_an_error_in_words() -> None:
    request = LaunchSettings(**WHOLE).request("ml.g4dn.xlarge")
    request["ResourceConfig"]["InstanceCount"] = "one"
    with Stubber(mine := client()) as stub:
        stub.add_response("create_training_job", {"TrainingJobArn": ARN})
        with pytest.raises(VramfitError, match="InstanceCount"):
            submit(request, client=mine)


def test_refusals_of_aws_are_errors_in_words() -> None:
    request = LaunchSettings(**WHOLE).request("ml.g4dn.xlarge")
    with Stubber(mine := client()) as stub:
        stub.add_client_error("create_training_job", "ResourceLimitExceeded", "0 instances are allowed")
        with pytest.raises(VramfitError, match="0 instances are allowed"):
            submit(request, client=mine)


def test_the_entry_point_understands_what_is_sent(tmp_path: Path) -> None:
    request = LaunchSettings(**WHOLE).request("ml.g5.xlarge")
    config = tmp_path / "input/config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text(json.dumps(request["HyperParameters"]))
    channels = {c["ChannelName"]: {"TrainingInputMode": c["InputMode"]} for c in request["InputDataConfig"]}
    (config / "inputdataconfig.json").write_text(json.dumps(channels))
    for name in channels:
        folder = tmp_path / "input/data" / name
        folder.mkdir(parents=True)
        (folder / ("config.json" if name == "model" else "rows.csv")).write_text("{}")
    made = make_request(read_job(None, {"SAGEMAKER_BASE_DIR": str(tmp_path)}))
    assert (made.batch, made.seq, made.epochs, made.precision) == (32, 128, 2.0, "amp-fp16")
    assert made.model == str(tmp_path / "input/data/model")
    assert made.eval_data == str(tmp_path / "input/data/validation/rows.csv")
    assert request["CheckpointConfig"] == {
        "S3Uri": "s3://bucket/runs/first-try/checkpoints",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert all(isinstance(value, str) for value in request["HyperParameters"].values())


def test_the_smallest_that_fits_is_taken_unless_another_is_asked_for() -> None:
    fits = [
        fit("ml.g5.xlarge", "a10g", 21, True),
        fit("ml.p4d.24xlarge", "a100-40gb", 38, True),
        fit("ml.g4dn.xlarge", "t4", 14, False),
    ]
    assert choose_instance(LaunchSettings(model="m"), fits).instance == "ml.g5.xlarge"
    assert choose_instance(LaunchSettings(model="m", instance="p4d.24xlarge"), fits).instance == "ml.p4d.24xlarge"
    with pytest.raises(NoPlanFits, match=r"does not fit on ml\.g4dn\.xlarge: too small") as caught:
        choose_instance(LaunchSettings(model="m", instance="ml.g4dn.xlarge"), fits)
    assert caught.value.hint == "the smallest that does is ml.g5.xlarge"
    with pytest.raises(NoPlanFits, match="fits none"):
        choose_instance(LaunchSettings(model="m"), fits[2:])


def test_a_plan_keeps_what_the_job_fixes() -> None:
    keywords = LaunchSettings(**WHOLE).plan_keywords()
    assert (keywords["batch"], keywords["seq"], keywords["precision"]) == (32, 128, "amp-fp16")


def test_every_problem_is_said_at_once() -> None:
    wrong = {"data": "bucket/train.csv", "name": "a_b", "role": "me", "max_hours": 0, "num_instances": 0}
    with pytest.raises(WorkloadError) as caught:
        LaunchSettings(model="m", hyperparameters={"epocs": "1"}, **wrong)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 6
    assert LaunchSettings(model="m").missing == ("data", "output", "image", "role")
