"""A server with a small application, as both servers run it: crowds of hostile connections, and an orderly stop."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.waiting import LIMIT_S, wait_until

from vramfit.listening import Server, listen
from vramfit.listening.connections import CLOSE

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
FEW_HANDLES = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from vramfit.listening import Server
from vramfit.listening import listen

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})

bound = listen("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
Server(app, keep_alive_s=60, stop_s=1, lifespan="off").run(sockets=[bound])
"""


class Application:
    """Answers at once; what asks for /slow when the test says so."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            self.asked.set()
            await asyncio.to_thread(self.go_on.wait, LIMIT_S)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@contextmanager
def running(app: Any, **options: Any) -> Iterator[tuple[Server, int]]:
    server = Server(app, keep_alive_s=60, stop_s=5, lifespan="off", **options)
    bound = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield server, port
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        bound.close()
        assert not thread.is_alive()


def connect(port: int, data: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    made.sendall(data)
    return made


def heard(one: socket.socket) -> bytes:
    """One answer; what came of it where the connection ended."""
    data = b""
    while not data.endswith(b"{}"):
        part = one.recv(4096)
        if not part:
            break
        data += part
    return data


def hostile(port: int, number: int, data: bytes) -> list[socket.socket]:
    return [connect(port, data) for _ in range(number)]


def test_clients_are_answered_beside_more_silent_connections_than_there_are_file_handles() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FEW_HANDLES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    held: list[socket.socket] = []
    try:
        held += hostile(port, 300, b"GET / HTTP/1.1\r\nX-Slow: ")
        held += hostile(port, 300, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
        for _ in range(16):
            with connect(port, REQUEST) as honest:
                assert heard(honest).startswith(b"HTTP/1.1 200")
                held += hostile(port, 4, b"GET")
                honest.sendall(REQUEST)  # and the connection has been kept
                assert heard(honest).startswith(b"HTTP/1.1 200")
    finally:
        process.terminate()
        _, log = process.communicate(timeout=LIMIT_S)
        for one in held:
            one.close()
    assert "Traceback" not in log
    assert len(log) < 10_000


def test_a_flood_of_requests_that_are_no_http_leaves_a_short_log(capfd: Any) -> None:
    with running(Application()) as (_, port):
        for _ in range(100):
            with connect(port, b"\x16\x03\x01 no http\r\n\r\n") as one:
                one.recv(1000)
    assert capfd.readouterr().err.count("Invalid HTTP request") <= 10


CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def all_of(one: socket.socket) -> bytes:
    """What comes until the connection ends."""
    data = b""
    while part := one.recv(4096):
        data += part
    return data


def test_a_bad_chunk_is_answered_plainly_and_leaves_no_traceback(capfd: Any) -> None:
    app = Application()
    with running(app) as (_, port):
        with connect(port, CHUNKED + b"zz\r\n") as one:  # before anything is answered
            assert all_of(one).startswith(b"HTTP/1.1 400 Bad Request")
        with connect(port, CHUNKED) as one:
            assert heard(one).startswith(b"HTTP/1.1 200")
            one.sendall(b"zz\r\n")  # after its answer
            assert b"HTTP" not in all_of(one)
        with connect(port, CHUNKED.replace(b"/", b"/slow", 1)) as one:
            assert app.asked.wait(LIMIT_S)
            one.sendall(b"zz\r\n")  # while it is being answered
            assert all_of(one).startswith(b"HTTP/1.1 400 Bad Request")
            app.go_on.set()
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_that_nobody_reads_is_drained_a_little_and_the_connection_closed() -> None:
    with running(Application()) as (_, port):
        with connect(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello") as one:  # came whole
            assert b"connection: close" not in heard(one).lower()
        with connect(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n") as one:
            assert b"connection: close" in heard(one).lower()
            num_sent = 0
            with suppress(ConnectionError):
                while num_sent < 10**9:
                    num_sent += one.send(bytes(2**16))
            assert num_sent < 10**8  # what the sockets hold, and what is drained


def is_said(server: Server) -> bool:
    """Whether answers say that connections end, after a while."""
    return bool(wait_until(lambda: CLOSE in server.server_state.default_headers, "connections to be said to end"))


def test_a_server_that_stops_answers_everybody_says_so_and_resets_nobody() -> None:
    app = Application()
    with running(app, last_calls_s=1.0) as (server, port):
        idle, talking, slow = (connect(port, REQUEST) for _ in range(3))
        for one in (idle, talking, slow):
            assert b"connection: close" not in heard(one).lower()
        slow.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        assert app.asked.wait(LIMIT_S)
        server.should_exit = True
        assert is_said(server)
        talking.sendall(REQUEST)
        assert b"connection: close" in heard(talking).lower()
        assert talking.recv(10) == b""
        assert idle.recv(10) == b""  # an end, where a reset would raise
        idle.sendall(b"G")  # late, and still no reset
        app.go_on.set()
        last = heard(slow)
        assert last.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in last.lower()
        for one in (idle, talking, slow):
            one.close()
