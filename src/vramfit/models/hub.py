"""`config.json` of a repository on the hub: from the local cache, else one short request, never a retry."""

import os
import re
from pathlib import Path

from vramfit.models.configuration import MAX_FILE_BYTES

TIMEOUT_S = 5.0
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


class NotOnHubError(Exception):
    """Why there is no configuration: goes into the message of `UnknownModel`."""


def looks_like_hub_id(name: str) -> bool:
    """Whether a text could name a repository: `name` or `owner/name`, and no file."""
    plain = ".." not in name and "--" not in name and not name.endswith((".git", ".json", ".ipynb"))
    return plain and _REPOSITORY.fullmatch(name) is not None


def is_offline() -> bool:
    """Whether the user has forbidden the network (`HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`)."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.strip().upper() in ("1", "ON", "YES", "TRUE") for value in values)


def fetch_config(hub_id: str, *, revision: str | None = None) -> bytes:
    """The bytes of a repository's `config.json`.

    Raises:
        NotOnHubError: with the reason in a few words.
    """
    cached = _cached(hub_id, revision)
    if cached is not None:
        return cached
    if is_offline():
        raise NotOnHubError("not in the local cache, and HF_HUB_OFFLINE forbids asking the hub")
    return _download(hub_id, revision)


def _cached(hub_id: str, revision: str | None) -> bytes | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    if not isinstance(path, str):
        return None
    try:
        file = Path(path)
        return file.read_bytes() if file.stat().st_size <= MAX_FILE_BYTES else None
    except OSError:
        return None


def _download(hub_id: str, revision: str | None) -> bytes:
    """One GET. `hf_hub_download` would retry for 23 s where there is no network."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    url = hf_hub_url(hub_id, "config.json", revision=revision)
    try:
        with get_session().stream(
            "GET", url, headers=build_hf_headers(), timeout=TIMEOUT_S, follow_redirects=True
        ) as answer:
            if answer.status_code != 200:
                raise NotOnHubError(_reason(answer.status_code, revision))
            content = b""
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > MAX_FILE_BYTES:
                    raise NotOnHubError(f"its config.json is larger than {MAX_FILE_BYTES:,} bytes")
    except NotOnHubError:
        raise
    except Exception as error:  # the HTTP library behind huggingface_hub differs between its versions
        raise NotOnHubError(f"the hub could not be reached: {type(error).__name__}") from None
    return content


def _reason(status: int, revision: str | None) -> str:
    if status in (401, 404):
        what = "no such repository" if revision is None else f"no such repository or revision {revision!r}"
        return f"the hub has {what}, or it has no config.json, or it is private"
    if status == 403:
        return "the repository is gated: accept its terms on the hub and log in with `hf auth login`"
    return f"the hub answered {status}"
