"""No test of this room may reach the network; the hub is a fake where one is needed."""

import socket
from typing import NoReturn

import pytest
from tests.unit.runtime.data.conftest import tokenizer_folder  # noqa: F401


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
