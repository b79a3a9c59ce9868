"""A real Chromium, headless, driven through its DevTools protocol: enough of it for tests and screenshots."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

from tests.waiting import LIMIT_S, stop, wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = "no Chromium here: install it (Debian: apt-get install chromium) to test the page in a browser"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


def executable() -> str | None:
    """Where Chromium is; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class PageError(AssertionError):
    """Something in the page went wrong, or did not come in time."""


class Page:
    """One tab: what it was asked to load, what it wrote to its console, and what it holds."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.requests: list[str] = []
        """Every address that it asked for."""
        self.complaints: list[str] = []
        """Errors and warnings of its console, exceptions and failed requests."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result; events on the way are noted."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(given["exceptionDetails"].get("exception", given)))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([a.get("value", a) for a in given["args"]]))

    def resize(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """A window of this size, in light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Go there, and wait until it is loaded."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise PageError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression of the page is true."""
        try:
            wait_until(lambda: self.evaluate(f"Boolean({condition})"), condition)
        except TimeoutError as error:
            raise PageError(f"{error}; {self.complaints}") from None

    def text(self, selector: str) -> str:
        """What an element says."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, key: str, code: str = "", number: int = 0) -> None:
        """A key, pressed and let go."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, windowsVirtualKeyCode=number)

    def choose(self, name: str, value: str) -> None:
        """Set a control as a hand would: its value, and the event."""
        script = (
            f"(() => {{ const c = document.getElementById({json.dumps(name)}); "
            f"if (c.type === 'checkbox') c.checked = {json.dumps(bool(value))}; else c.value = {json.dumps(value)}; "
            "c.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        self.evaluate(script)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """What it looks like."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser() -> Iterator["Browser"]:
    """A Chromium with a profile of its own, which ends with the block."""
    path = executable()
    assert path is not None, INSTALL
    with TemporaryDirectory(prefix="vramfit-chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Browser(_port(Path(profile), process))
        finally:
            stop(process)


class Browser:
    """A running Chromium."""

    def __init__(self, port: int) -> None:
        self._port = port

    @contextmanager
    def page(self) -> Iterator[Page]:
        """A new tab, which ends with the block."""
        import websocket

        asked = Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        with urlopen(asked, timeout=LIMIT_S) as answer:
            tab = json.load(answer)
        socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=LIMIT_S, suppress_origin=True)
        try:
            yield Page(socket)
        finally:
            socket.close()
            urlopen(f"http://127.0.0.1:{self._port}/json/close/{tab['id']}", timeout=LIMIT_S).close()


def _port(profile: Path, process: "subprocess.Popen[bytes]") -> int:
    """The port that Chromium chose, once it has written it down."""
    file = profile / "DevToolsActivePort"
    wait_until(lambda: file.exists() and "\n" in file.read_text(), "Chromium starts", child=process)
    return int(file.read_text().split("\n")[0])
