"""Models whose repository brings its own Python code; only ever reached with `trust_remote_code=True`."""

from collections.abc import Mapping
from typing import Any

from vramfit.errors import CheckpointError
from vramfit.models.tasks import class_for_task
from vramfit.tasks import find_task


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
