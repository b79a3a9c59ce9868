"""What may be asked, as parameters of the API: the keywords of `Workload`, bounded."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vramfit.devices.catalogue import all_gpus
from vramfit.models.catalogue import model_names
from vramfit.tasks import DEFAULT, task_names
from vramfit.web.limits import MAX_BATCH, MAX_LABELS, MAX_NAME, MAX_RANK, MAX_SEQ
from vramfit.workload import (
    Allocator,
    Attention,
    Casts,
    Loop,
    Mask,
    Mode,
    Offload,
    Optimizer,
    Precision,
    Quantize,
)

if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[task_names()]

_Layers = r"[1-9][0-9]{0,2}"
Size = Annotated[
    str,
    Field(
        max_length=24,
        pattern=r"^[0-9]{1,12}(\.[0-9]{1,6})? ?([KMGT]i?B|B)?$",
        description="What PyTorch's allocator may reserve, such as 11.17GiB; in place of the GPU's own memory.",
        examples=["11.17GiB"],
    ),
]


def _names(known: tuple[str, ...]) -> dict[str, Any]:
    """Shown in the schema; a wrong name is answered with the nearest ones, not with all of them."""
    return {"enum": list(known)}


class JobQuery(BaseModel):
    """The job and the GPU, whatever way it is done."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        default="bert-base-uncased",
        min_length=1,
        max_length=MAX_NAME,
        description="A model of the catalogue.",
        json_schema_extra=_names(model_names()),
    )
    task: TaskName = Field(default=DEFAULT, description="The head on the encoder.")
    seq: int = Field(default=128, ge=1, le=MAX_SEQ, description="Tokens a sequence, padding included.")
    num_labels: int | None = Field(default=None, ge=1, le=MAX_LABELS, description="Size of a classification head.")
    mask: Mask = Field(default="padded", description="Whether an attention mask is given, and hides anything.")
    gpu: str | None = Field(
        default="t4",
        min_length=1,
        max_length=MAX_NAME,
        description="A GPU of the catalogue.",
        json_schema_extra=_names(tuple(gpu.name for gpu in all_gpus())),
    )
    memory: Size | None = None


class SettingsQuery(JobQuery):
    """A job with all its settings."""

    mode: Mode = Field(default="train", description="`forward` keeps what a backward pass needs; `infer` does not.")
    accumulate: int = Field(default=1, ge=1, le=MAX_BATCH, description="Micro-batches a step.")
    precision: Precision = Field(default="fp32", description="Arithmetic.")
    attention: Attention | None = Field(default=None, description="Attention kernel; the model's own unless given.")
    checkpointing: str | None = Field(
        default=None, pattern=rf"^(full|{_Layers})$", description="`full`, or the first k layers."
    )
    freeze: str | None = Field(
        default=None,
        pattern=rf"^(embeddings|encoder|backbone|{_Layers})$",
        description="`embeddings`, `encoder`, `backbone`, or the k lowest layers.",
    )
    optimizer: Optimizer = Field(default="adamw", description="`adamw` is torch's default.")
    max_grad_norm: float | None = Field(default=None, gt=0, le=1e6, description="Clip the gradient to this norm.")
    lora: int | None = Field(default=None, ge=1, le=MAX_RANK, description="Rank of LoRA adapters.")
    quantize: Quantize | None = Field(default=None, description="Linear weights in fewer bits.")
    offload: Offload | None = Field(default=None, description="What waits in host memory.")
    compile: bool = Field(default=False, description="`torch.compile` on the model's layers.")
    fused: bool = Field(default=False, description="In packed amp-* training, layers as one function each.")
    graphs: bool = Field(default=False, description="Packed passes recorded as CUDA graphs, and replayed.")
    allocator: Allocator = Field(default="default", description="`expandable`: segments that grow in place.")
    casts: Casts = Field(default="each", description="Under autocast: `together` casts a layer's weights at once.")
    loop: Loop = Field(default="plain", description="The usual PyTorch loop, or vramfit's Stepper.")


class EstimateQuery(SettingsQuery):
    """A job with all its settings and its batch."""

    batch: int = Field(default=8, ge=1, le=MAX_BATCH, description="Samples that one optimizer step sees.")
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BATCH,
        description="Samples that a forward pass sees; else it follows from accumulate.",
    )


class MaxBatchQuery(SettingsQuery):
    """A job whose largest batch is looked for."""


class PlanQuery(JobQuery):
    """A training job for which settings are looked for."""

    batch: int = Field(default=32, ge=1, le=MAX_BATCH, description="Samples that one optimizer step sees; kept.")
    allow: str | None = Field(
        default=None,
        max_length=60,
        pattern=r"^[a-z0-9]+(,[a-z0-9]+){0,7}$",
        description="What changes the training and may be used: freeze, lora, int8, bf16, adafactor, sgd.",
        examples=["freeze,lora"],
    )
    exact: bool = Field(default=False, description="Same maths only: fp32, no 8-bit optimizer.")


Query = EstimateQuery | MaxBatchQuery | PlanQuery


def keywords_of(query: JobQuery) -> dict[str, Any]:
    """Keywords for `estimate`, `max_batch` or `plan`; the model is left out."""
    given = {name: value for name, value in query.model_dump(exclude={"model"}).items() if value is not None}
    for name in ("checkpointing", "freeze"):
        if str(given.get(name, "")).isdecimal():
            given[name] = int(given[name])
    if given.get("accumulate") == 1 and (given.get("mode", "train") != "train" or "micro_batch" in given):
        del given["accumulate"]  # it was not given, and follows
    return given
