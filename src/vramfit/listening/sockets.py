"""`listen`: a socket that a server answers on."""

import socket

from vramfit.errors import VramfitError

BACKLOG = 2048
"""Connections that may wait to be taken."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any that is free.

    Raises:
        VramfitError: a host that is not of this machine, or a port that cannot be had.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise VramfitError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="choose another --host or --port; port 0 takes any that is free",
        ) from None
    bound.setblocking(False)
    return bound


def url_of(host: str, bound: socket.socket) -> str:
    """Where it is reached."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}/"
