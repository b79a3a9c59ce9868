"""`vramfit serve`: a model over HTTP inside a memory budget; `vramfit web`: the page that answers "will it fit?"."""

import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from vramfit.cli.first_look import look_at_gpu, look_at_model
from vramfit.cli.inference import GPUName, Memory, Model, Precision, Seq
from vramfit.cli.options import Json, Trust, opt, option, parse_names, verb
from vramfit.cli.terminal import console, print_json, say
from vramfit.errors import MissingExtra
from vramfit.units import counted, format_bytes

Port = Annotated[int, option("Port to listen on; 0 takes any that is free.", "N", min=0, max=65535)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """A model and how it is served, but for where."""

    model: Model
    memory: Memory = None
    task: str | None = opt(None, "The head, or features; else the model's own.", "NAME")
    precision: Precision = "fp32"
    quantize: str | None = opt(None, "int8, int8-dynamic or int4.", "NAME")
    offload: str | None = opt(None, "Layers that do not fit wait in host memory.", "weights")
    gpu: GPUName = None
    device: str | None = opt(None, "cuda, cuda:N, cpu or emulated; several are given to the workers in turn.", "NAME,…")
    seq: Seq = None
    pooling: str | None = opt(
        None, "How vectors are pooled: mean or first. Default: as the folder says, or mean.", "NAME"
    )
    top_k: int | None = opt(None, 'Scores of the N best labels or tokens; a request may say: {"parameters": …}.', "N")
    max_tokens: int | None = opt(None, "Largest batch in tokens; else what is predicted to fit.", "N")
    workers: int | None = opt(None, "Processes that share the memory, each with a model. Default: one a device.", "N")
    queue: int = opt(1024, "Requests that may wait; more get status 429.", "N")
    timeout: float = opt(55.0, "Time limit of an answer; later ones are status 503.", "SECONDS")
    fail_every: int | None = opt(None, "Rehearsal: memory runs out every N batches.", "N", hidden=True)
    trust_remote_code: Trust = False


@verb("vramfit serve my-model --memory 2GiB --precision bf16")
def serve(
    options: ServeOptions,
    host: Annotated[str, option("Address to listen on; a container needs 0.0.0.0.", "NAME")] = "127.0.0.1",
    port: Port = 8080,
    json: Json = False,
) -> None:
    """Serve a model: GET /ping, POST /invocations with {"inputs": …}, GET /metrics.

    Requests are batched by tokens, as many as are predicted to fit; out of memory splits a batch, no more.
    Ctrl-C or SIGTERM answers the requests that have come, then stops.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when it does not fit.
    """
    from vramfit.serve.settings import ServeSettings

    look_at_gpu(options.gpu)
    look_at_model(options.model)
    given = asdict(options)
    devices, workers = parse_names(given.pop("device")), given.pop("workers")
    settings = ServeSettings(
        devices=devices,
        num_workers=len(devices) or 1 if workers is None else workers,
        max_waiting=given.pop("queue"),
        timeout_s=given.pop("timeout"),
        **given,
    )
    with _needs("serve", "uvicorn", "prometheus_client"):
        from vramfit.serve.server import serve

    def ready(url: str, started: list[Any]) -> None:
        one = started[0]
        data = {"url": url, "task": one.task, "max_length": one.max_length, "max_tokens": one.max_tokens}
        share = f", {format_bytes(one.budget_bytes)} each" if one.budget_bytes is not None else ""
        where = ", ".join(w.device for w in started)
        _show_ready(
            data | {"devices": [w.device for w in started], "budget_bytes": one.budget_bytes},
            f"{options.model} ({one.task}) is at {url}invocations  (Ctrl-C ends it)",
            f"  {counted(len(started), 'worker')} on {where}{share}; {one.max_tokens:,} tokens a batch",
            json=json,
        )

    served = serve(settings, host=host, port=port, on_listening=_starting("Loading", json), on_ready=ready)
    say(f"Stopped: {served.num_answered:,} of {served.num_accepted:,} requests answered.")


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """Where the page is served, and what its requests may name."""

    port: Port = 8765
    host: str = opt("127.0.0.1", "A name of this machine's loopback; others are refused.", "NAME")
    workers: int | None = opt(None, "Processes for estimates. Default: one a core, up to 4.", "N", min=1, max=16)
    allow_local: bool = opt(False, "Let requests name folders and hub ids, not only the catalogue.")
    open_browser: bool = opt(False, "Open the page in the browser.", None, "--open")


@verb("vramfit web --port 8765 --open")
def web(options: WebOptions, json: Json = False) -> None:
    """Serve a page on this machine: choose model, task and GPU, move batch and length, and see whether it fits.

    Nothing leaves this machine. The JSON API behind the page is described at /docs. Ctrl-C ends it.
    """
    with _needs("web", "fastapi", "uvicorn", "starlette"):
        from vramfit.web.app import serve

    def ready(url: str) -> None:
        _show_ready({"url": url}, f"vramfit web is at {url}  (Ctrl-C ends it)", json=json)
        if options.open_browser:
            webbrowser.open(url)

    asked = {"num_workers": options.workers, "allow_local": options.allow_local}
    serve(options.host, options.port, on_listening=_starting("Starting", json), on_ready=ready, **asked)


@contextmanager
def _needs(name: str, *packages: str) -> Iterator[None]:
    """Inside, a missing package of an extra is said with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        raise MissingExtra(f"vramfit {name}", extra=name, package=error.name) from None


def _starting(what: str, json: bool) -> Callable[[], None]:
    return lambda: None if json else console(stderr=True).print(f"{what} …", style="dim")


def _show_ready(data: dict[str, Any], *lines: str, json: bool) -> None:
    """That the server answers: at once, also into a pipe."""
    if json:
        print_json(data)
    for line in () if json else lines:
        say(line, stderr=False)
    sys.stdout.flush()
