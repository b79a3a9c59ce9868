"""What may be asked, as parameters of the API: the settings of a workload, bounded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from vramfit.devices.catalogue import all_gpus
from vramfit.models.catalogue import model_names
from vramfit.settings import ALLOWABLE, SETTINGS, Setting
from vramfit.settings.ranks import Loop
from vramfit.settings.values import Choice, Count, Number, Switch
from vramfit.web.guard import MAX_BATCH, MAX_LABELS, MAX_NAME, MAX_RANK, MAX_SEQ

MOST = {"seq": MAX_SEQ, "num_labels": MAX_LABELS, "lora": MAX_RANK}
"""Largest counts; others are bounded as the batch is."""
MAX_NORM = 1e6
DEFAULTS: dict[str, Any] = {"model": "bert-base-uncased", "gpu": "t4", "accumulate": 1}
"""What the page begins with."""
OF_JOB = ("model", "task", "seq", "num_labels", "mask", "gpu", "memory")
"""Settings that a plan is asked with."""


def _names(keyword: str) -> dict[str, Any]:
    """Shown in the schema; a wrong name is answered with the nearest ones, not with all of them."""
    known = {"model": list(model_names()), "gpu": [gpu.name for gpu in all_gpus()]}
    return {"json_schema_extra": {"enum": known[keyword]}} if keyword in known else {}


def _field(setting: Setting, default: Any) -> tuple[Any, Any]:
    """Type and bounds of a parameter."""
    name, value = setting.keyword, setting.value
    bounds: dict[str, Any] = {"min_length": 1, "max_length": MAX_NAME, **_names(name)}
    kind: Any = str
    if isinstance(value, Choice):
        kind, bounds = Literal.__getitem__(value.names), {"json_schema_extra": {"enum": list(value.shown_names)}}
    elif isinstance(value, Switch):
        kind, bounds = bool, {}
    elif isinstance(value, Count):
        kind, bounds = int, {"ge": 1, "le": MOST.get(name, MAX_BATCH)}
    elif isinstance(value, Number):
        kind, bounds = float, {"gt": 0, "le": MAX_NORM}
    elif setting.pattern:
        bounds = {"max_length": 24 if name == "memory" else MAX_NAME, "pattern": setting.pattern}
    is_optional = default is None or (setting.default is None and name in ("gpu",))
    return (kind | None if is_optional else kind, Field(default=default, description=setting.help, **bounds))


def _fields(keywords: Sequence[str]) -> dict[str, Any]:
    return {name: _field(SETTINGS[name], DEFAULTS.get(name, SETTINGS[name].default)) for name in keywords}


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


if TYPE_CHECKING:

    class JobQuery(_Query):
        """The job and the GPU, whatever way it is done."""

        model: str = ""
        seq: int = 0
        memory: str | None = None

    SettingsQuery = JobQuery
else:
    JobQuery = create_model("JobQuery", __base__=_Query, **_fields(OF_JOB))
    SettingsQuery = create_model(
        "SettingsQuery",
        __base__=JobQuery,
        **_fields([n for n, s in SETTINGS.items() if s.on_page and n not in (*OF_JOB, "batch", "micro_batch")]),
    )


class EstimateQuery(SettingsQuery):
    """A job with all its settings and its batch."""

    batch: int = Field(default=8, ge=1, le=MAX_BATCH, description=SETTINGS["batch"].help)
    micro_batch: int | None = Field(default=None, ge=1, le=MAX_BATCH, description=SETTINGS["micro_batch"].help)


class MaxBatchQuery(SettingsQuery):
    """A job whose largest batch is looked for."""


class PlanQuery(JobQuery):
    """A training job for which settings are looked for."""

    batch: int = Field(default=32, ge=1, le=MAX_BATCH, description="Samples that one optimizer step sees; kept.")
    allow: str | None = Field(
        default=None,
        max_length=60,
        pattern=r"^[a-z0-9]+(,[a-z0-9]+){0,7}$",
        description=f"What changes the training and may be used: {', '.join(ALLOWABLE)}.",
        examples=["freeze,lora"],
    )
    exact: bool = Field(default=False, description="Same maths only: fp32, no 8-bit optimizer.")


Query = EstimateQuery | MaxBatchQuery | PlanQuery


def keywords_of(query: JobQuery) -> dict[str, Any]:
    """Keywords for `estimate`, `max_batch` or `plan`; the model is left out."""
    given = {name: value for name, value in query.model_dump(exclude={"model"}).items() if value is not None}
    for name in [name for name in given if name in SETTINGS and SETTINGS[name].pattern]:
        given[name] = SETTINGS[name].value.parse(given[name])
    if given.get("accumulate") == 1 and (given.get("mode", "train") != "train" or "micro_batch" in given):
        del given["accumulate"]  # it was not given, and follows
    if "loop" in given and "loop" not in query.model_fields_set:
        del given["loop"]
        given |= Loop().derived(given)
    return given
