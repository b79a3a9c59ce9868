"""Configurations from the hub, with a hub that is a fake."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vramfit.errors import CheckpointError, UnknownModel
from vramfit.models import find_entry, resolve
from vramfit.models.configuration import MAX_FILE_BYTES
from vramfit.models.hub import TIMEOUT_S, is_offline, looks_like_hub_id

ENTRY = find_entry("bert-tiny")
assert ENTRY is not None
TINY = json.dumps(ENTRY.config_data()).encode()


class FakeHub:
    """Answers one request after another the same way, and remembers them."""

    def __init__(self, status: int = 200, content: bytes = TINY, error: Exception | None = None) -> None:
        self.status, self.content, self.error = status, content, error
        self.requests: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def stream(self, method: str, url: str, **options: Any) -> Iterator[SimpleNamespace]:
        self.requests.append((f"{method} {url}", options))
        if self.error is not None:
            raise self.error
        half = len(self.content) // 2
        parts = [self.content[:half], self.content[half:]]
        yield SimpleNamespace(status_code=self.status, iter_bytes=lambda: iter(parts))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a fake hub in place of the real one, and an empty cache."""

    def put(hub: FakeHub) -> FakeHub:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: hub)
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
        return hub

    return put


def unknown(name: str, **options: Any) -> UnknownModel:
    with pytest.raises(UnknownModel) as caught:
        resolve(name, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_a_hub_id_is_resolved_with_one_short_request(online: Any) -> None:
    hub = online(FakeHub())
    resolved = resolve("someone/their-bert")
    assert (resolved.name, resolved.origin) == ("someone/their-bert", "hub")
    assert resolved.config.hidden_size == 128
    ((request, options),) = hub.requests
    assert request.startswith("GET ")
    assert request.endswith("/someone/their-bert/resolve/main/config.json")
    assert options["timeout"] == TIMEOUT_S <= 5


def test_a_revision_is_asked_for(online: Any) -> None:
    hub = online(FakeHub())
    resolve("someone/their-bert", revision="v2")
    assert "/resolve/v2/config.json" in hub.requests[0][0]


def test_a_catalogue_name_never_asks_the_hub(online: Any) -> None:
    hub = online(FakeHub())
    assert resolve("google-bert/bert-base-uncased").origin == "catalogue"
    assert hub.requests == []


def test_a_catalogue_name_with_a_revision_is_the_hubs(online: Any) -> None:
    hub = online(FakeHub())
    assert resolve("bert-base-uncased", revision="v2").origin == "hub"
    assert "/google-bert/bert-base-uncased/resolve/v2/" in hub.requests[0][0]


@pytest.mark.parametrize(
    ("hub", "reason"),
    [
        (FakeHub(status=404), "the hub has no such repository"),
        (FakeHub(status=401), "or it is private"),
        (FakeHub(status=403), "gated"),
        (FakeHub(status=500), "the hub answered 500"),
        (FakeHub(error=TimeoutError("no answer\nat all")), "could not be reached: TimeoutError"),
        (FakeHub(content=b" " * (MAX_FILE_BYTES + 1)), "larger than"),
    ],
)
def test_what_the_hub_does_not_give_is_an_unknown_model_with_the_reason(online: Any, hub: FakeHub, reason: str) -> None:
    online(hub)
    error = unknown("someone/bert-base-uncasd")
    assert reason in str(error)
    assert error.nearest[0] == "bert-base-uncased"


def test_a_damaged_configuration_on_the_hub_is_a_checkpoint_error(online: Any) -> None:
    online(FakeHub(content=b"<html>"))
    with pytest.raises(CheckpointError, match=r"someone/their-bert/config.json is not JSON"):
        resolve("someone/their-bert")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_the_hub_is_not_asked(online: Any, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    hub = online(FakeHub())
    monkeypatch.setenv(variable, "1")
    assert is_offline()
    assert "HF_HUB_OFFLINE" in str(unknown("someone/their-bert"))
    assert hub.requests == []


def test_offline_a_cached_configuration_is_used(online: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = online(FakeHub())
    (tmp_path / "config.json").write_bytes(TINY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    assert resolve("someone/their-bert").config.hidden_size == 128
    assert hub.requests == []


@pytest.mark.parametrize("name", ["bert", "owner/name", "a.b-c_d/e.f"])
def test_these_look_like_hub_ids(name: str) -> None:
    assert looks_like_hub_id(name)


@pytest.mark.parametrize(
    "name", ["", "/abs", "./here", "~/x", "a/b/c", "../up", "a b", "a/config.json", "x" * 200, "a\0", "é"]
)
def test_these_do_not(name: str) -> None:
    assert not looks_like_hub_id(name)
