"""The server: a socket on loopback, and the application on it until Ctrl-C."""

import os
from collections.abc import Callable

from vramfit.errors import VramfitError
from vramfit.listening.server import Server, listen, url_of
from vramfit.web.app import create_app

MAX_WORKERS = 4
KEEP_ALIVE_S = 5
STOP_S = 2
LAST_CALLS_S = 1
"""After Ctrl-C or a polite kill: pages that keep connections open hear of the end with an answer."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    num_workers: int | None = None,
    allow_local: bool = False,
    on_listening: Callable[[], None] = lambda: None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the page and the API until interrupted.

    Args:
        host: a name of this machine's loopback.
        port: 0 takes any that is free.
        num_workers: processes for estimates; one a core, up to four, unless given.
        allow_local: let requests name folders and hub ids.
        on_listening: called once the port is had.
        on_ready: called with the address once answers can be given.

    Raises:
        VramfitError: another host, or a port that cannot be had.
    """
    if host not in LOOPBACK:
        raise VramfitError(
            f"--host {host}: the page is for this machine alone, on {', '.join(LOOPBACK)}",
            hint=f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS-MACHINE",
        )
    bound = listen(host, port)
    on_listening()
    url = url_of(host, bound)
    workers = num_workers or min(os.cpu_count() or 1, MAX_WORKERS)
    app = create_app(num_workers=workers, allow_local=allow_local, on_ready=lambda: on_ready(url))
    Server(app, keep_alive_s=KEEP_ALIVE_S, stop_s=STOP_S, last_calls_s=LAST_CALLS_S).run(sockets=[bound])
