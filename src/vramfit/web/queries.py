"""What may be asked, as parameters of the API: the settings of a workload, bounded.

`Guard` is what every request passes: it refuses foreign host names and other sites, and adds security headers.
"""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vramfit.devices.catalogue import all_gpus
from vramfit.models.catalogue import model_names
from vramfit.settings import ALLOWABLE, SETTINGS, Setting
from vramfit.settings.machine import Loop
from vramfit.settings.values import Choice, Count, Number, Switch

MAX_BATCH = 65_536
MAX_SEQ = 32_768
MAX_LABELS = 100_000
MAX_RANK = 1_024
MAX_PARAMETERS = 100
"""Of one request: more than three times as many as there are."""
MAX_NAME = 200
"""Characters of a model's or a GPU's name."""
QUICK_S = 20.0
"""Seconds of computing that an estimate may take."""
SLOW_S = 90.0
"""The same of a plan or of a largest batch."""
WALL_FACTOR = 4.0
"""So much longer may it take by the clock, on a machine that is busy with other things."""
MAX_WAITING = 512
"""Requests that wait for a worker; the next one is told to come again."""
MAX_REMEMBERED_BYTES = 48 * 2**20
"""Answers that are kept."""

BATCH_STOPS = (
    *range(1, 17),
    *(20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
"""Where the slider of the page halts; any other batch can be typed."""
SEQ_STOPS = (*range(32, 513, 32), 640, 768, 896, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROW_OF_GPUS = ("rtx-3060", "t4", "rtx-4080", "a10g", "rtx-4090", "a100-40gb", "l40s", "h100-sxm")
"""GPUs that the page names the largest batch for."""


HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names under which this server is asked on its own machine; a name that only leads here is another."""
OURS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
"""The same in a request's Host, with a port or without."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Refuses what does not come from this machine's own pages, and adds headers to what goes out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = refusal_of(Headers(scope=scope)) or _too_many(scope["query_string"])
        if refusal is not None:
            status, error = refusal
            hint = "open the address that vramfit web printed"
            body = json.dumps({"error": error, "hint": hint, "problems": []})
            await Response(body, status, media_type="application/json")(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def refusal_of(headers: Headers) -> tuple[int, str] | None:
    """Status and sentence for a request that is not answered; None for one that is.

    A page of another site can send requests here, and a name of its own may lead to 127.0.0.1 (DNS rebinding): the
    first are known by their origin, the second by the host they ask for.
    """
    host = headers.get("host", "")
    if not OURS.fullmatch(host):
        return 421, f"this server answers for {', '.join(HOSTS)} only, not for {host[:80]!r}"
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return 403, f"this server does not answer pages of another origin ({origin[:80]!r})"
    if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
        return 403, "this server does not answer pages of another site"
    return None


def _too_many(query: bytes) -> tuple[int, str] | None:
    """Status and sentence for a query of more parameters than anybody has use for: each would be looked at."""
    number = query.count(b"&") + 1
    return (400, f"{number:,} parameters: there may be {MAX_PARAMETERS}") if number > MAX_PARAMETERS else None


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
    is_optional = default is None or name == "gpu"
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
