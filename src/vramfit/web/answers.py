"""What the API answers, as models that its OpenAPI page documents."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vramfit.report.verdict import Tone
from vramfit.settings.setting import Kind


class Answer(BaseModel):
    """Base of all answers: nothing that is not documented."""

    model_config = ConfigDict(extra="forbid")


class Problem(Answer):
    """Why there is no answer, in sentences."""

    error: str
    """What is wrong, with numbers."""
    hint: str | None = None
    """What to do about it."""
    problems: list[str] = []
    """Every problem, where there are several."""


class Phase(Answer):
    """The peaks of one phase."""

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class Held(Answer):
    """Like blocks that are live at the peak."""

    what: str
    category: str
    module: str
    num_blocks: int
    allocated_bytes: int


class Moment(Answer):
    """A stretch of the steady step."""

    part: str
    allocated_bytes: int
    requested_bytes: int
    breakdown: dict[str, int]


class EstimateAnswer(Answer):
    """What a job takes; requested ≤ allocated ≤ reserved ≤ process."""

    settings: dict[str, Any] = Field(description="The workload as it was understood.")
    gpu: str | None
    basis: Literal["verified", "derived"]
    torch_version: str
    fits: bool | None
    tone: Tone
    headline: str
    details: list[str]
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_process_bytes: int
    safe_reserved_bytes: int = Field(description="Upper bound of reserved; what `fits` is decided on.")
    context_bytes: int
    capacity_bytes: int | None
    total_memory_bytes: int | None
    breakdown: dict[str, int] = Field(description="Category → allocated bytes at the peak.")
    peak: str = Field(description="When the peak comes, in words.")
    peak_part: str = Field(description="The part of the step that it comes in: forward, backward, optimizer, …")
    largest: list[Held]
    timeline: list[Moment]
    phases: dict[str, Phase]
    step_time_s: float | None
    samples_per_s: float | None
    notes: list[str]
    command: str = Field(description="The same on the command line.")


class MaxBatchAnswer(Answer):
    """The largest batch that fits a GPU."""

    gpu: str | None
    title: str
    batch: int = Field(description="0 where not even one sample fits.")
    cold_batch: int
    margin_batch: int = Field(description="The largest that leaves the margin that plans keep; 0 where none does.")
    margin_reason: str
    limited_by: str
    capacity_bytes: int
    safe_reserved_bytes: int


class ReasonAnswer(Answer):
    """One setting of a plan, and why."""

    setting: str
    kind: Kind
    kind_in_words: str
    why: str
    cost: str


class AlternativeAnswer(Answer):
    """Other settings that were predicted."""

    settings: str
    kind: Kind
    micro_batch: int
    accumulate: int
    step_time_s: float
    safe_reserved_bytes: int
    fits: bool
    allowed: bool
    why_not: str = Field(description="Why it was not taken, where it fits and is faster; else empty.")


class Commands(Answer):
    """What to type."""

    plan: str
    train: str | None = Field(description="None for a task that `vramfit train` does not have.")
    estimate: str


class FoundPlan(Answer):
    """Settings that fit."""

    settings: dict[str, Any]
    micro_batch: int
    accumulate: int
    evaluation_batch: int
    step_time_s: float
    samples_per_s: float
    safe_reserved_bytes: int
    most_reserved_bytes: int
    budget_bytes: int
    margin_bytes: int
    margin_reason: str
    headline: str
    reasons: list[ReasonAnswer]
    alternatives: list[AlternativeAnswer]
    notes: list[str]
    commands: Commands


class MissingPlan(Answer):
    """Why nothing that is allowed fits, and what would."""

    error: str
    hint: str | None
    shortfall_bytes: int
    allow: list[str] = Field(description="What to allow for a plan to fit.")
    gpu: str | None = Field(description="The smallest GPU on which there is one.")
    model: str | None = Field(description="The largest model of the family for which there is one.")


class PlanAnswer(Answer):
    """A plan, or why there is none."""

    found: FoundPlan | None
    missing: MissingPlan | None


class ModelEntry(Answer):
    """A model of the catalogue."""

    name: str
    family: str
    num_parameters: int
    num_layers: int
    max_positions: int


class GPUEntry(Answer):
    """A GPU of the catalogue."""

    name: str
    title: str
    kind: str
    total_memory_bytes: int
    supports_bf16: bool


class CatalogueAnswer(Answer):
    """Everything there is to choose from."""

    version: str
    torch_version: str
    models: list[ModelEntry]
    gpus: list[GPUEntry]
    row_of_gpus: list[str]
    choices: dict[str, list[str]]
    tasks: dict[str, str] = Field(description="Task → what the page calls it.")
    allowable: dict[str, str] = Field(description="What a plan may be allowed to change → what that means.")
    defaults: dict[str, Any] = Field(description="Of the parameters of an estimate.")
    parameters: dict[str, list[str]] = Field(description="Path of the API → the parameters it takes.")
    batch_stops: list[int]
    seq_stops: list[int]
    max_batch: int
    max_seq: int
    allow_local: bool = Field(description="Whether folders and hub ids may be named as models.")
