"""`vramfit serve`: a model over HTTP inside a memory budget; `vramfit web`: the page that answers "will it fit?";
`vramfit mcp`: the tools of vramfit for coding agents, over standard input and output.
"""

import os
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from vramfit.cli.first_look import look_at_gpu, look_at_model
from vramfit.cli.inference import GPUName, Memory, PrecisionName, Seq
from vramfit.cli.options import Json, Trust, argument, opt, option, parse_names, verb
from vramfit.cli.terminal import console, print_json, say
from vramfit.errors import MissingExtra
from vramfit.units import counted, format_bytes

if TYPE_CHECKING:
    from vramfit.serve.settings import ServeSettings

MODELS_HELP = "Folders that vramfit train or transformers saved. NAME=FOLDER serves a folder under another name."
Models = Annotated[list[str], argument(MODELS_HELP, "MODEL")]
KEY = "VRAMFIT_API_KEY"
Port = Annotated[int, option("Port to listen on; 0 takes any that is free.", "N", min=0, max=65535)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Models and how they are served, but for where."""

    models: Models
    memory: Memory = None
    task: str | None = opt(None, "Task (head) to use, or features. Default: the model's own.", "NAME")
    precision: PrecisionName = "fp32"
    quantize: str | None = opt(None, "int8, int8-dynamic or int4.", "NAME")
    offload: str | None = opt(None, "Layers that do not fit wait in host memory.", "weights")
    fused: bool = opt(False, "Run each layer as one fused function in packed batches on a GPU.")
    gpu: GPUName = None
    device: str | None = opt(None, "cuda, cuda:N, cpu or emulated; workers take several devices in turn.", "NAME,…")
    seq: Seq = None
    pooling: str | None = opt(
        None, "How vectors are pooled: mean, or first (elsewhere: cls). Default: as the folder says, or mean.", "NAME"
    )
    top_k: int | None = opt(None, 'Also scores of the N best labels or tokens; "parameters" can override it.', "N")
    max_tokens: int | None = opt(None, "Largest batch in tokens. Default: as many as are predicted to fit.", "N")
    workers: int | None = opt(None, "Processes with a model each that share the memory. Default: one per device.", "N")
    queue: int = opt(1024, "Requests that may wait; more get status 429.", "N")
    timeout: float = opt(55.0, "Time limit for an answer; after it the request gets status 503.", "SECONDS")
    fail_every: int | None = opt(None, "Rehearsal: memory runs out every N batches.", "N", hidden=True)
    trust_remote_code: Trust = False


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """Where models are served, and to whom."""

    host: str = opt("127.0.0.1", "Address to listen on; a container needs 0.0.0.0.", "NAME")
    port: Port = 8080
    api_key: str | None = opt(
        None, f"Key that requests must send (Authorization: Bearer KEY). Others see it here; {KEY} is safer.", "KEY"
    )


@verb("vramfit serve my-model --memory 2GiB --precision bf16")
def serve(options: ServeOptions, front: FrontOptions, json: Json = False) -> None:
    """Serve models over HTTP: SageMaker's endpoint, OpenAI's embeddings, and text-embeddings-inference's.

    POST /invocations, /v1/embeddings, /embed, /rerank, /predict; GET /ping, /health, /info, /v1/models, /metrics.
    Requests are batched by tokens, as many as are predicted to fit; if memory runs out, the batch is halved.
    Several models share --memory; a request names its model in "model" or in its path, /models/NAME/….
    On Ctrl-C or SIGTERM the server answers the requests that it has accepted, then stops.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when it does not fit.
    """
    look_at_gpu(options.gpu)
    models = _settings(options)
    with _needs("serve", "uvicorn", "prometheus_client"):
        from vramfit.serve.server import Front, serve

    api_key = os.environ.get(KEY) if front.api_key is None else front.api_key
    where = Front(host=front.host, port=front.port, api_key=api_key)

    def ready(url: str, started: dict[str, list[Any]]) -> None:
        facts, lines = {}, []
        for name, workers in started.items():
            one = workers[0]
            facts[name] = {
                "task": one.known.task,
                "max_length": one.known.max_length,
                "max_tokens": one.max_tokens,
                "devices": [w.device for w in workers],
                "budget_bytes": one.budget_bytes,
            }
            share = f", {format_bytes(one.budget_bytes)} each" if one.budget_bytes is not None else ""
            devices = ", ".join(w.device for w in workers)
            lines += [
                f"{name} ({one.known.task}) is at {url}{'invocations' if len(started) == 1 else f'models/{name}/'}"
                "  (Ctrl-C ends it)",
                f"  {counted(len(workers), 'worker')} on {devices}{share}; {one.max_tokens:,} tokens a batch",
            ]
        first = next(iter(facts.values()))
        _show_ready({"url": url} | (first if len(facts) == 1 else {"models": facts}), *lines, json=json)

    served = serve(models, where, on_listening=_starting("Loading", json), on_ready=ready)
    say(f"Stopped: {served.num_answered:,} of {served.num_accepted:,} requests answered.")


def _settings(options: ServeOptions) -> "dict[str, ServeSettings]":
    """Name of a model → how it is served."""
    from vramfit.serve.settings import ServeSettings, names_of

    given = asdict(options)
    devices, workers = parse_names(given.pop("device")), given.pop("workers")
    named = names_of(given.pop("models"))
    for model in named.values():
        look_at_model(model)
    shared = {
        "devices": devices,
        "num_workers": len(devices) or 1 if workers is None else workers,
        "max_waiting": given.pop("queue"),
        "timeout_s": given.pop("timeout"),
        **given,
    }
    return {name: ServeSettings(model=model, **shared) for name, model in named.items()}


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """Where the page is served, and what its requests may name."""

    port: Port = 8765
    host: str = opt("127.0.0.1", "Loopback address to listen on; others are refused.", "NAME")
    workers: int | None = opt(None, "Processes for estimates. Default: one per core, up to 4.", "N", min=1, max=16)
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


@verb("vramfit mcp")
def mcp() -> None:
    """Serve coding agents over MCP (standard input and output): estimate, max_batch, plan, explain and gpus.

    Add it to a client as the command vramfit with the argument mcp. It runs no model and needs no GPU.
    Exit codes: 0 when the client disconnects, 1 for an error, 2 for a wrong name or value.
    """
    from vramfit.integrations.mcp import serve

    serve()


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
