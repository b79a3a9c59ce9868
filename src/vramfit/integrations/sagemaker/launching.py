"""The request for a training job: the smallest instance that a plan fits on, and everything the entry point reads."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vramfit.devices.catalogue import find_instance
from vramfit.errors import MissingExtra, NoPlanFits, VramfitError, WorkloadError
from vramfit.integrations.sagemaker.entry import METRIC_DEFINITIONS
from vramfit.integrations.sagemaker.hyperparameters import check_hyperparameters, given_settings
from vramfit.integrations.sagemaker.job import EVALUATION, TRAIN
from vramfit.records.plan import InstanceFit
from vramfit.runtime.training.request import TrainRequest
from vramfit.tasks import DEFAULT

CHECKPOINTS = "/opt/ml/checkpoints"
JOB_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
NEEDED = ("data", "output", "image", "role")
"""Without these nothing can be sent."""
MAX_HOURS = 28 * 24


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """One training job, described.

    Raises:
        WorkloadError: every problem at once.
    """

    model: str
    """A catalogue name, a hub id or a folder; what the plan is made for."""
    data: str | None = None
    """S3 address of the training data."""
    eval_data: str | None = None
    weights: str | None = None
    """S3 address of a folder with the model; without it the job fetches `model` by its name."""
    output: str | None = None
    """S3 address for the model and the checkpoints."""
    image: str | None = None
    """The container, as a registry names it."""
    role: str | None = None
    """ARN of the role that the job runs as."""
    name: str | None = None
    task: str = DEFAULT
    batch: int = 32
    seq: int = 128
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    """Further ones, as the entry point takes them."""
    instance: str | None = None
    """None takes the smallest on which there is a plan."""
    num_instances: int = 1
    spot: bool = False
    max_hours: float = 24
    volume_gib: int = 50

    def __post_init__(self) -> None:
        problems = [
            f"{name} {value!r} is not an S3 address such as s3://bucket/folder"
            for name in ("data", "eval_data", "weights", "output")
            if (value := getattr(self, name)) is not None and not re.fullmatch(r"s3://[a-z0-9.\-]{3,63}(/.*)?", value)
        ]
        if self.name is not None and not JOB_NAME.fullmatch(self.name):
            problems.append(f"name {self.name!r} is not letters, digits and hyphens, up to 63 of them")
        if self.role is not None and not re.fullmatch(r"arn:aws[a-z\-]*:iam::\d{12}:role/.+", self.role):
            problems.append(f"role {self.role!r} is not an ARN such as arn:aws:iam::123456789012:role/name")
        if not 0 < self.max_hours <= MAX_HOURS:
            problems.append(f"max_hours {self.max_hours!r} is not a number up to {MAX_HOURS}")
        problems += [
            f"{name} {getattr(self, name)!r} is not a whole number from 1"
            for name in ("num_instances", "volume_gib")
            if getattr(self, name) < 1
        ]
        problems += check_hyperparameters(self._hyperparameters())
        if problems:
            raise WorkloadError(problems)

    @property
    def missing(self) -> tuple[str, ...]:
        """What is needed before anything can be sent."""
        return tuple(name for name in NEEDED if getattr(self, name) is None)

    def plan_keywords(self) -> dict[str, Any]:
        """What the job fixes of its plan."""
        given = given_settings(self._hyperparameters())
        request = TrainRequest(**({"data": "-", "output": "-"} | given | {"model": self.model}))
        return {**request.settings(), "batch": request.batch, "allow": ",".join(request.allow) or None}

    def _hyperparameters(self) -> dict[str, str]:
        own = {"task": self.task, "batch": str(self.batch), "seq": str(self.seq)}
        if self.weights is None:
            own["model"] = self.model
        return {**own, **self.hyperparameters}

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
