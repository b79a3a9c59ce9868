"""`vramfit sagemaker launch` from the command line: shown, never sent."""

import json

import pytest

from tests.integration.command import vramfit


def test_the_smallest_instance_and_the_request_are_shown_and_nothing_is_sent() -> None:
    done = vramfit(
        *("sagemaker", "launch", "bert-tiny", "--batch", "8", "--seq", "32", "--data", "s3://bucket/train.csv"),
        *("--hyperparameter", "epochs=2", "--name", "mine", "--json"),
    )
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["instance"]["instance"] == said["request"]["ResourceConfig"]["InstanceType"] == "ml.g4dn.xlarge"
    assert {fit["gpu"] for fit in said["instances"]} >= {"t4", "a10g", "h200"}
    assert all(fit["safe_reserved_bytes"] for fit in said["instances"])
    assert said["request"]["HyperParameters"]["epochs"] == "2"
    assert (said["missing"], said["arn"]) == (["output", "image", "role"], None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dance", "bert-tiny"), "'dance' is not launch"),
        (("launch", "bert-tiny", "--submit"), "--submit needs --data, --output, --image, --role"),
        (("launch", "bert-tiny", "--data", "train.csv"), "is not an S3 address"),
        (("launch", "bert-tiny", "--hyperparameter", "epocs=2"), "epocs is not known (nearest: epochs)"),
    ],
)
def test_what_cannot_be_asked_for_is_said_before_anything_is_planned(arguments: tuple[str, ...], words: str) -> None:
    done = vramfit("sagemaker", *arguments)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err
