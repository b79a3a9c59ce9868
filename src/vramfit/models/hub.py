"""`config.json` of a repository on the hub: from the local cache, else one short request, never a retry."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramfit.errors import CheckpointError
from vramfit.models.configuration import MAX_FILE_BYTES, class_for_task
from vramfit.tasks import find_task

FOLDER = "onnx"
"""Where optimum and sentence-transformers look for exported files, inside a model's folder."""
WHOLE = "model.onnx"
QUANTIZED = "model_qint8_*.onnx"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def has_own_code(data: Mapping[str, Any]) -> bool:
    """Whether a configuration names code of its own."""
    auto_map = data.get("auto_map")
    return isinstance(auto_map, dict) and "AutoConfig" in auto_map


def load_remote_config(source: str, *, revision: str | None = None) -> Any:
    """The configuration of a folder or hub id, by its own code. **Runs that code.**"""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=True, revision=revision)
    except Exception as error:  # anything can happen in foreign code
        raise _failed(source, error) from None


def remote_class(config: Any, task: str, source: str, *, revision: str | None = None) -> type:
    """The class of a task, from the model's own code where it has one. **Runs that code.**"""
    reference = (getattr(config, "auto_map", None) or {}).get(find_task(task).auto_class)
    if reference is None:
        return class_for_task(config, task)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        found: type = get_class_from_dynamic_module(reference, source, revision=revision)
    except Exception as error:  # anything can happen in foreign code
        raise _failed(source, error) from None
    return found


def _failed(source: str, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:300]
    return CheckpointError(
        f"{source}: the model's own code failed: {type(error).__name__}: {reason}",
        file=source,
        hint="the code may need another version of transformers; see the model's page",
    )


def plain_file(folder: Path, name: str) -> Path | None:
    """The regular file of that name in a folder; None when there is none.

    A link may lead to another place inside the folder, or, in the cache of the Hugging Face hub, to the blobs
    of the same repository; the blobs may be on another disk in the user's own cache, and in no folder that came from
    elsewhere.

    Raises:
        CheckpointError: a link that leaves or leads nowhere, or something that is no regular file.
    """
    path = folder / name
    where = str(path)
    try:
        if not path.exists():
            if path.is_symlink():
                raise CheckpointError(
                    f"{where} is a link to {path.readlink()}, which does not exist",
                    file=where,
                    hint="download the file again; the cache it came from may have been cleaned",
                )
            return None
        if path.is_symlink() and not _stays(path.resolve(), folder):
            raise CheckpointError(
                f"{where} is a link that leaves the folder, to {path.resolve()}",
                file=where,
                hint="copy the file into the folder if you trust it",
            )
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise CheckpointError(f"{where} is {kind}, not a file", file=where, hint="put the file in its place")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{where} cannot be read: {_cause(error)}", file=where) from None
    return path


def exported_file(model: str) -> Path | None:
    """The file that is run in place of weights: the quantized one where there is one; None where weights are there.

    Raises:
        CheckpointError: a link that leaves the folder.
    """
    folder = Path(model).expanduser()
    inside = folder / FOLDER
    if not inside.is_dir() or any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        return None
    names = [*sorted(file.name for file in inside.glob(QUANTIZED)), WHOLE]
    return next((file for name in names if (file := plain_file(inside, name)) is not None), None)


def _stays(target: Path, folder: Path) -> bool:
    if target.is_relative_to(folder.resolve()):
        return True
    # hub cache: models--owner--name/snapshots/<revision>/model.safetensors → ../../blobs/<sha>
    for place in (folder.absolute(), folder.resolve()):  # the folder may be a link to a snapshot
        for snapshots in place.parents:
            repository = snapshots.parent
            is_cache = snapshots.name == "snapshots" and repository.name.startswith("models--")
            blobs = (repository / "blobs").resolve()
            is_own = blobs.is_relative_to(repository.resolve())
            if is_cache and target.is_relative_to(blobs) and (is_own or _is_users_cache(repository.parent)):
                return True
    return False


def _is_users_cache(folder: Path) -> bool:
    """Whether it is the cache that downloads go to: a link to another disk there is of the user's own making."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return folder.resolve() == Path(HF_HUB_CACHE).resolve()


def _cause(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


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
