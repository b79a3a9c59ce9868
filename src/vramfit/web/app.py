"""The application: the page, its files, and the API that the page itself uses; and the server it runs in."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from vramfit import __version__
from vramfit.devices.catalogue import all_gpus
from vramfit.errors import VramfitError
from vramfit.listening import Server, listen, url_of
from vramfit.models.catalogue import all_entries
from vramfit.report.words import memory_css
from vramfit.settings import ALLOWABLE, SETTINGS, Setting
from vramfit.settings.values import Choice, Count, Number, Switch
from vramfit.web import answers
from vramfit.web.dispatcher import Busy, Dispatcher, Gone
from vramfit.web.queries import (
    BATCH_STOPS,
    HOSTS,
    MAX_BATCH,
    MAX_SEQ,
    ROW_OF_GPUS,
    SEQ_STOPS,
    EstimateQuery,
    Guard,
    MaxBatchQuery,
    PlanQuery,
)
from vramfit.web.queries import Query as AnyQuery
from vramfit.workload import CHOICES

PAGE = Path(__file__).parent / "page"
MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
NAMES = {"page.html": "/", "api.html": "/docs"}
"""Files of the page that have another address than their name."""
PATHS: dict[str, tuple[type[AnyQuery], type[answers.Answer], str, str]] = {
    "/api/estimate": (EstimateQuery, answers.EstimateAnswer, "What a job takes, and whether it fits", "The prediction"),
    "/api/max-batch": (
        MaxBatchQuery,
        answers.MaxBatchAnswer,
        "The largest batch that fits",
        "The largest batch, 0 where nothing fits",
    ),
    "/api/plan": (
        PlanQuery,
        answers.PlanAnswer,
        "The fastest settings that fit, and why",
        "The plan, or why there is none",
    ),
}
"""Path → what it is asked with, what it answers, and both in words."""
MAX_WORKERS = 4
KEEP_ALIVE_S = 5
STOP_S = 2
LAST_CALLS_S = 1
"""After Ctrl-C or a polite kill: pages that keep connections open hear of the end with an answer."""
ABOUT = (
    "What a BERT-class model takes on a GPU, to the byte, without the GPU. Every parameter is a keyword of vramfit "
    "estimate; byte counts are whole numbers. What cannot be answered comes with a sentence that says why."
)
DRAWN = (Choice, Count, Number, Switch)
"""Kinds of values that the page has a control for; others have labels, or are the page's own."""
RESPONSES: dict[int | str, dict[str, Any]] = {
    422: {
        "model": answers.Problem,
        "description": "The request contradicts itself, the model or the GPU, or asks for more than the limits allow.",
    },
    503: {
        "model": answers.Problem,
        "description": "Too many requests wait already, or the machine is too busy; come again later.",
    },
}


def create_app(
    *, num_workers: int | None = None, allow_local: bool = False, on_ready: Callable[[], None] = lambda: None
) -> FastAPI:
    """The application, whose workers start and end with it.

    Args:
        num_workers: processes that estimates are made in; one a core, up to four, unless given.
        allow_local: let requests name folders and hub ids as models.
        on_ready: called when the workers are ready.
    """
    num_workers = num_workers or min(os.cpu_count() or 1, MAX_WORKERS)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        dispatcher = app.state.dispatcher = Dispatcher(num_workers=num_workers, allow_local=allow_local)
        try:
            await dispatcher.start()
            on_ready()
            yield
        finally:
            await dispatcher.stop()

    app = FastAPI(
        title="vramfit", version=__version__, description=ABOUT, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.add_middleware(Guard)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(HTTPException, _no_such)
    _add_files(app)
    _add_api(app, allow_local)
    described = app.openapi
    app.openapi = lambda: _without_hidden(described())  # type: ignore[method-assign]
    return app


def _without_hidden(schema: dict[str, Any]) -> dict[str, Any]:
    """The description of the API without parameters that are taken but not shown."""
    for path in schema["paths"].values():
        asked = path["get"].get("parameters", [])
        asked[:] = [p for p in asked if not getattr(SETTINGS.get(p["name"]), "hidden", False)]
    return schema


def _add_api(app: FastAPI, allow_local: bool) -> None:
    @app.get(
        "/api/catalogue",
        operation_id="catalogue",
        summary="What there is to choose from",
        response_description="The catalogue",
    )
    async def catalogue() -> answers.CatalogueAnswer:
        return _catalogue(allow_local)

    for path, (query, answer, summary, described) in PATHS.items():
        app.add_api_route(
            path,
            _asking(query),
            operation_id=path.rpartition("/")[2].replace("-", "_"),
            summary=summary,
            response_model=answer,
            response_description=described,
            responses=RESPONSES,
        )


def _asking(kind: type[AnyQuery]) -> Callable[..., Any]:
    async def asked(query: Any, request: Request) -> Response:
        return await _ask(query, request)

    asked.__annotations__["query"] = Annotated[kind, Query()]
    return asked


async def _ask(query: AnyQuery, request: Request) -> Response:
    dispatcher: Dispatcher = request.app.state.dispatcher
    try:
        status, body = await dispatcher.ask(query, request.is_disconnected)
    except Busy:
        return _say(503, "too many requests are waiting", "come again in a few seconds", {"Retry-After": "3"})
    except Gone:
        return Response(status_code=499)  # the client has disconnected
    return _json(status, body)


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def _say(status: int, error: str, hint: str | None = None, headers: dict[str, str] | None = None) -> Response:
    return _json(status, answers.Problem(error=error, hint=hint).model_dump_json().encode(), headers)


async def _refuse(request: Request, error: Exception) -> Response:
    """Every parameter that is wrong, each in a sentence."""
    assert isinstance(error, RequestValidationError)
    problems = [_sentence(e) for e in error.errors()]
    made = answers.Problem(error="; ".join(problems), hint="/docs lists what each takes", problems=problems)
    return _json(422, made.model_dump_json().encode())


def _sentence(error: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in error["loc"][1:]) or "the request"
    given = repr(error.get("input"))
    given = given if len(given) <= 60 else f"{given[:57]}..."
    if error["type"] == "extra_forbidden":
        return f"there is no parameter {name[:60]!r}"
    what = str(error["msg"]).replace("Input should be ", "must be ").replace("String should ", "must ")
    return f"{name} {given} {what}" if what.startswith("must") else f"{name} {given}: {what}"


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _say(
        error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}", "/docs lists all there is"
    )


@cache
def _catalogue(allow_local: bool) -> answers.CatalogueAnswer:
    defaults = {name: field.default for name, field in EstimateQuery.model_fields.items()}
    return answers.CatalogueAnswer(
        version=__version__,
        torch_version=version("torch").partition("+")[0],
        models=[answers.ModelEntry.model_validate(entry) for entry in all_entries()],
        gpus=[answers.GPUEntry.model_validate(gpu) for gpu in all_gpus()],
        row_of_gpus=list(ROW_OF_GPUS),
        choices={name: list(values) for name, values in CHOICES.items()} | {"allow": list(ALLOWABLE)},
        settings=[_entry(s) for s in SETTINGS.values() if s.on_page and (s.labels or isinstance(s.value, DRAWN))],
        allowable=dict(ALLOWABLE),
        defaults={name: value for name, value in defaults.items() if value is not None},
        parameters={path: list(query.model_fields) for path, (query, *_) in PATHS.items()},
        batch_stops=list(BATCH_STOPS),
        seq_stops=list(SEQ_STOPS),
        max_batch=MAX_BATCH,
        max_seq=MAX_SEQ,
        allow_local=allow_local,
    )


def _entry(setting: Setting) -> answers.SettingEntry:
    return answers.SettingEntry(
        keyword=setting.keyword,
        label=setting.label or setting.keyword.replace("_", " ").capitalize(),
        about=setting.about or setting.help.replace("`", ""),
        values=list(getattr(setting.value, "shown_names", ())),
        labels=dict(setting.labels),
        modes=list(setting.modes),
        is_basic=setting.is_basic,
        hidden=setting.hidden,
    )


def _add_files(app: FastAPI) -> None:
    for file in PAGE.iterdir():
        body = file.read_bytes()
        body = memory_css().encode() + body if file.name == "page.css" else body
        address = NAMES.get(file.name, f"/{file.name}")
        app.add_route(address, _file(body, MEDIA[file.suffix]), methods=["GET"], include_in_schema=False)


def _file(body: bytes, media_type: str) -> Callable[[Request], Response]:
    def send(request: Request) -> Response:
        return Response(body, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return send


def serve(
    host: str, port: int, *, on_listening: Callable[[], None], on_ready: Callable[[str], None], **options: Any
) -> None:
    """Serve the page and the API until interrupted.

    Args:
        host: a name of this machine's loopback.
        port: 0 takes any that is free.
        on_listening: called once the server listens.
        on_ready: called with the address once answers can be given.
        options: keywords of `create_app`.

    Raises:
        VramfitError: another host, or a port that is taken.
    """
    if host not in HOSTS:
        raise VramfitError(
            f"--host {host}: the page is for this machine alone, on {', '.join(HOSTS)}",
            hint=f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS-MACHINE",
        )
    bound = listen(host, port)
    on_listening()
    url = url_of(host, bound)
    app = create_app(**options, on_ready=lambda: on_ready(url))
    Server(app, keep_alive_s=KEEP_ALIVE_S, stop_s=STOP_S, last_calls_s=LAST_CALLS_S).run(sockets=[bound])
