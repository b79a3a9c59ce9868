"""`vramfit serve`: a model over HTTP, inside a memory budget."""

import sys
from typing import Annotated, Any

import typer

from vramfit.cli.evaluate import GPUName, Memory, Model, PrecisionName, Seq, Trust
from vramfit.cli.first_look import look_at_gpu, look_at_model
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import parse_names
from vramfit.errors import MissingExtra
from vramfit.units import counted, format_bytes

EXAMPLE = "vramfit serve my-model --memory 2GiB --precision bf16"
PLAIN: dict[str, Any] = {"markup": False, "soft_wrap": True}
"""How lines with addresses and paths are printed."""


def run(
    model: Model,
    memory: Memory = None,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="The head, or features; else the model's own.")
    ] = None,
    precision: PrecisionName = "fp32",
    quantize: Annotated[str | None, typer.Option(metavar="NAME", help="int8, int8-dynamic or int4.")] = None,
    offload: Annotated[
        str | None, typer.Option(metavar="weights", help="Layers that do not fit wait in host memory.")
    ] = None,
    gpu: GPUName = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="cuda, cuda:N, cpu or emulated; workers are dealt round.")
    ] = None,
    seq: Seq = None,
    pooling: Annotated[str, typer.Option(metavar="NAME", help="Of features: mean or first.")] = "mean",
    top_k: Annotated[
        int | None,
        typer.Option(metavar="N", help='Scores of the N best labels or tokens; a request may say: {"parameters": …}.'),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a batch at most; else what is predicted to fit.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that share the memory, a model each. Default: one a device."),
    ] = None,
    queue: Annotated[int, typer.Option(metavar="N", help="Requests that may wait; more get status 429.")] = 1024,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Until an answer; then status 503.")] = 55.0,
    host: Annotated[str, typer.Option(metavar="NAME", help="A container needs 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 takes any that is free.")] = 8080,
    fail_every: Annotated[
        int | None, typer.Option(metavar="N", help="A rehearsal: memory runs out every N batches.")
    ] = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Serve a model: GET /ping, POST /invocations with {"inputs": …}, GET /metrics.

    Requests are batched by tokens, as many as are predicted to fit; out of memory splits a batch, no more.
    Ctrl-C or a polite kill answers what has come.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when it does not fit.
    """
    from vramfit.serve.settings import ServeSettings

    look_at_gpu(gpu)
    look_at_model(model)
    devices = parse_names(device)
    settings = ServeSettings(
        model=model,
        task=task,
        precision=precision,
        quantize=quantize,
        offload=offload,
        memory=memory,
        gpu=gpu,
        devices=devices,
        seq=seq,
        pooling=pooling,
        top_k=top_k,
        max_tokens=max_tokens,
        num_workers=len(devices) or 1 if workers is None else workers,
        max_waiting=queue,
        timeout_s=timeout,
        fail_every=fail_every,
        trust_remote_code=trust_remote_code,
    )
    try:
        from vramfit.serve.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "prometheus_client"):
            raise
        raise MissingExtra("vramfit serve", extra="serve", package=error.name) from None

    def ready(url: str, started: list[Any]) -> None:
        one = started[0]
        if json:
            data = {"url": url, "task": one.task, "max_length": one.max_length, "max_tokens": one.max_tokens}
            print_json(data | {"devices": [w.device for w in started], "budget_bytes": one.budget_bytes})
        else:
            console().print(f"{model} ({one.task}) is at {url}invocations  (Ctrl-C ends it)", **PLAIN)
            share = f", {format_bytes(one.budget_bytes)} each" if one.budget_bytes is not None else ""
            where = ", ".join(w.device for w in started)
            console().print(
                f"  {counted(len(started), 'worker')} on {where}{share}; {one.max_tokens:,} tokens a batch", **PLAIN
            )
        sys.stdout.flush()

    def loading() -> None:
        if not json:
            console(stderr=True).print("Loading …", style="dim")

    served = serve(settings, host=host, port=port, on_listening=loading, on_ready=ready)
    console(stderr=True).print(
        f"Stopped: {served.num_answered:,} of {served.num_accepted:,} requests answered.", **PLAIN
    )
