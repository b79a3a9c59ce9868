"""From `config.json` to a transformers configuration: read with suspicion, every fault named by its field."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vramfit.errors import CheckpointError, nearest_names

MAX_FILE_BYTES = 10 * 10**6
"""A configuration is a few kilobytes; a larger file is something else."""

SIZE_LIMITS: Mapping[str, tuple[int, int]] = {
    "hidden_size": (1, 2**16),
    "embedding_size": (1, 2**16),
    "intermediate_size": (1, 2**20),
    "hidden_dim": (1, 2**20),
    "num_hidden_layers": (1, 1000),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "num_hidden_groups": (1, 1000),
    "inner_group_num": (1, 1000),
    "head_dim": (1, 2**16),
    "vocab_size": (1, 2**24),
    "max_position_embeddings": (1, 2**24),
    "type_vocab_size": (0, 2**16),
    "num_labels": (1, 10**6),
}
"""Smallest and largest sensible value by standard field name; transformers itself checks types only."""

_OTHER_SIZES = re.compile(r"(num|n)_\w+|\w+_(size|dim|layers|heads|groups|labels)|dim")
_OTHER_LIMIT = 2**24


def read_config_file(path: Path) -> dict[str, Any]:
    """The JSON object in a `config.json`, not yet judged.

    Raises:
        CheckpointError: no such file, not readable, too large, not JSON, or not a JSON object.
    """
    where = str(path)
    try:
        if not path.is_file():
            raise CheckpointError(f"{where} is not a file", file=where, hint="name a folder with config.json")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{where} is {size:,} bytes, too large for a model configuration (limit {MAX_FILE_BYTES:,})",
                file=where,
                hint="name the folder that holds the model's config.json",
            )
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}", file=where) from None
    return parse_config(content, where=where)


def parse_config(content: bytes, *, where: str) -> dict[str, Any]:
    """The JSON object in the bytes of a configuration; `where` names it in errors."""
    hint = "save the configuration again with `model.config.save_pretrained(folder)`"
    try:
        data = json.loads(content.decode("utf-8-sig"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else _one_line(error)
        raise CheckpointError(f"{where} is not JSON: {reason}", file=where, hint=hint) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} holds a JSON {_kind(data)}, not an object with settings", file=where, hint=hint)
    return data


def make_config(data: Mapping[str, Any], *, where: str) -> Any:
    """A transformers configuration from plain data; never runs code that comes with a model.

    Raises:
        CheckpointError: unknown `model_type`, or a field with an impossible value; one line that names it.
    """
    config_class = _config_class(data, where)
    check_sizes(data, config_class.attribute_map, where=where)
    for key in data:
        if key.startswith("__") or callable(getattr(config_class, key, None)):
            raise CheckpointError(f"{where}: {key!r} is not a configuration field", file=where)
    try:
        return config_class.from_dict({k: v for k, v in data.items() if k != "model_type"})
    except Exception as error:  # transformers raises whatever its field code happens to raise
        raise CheckpointError(
            f"{where}: {config_class.__name__} rejects it: {_one_line(error)}",
            file=where,
            hint="compare the field with the configuration the model was published with",
        ) from None


def check_sizes(data: Mapping[str, Any], attribute_map: Mapping[str, str], *, where: str, inside: str = "") -> None:
    """Refuse sizes that no model has: they would exhaust memory or fail far from their cause.

    Args:
        data: settings by name.
        attribute_map: standard name → the family's own name (DistilBERT's `hidden_size` is `dim`).
        where: the file, for an error.
        inside: path of the part of the file that `data` is, such as `text_config.`.
    """
    standard = {own: name for name, own in attribute_map.items()}
    for key, value in data.items():
        limits = SIZE_LIMITS.get(standard.get(key, key))
        if isinstance(value, dict) and key.endswith("_config"):
            check_sizes(value, {}, where=where, inside=f"{inside}{key}.")
        elif limits is not None and value is not None:
            if type(value) is not int or not limits[0] <= value <= limits[1]:
                raise _bad_field(where, inside + key, value, f"a whole number from {limits[0]} to {limits[1]:,}")
        elif isinstance(value, int | float) and abs(value) > _OTHER_LIMIT and _OTHER_SIZES.fullmatch(key):
            raise _bad_field(where, inside + key, value, f"at most {_OTHER_LIMIT:,}")


def _config_class(data: Mapping[str, Any], where: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = data.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        found = "has no model_type" if model_type is None else f"has model_type {_shown(model_type)}"
        raise CheckpointError(f"{where} {found}", file=where, hint='add "model_type", such as "bert" or "roberta"')
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    if data.get("auto_map"):
        hint = (
            "the model brings its own code: read it, then allow it with trust_remote_code=True or --trust-remote-code"
        )
    else:
        near = ", ".join(nearest_names(model_type[:60], list(CONFIG_MAPPING.keys())))
        hint = f"nearest known types: {near}; a newer transformers may know it"
    raise CheckpointError(
        f"{where}: model_type {_shown(model_type)} is not one that the installed transformers knows",
        file=where,
        hint=hint,
    )


def _bad_field(where: str, key: str, value: object, must_be: str) -> CheckpointError:
    return CheckpointError(f"{where}: {key} is {_shown(value)}; it must be {must_be}", file=where)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _kind(data: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(data), "null")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
