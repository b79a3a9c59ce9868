"""The request for a training job: the smallest instance that a plan fits on, and everything the entry point reads."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vramfit.devices.catalogue import find_instance
from vramfit.errors import MissingExtra, NoPlanFits, VramfitError, WorkloadError
from vramfit.integrations.sagemaker.entry import METRIC_DEFINITIONS
from vramfit.integrations.sagemaker.job import EVALUATION, TRAIN, check_hyperparameters, read_hyperparameters
from vramfit.records.plan import InstanceFit
from vramfit.runtime.training.request import RunOption, TrainRequest
from vramfit.settings import record_of
from vramfit.settings.values import Count, Number, Switch, Text
from vramfit.tasks import DEFAULT

CHECKPOINTS = "/opt/ml/checkpoints"
NEEDED = ("data", "output", "image", "role")
"""Without these nothing can be sent."""
MAX_HOURS = 28 * 24


@dataclass(frozen=True, kw_only=True)
class Matching(Text):
    """A text of a form."""

    pattern: str = ""
    words: str = ""

    def is_right(self, value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None

    def wanted(self, value: Any) -> str:
        return self.words


_S3 = Matching(
    pattern=r"s3://[a-z0-9.\-]{3,63}(/.*)?", words="an S3 address such as s3://bucket/folder", metavar="s3://…"
)
_ROLE = Matching(
    pattern=r"arn:aws[a-z\-]*:iam::\d{12}:role/.+",
    words="an ARN such as arn:aws:iam::123456789012:role/name",
    metavar="ARN",
)
_NAME = Matching(
    pattern=r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", words="letters, digits and hyphens, up to 63 of them", metavar="NAME"
)
_HOURS = Number(high=MAX_HOURS + 1e-9, words=f"a number up to {MAX_HOURS}")
LAUNCH_OPTIONS: tuple[RunOption, ...] = (
    RunOption("data", _S3, None, "S3 address of the training data.", "aws"),
    RunOption("eval_data", _S3, None, "S3 address of the evaluation data.", "aws"),
    RunOption("weights", _S3, None, "S3 address of the model's folder. Default: fetched by its name.", "aws"),
    RunOption("output", _S3, None, "S3 address for model and checkpoints.", "aws"),
    RunOption("image", Text(metavar="URI"), None, "Container image (see docs/sagemaker.md).", "aws"),
    RunOption("role", _ROLE, None, "Role that the job runs as.", "aws"),
    RunOption("region", Text(), None, "AWS region. Default: as AWS is configured.", "aws"),
    RunOption("name", _NAME, None, "Name of the job. Default: made from the time.", "aws"),
    RunOption(
        "instance", Text(metavar="ml.…"), None, "Instance type. Default: the smallest on which the job fits.", "aws"
    ),
    RunOption("num_instances", Count(), 1, "Number of instances.", "aws", option="instances"),
    RunOption("spot", Switch(), False, "Use spot capacity, which AWS may interrupt; the job then resumes.", "aws"),
    RunOption("max_hours", _HOURS, 24, "Time limit of the job, in hours.", "aws"),
    RunOption("volume_gib", Count(), 50, "Disk of the instance in GiB.", "aws", option="volume"),
    RunOption("task", Text(optional=False), DEFAULT, "Head on the encoder.", "job"),
    RunOption("batch", Count(), 32, "Effective batch: samples per optimizer step.", "job"),
    RunOption("seq", Count(), 128, "Tokens per sequence.", "job"),
    RunOption(
        "allow",
        Text(metavar="NAME,…"),
        None,
        "Different training that the plan may use: freeze, lora, int8, nf4, bf16, adafactor, sgd.",
        "job",
    ),
)
"""What a job is asked for besides its model and further hyperparameters."""
_Options: Any = record_of(
    [
        ("model", str, ...),
        *(
            (o.keyword, o.value.annotation if o.default is not None else o.value.kind | None, o.default)
            for o in LAUNCH_OPTIONS
        ),
        ("hyperparameters", Any, None),
    ],
    __name__,
)


class LaunchSettings(_Options):  # type: ignore[misc]
    """One training job, described: a model, a field for each option, and further hyperparameters as text.

    Raises:
        WorkloadError: every problem at once.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        problems = []
        for option in LAUNCH_OPTIONS:
            value = option.value.normal(getattr(self, option.keyword))
            object.__setattr__(self, option.keyword, value)
            problems += [] if value is None else option.value.problems(option.keyword, value)
        problems += check_hyperparameters(self._hyperparameters())
        if problems:
            raise WorkloadError(problems)

    @property
    def missing(self) -> tuple[str, ...]:
        """What is needed before anything can be sent."""
        return tuple(name for name in NEEDED if getattr(self, name) is None)

    def plan_keywords(self) -> dict[str, Any]:
        """What the job fixes of its plan."""
        given, _ = read_hyperparameters(self._hyperparameters())
        request = TrainRequest(**({"data": "-", "output": "-"} | given | {"model": self.model}))
        return {**request.settings(), "batch": request.batch, "allow": ",".join(request.allow) or None}

    def _hyperparameters(self) -> dict[str, str]:
        own = {"task": self.task, "batch": str(self.batch), "seq": str(self.seq)}
        if self.weights is None:
            own["model"] = self.model
        if self.allow is not None:
            own["allow"] = self.allow
        return {**own, **(self.hyperparameters or {})}

    def request(self, instance: str) -> dict[str, Any]:
        """What `create_training_job` is called with; what is missing is left out.

        >>> made = LaunchSettings(model="bert-tiny", name="first").request("ml.g4dn.xlarge")
        >>> made["ResourceConfig"]["InstanceType"], made["HyperParameters"]["batch"]
        ('ml.g4dn.xlarge', '32')
        """
        name = self.name or f"vramfit-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
        seconds = int(3600 * self.max_hours)
        made: dict[str, Any] = {
            "TrainingJobName": name,
            "AlgorithmSpecification": {
                **({"TrainingImage": self.image} if self.image else {}),
                "TrainingInputMode": "File",
                "MetricDefinitions": METRIC_DEFINITIONS,
            },
            "HyperParameters": self._hyperparameters(),
            "InputDataConfig": self._channels(),
            "ResourceConfig": {
                "InstanceType": instance,
                "InstanceCount": self.num_instances,
                "VolumeSizeInGB": self.volume_gib,
            },
            "StoppingCondition": {"MaxRuntimeInSeconds": seconds},
        }
        if self.role is not None:
            made["RoleArn"] = self.role
        if self.output is not None:
            made["OutputDataConfig"] = {"S3OutputPath": self.output}
            address = f"{self.output.rstrip('/')}/{name}/checkpoints"
            made["CheckpointConfig"] = {"S3Uri": address, "LocalPath": CHECKPOINTS}
        if self.spot:
            made["EnableManagedSpotTraining"] = True
            made["StoppingCondition"]["MaxWaitTimeInSeconds"] = 2 * seconds
        return made

    def _channels(self) -> list[dict[str, Any]]:
        given = {TRAIN[0]: self.data, EVALUATION[0]: self.eval_data, "model": self.weights}
        return [
            {
                "ChannelName": name,
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": address}},
                "InputMode": "File",
            }
            for name, address in given.items()
            if address is not None
        ]


def choose_instance(settings: LaunchSettings, fits: Sequence[InstanceFit]) -> InstanceFit:
    """The instance asked for, or the smallest that the job fits on.

    Args:
        fits: as `planner.fit_instances` gives them.

    Raises:
        NoPlanFits: it does not fit there, or nowhere.
        UnknownGPU: no such instance.
    """
    able = [fit for fit in fits if fit.fits]
    smallest = able[0] if able else None
    if settings.instance is None:
        if smallest is None:
            raise NoPlanFits(f"{settings.model} with batch {settings.batch} fits none of SageMaker's GPUs")
        return smallest
    wanted = find_instance(settings.instance).name
    found = next((fit for fit in fits if fit.instance == wanted), None)
    if found is not None and found.fits:
        return found
    why = found.settings if found is not None else "its GPU is too old for this torch"
    raise NoPlanFits(
        f"{settings.model} with batch {settings.batch} does not fit on {wanted}: {why}",
        hint=f"the smallest that does is {smallest.instance}" if smallest else None,
    )


def submit(request: dict[str, Any], *, region: str | None = None, client: Any = None) -> str:
    """Send a request; gives the ARN of the job.

    Args:
        client: of boto3, for sagemaker; None makes one.

    Raises:
        MissingExtra: boto3 is not installed.
        VramfitError: AWS refuses, or cannot be reached.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError:
        raise MissingExtra("vramfit sagemaker launch --submit", extra="sagemaker", package="boto3") from None
    try:
        client = client or boto3.client("sagemaker", region_name=region)
        return str(client.create_training_job(**request)["TrainingJobArn"])
    except (BotoCoreError, ClientError) as error:
        reason = " ".join(str(error).split())
        raise VramfitError(
            f"SageMaker was not asked: {reason}", hint="aws configure sets credentials and region"
        ) from None
