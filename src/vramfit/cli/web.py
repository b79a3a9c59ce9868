"""`vramfit web`: the page that answers "will it fit?" while a slider moves."""

from typing import Annotated

import typer

from vramfit.cli.terminal import Json, console, print_json
from vramfit.errors import MissingExtra

EXAMPLE = "vramfit web --port 8765 --open"


def run(
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 takes any that is free.")] = 8765,
    host: Annotated[
        str, typer.Option(metavar="NAME", help="A name of this machine's loopback; others are refused.")
    ] = "127.0.0.1",
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=16, help="Processes for estimates. Default: one a core, up to 4."),
    ] = None,
    allow_local: Annotated[
        bool, typer.Option("--allow-local", help="Let requests name folders and hub ids, not only the catalogue.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json: Json = False,
) -> None:
    """Serve a page on this machine: choose model, task and GPU, move batch and length, and see whether it fits.

    Nothing leaves this machine. The JSON API behind the page is described at /docs. Ctrl-C ends it.
    """
    try:
        from vramfit.web.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "starlette"):
            raise
        raise MissingExtra("vramfit web", extra="web", package=str(error.name)) from None

    def ready(url: str) -> None:
        if json:
            print_json({"url": url})
        else:
            console().print(f"vramfit web is at {url}  (Ctrl-C ends it)", markup=False, soft_wrap=True)
        import sys

        sys.stdout.flush()
        if open_browser:
            import webbrowser

            webbrowser.open(url)

    def starting() -> None:
        if not json:
            console(stderr=True).print("Starting …", style="dim")

    serve(
        host=host,
        port=port,
        num_workers=workers,
        allow_local=allow_local,
        on_listening=starting,
        on_ready=ready,
    )
