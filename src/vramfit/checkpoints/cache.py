"""Weights that the Hugging Face cache already has: looked up, never fetched."""

from pathlib import Path

from vramfit.models.hub import looks_like_hub_id

_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def cached_snapshot(hub_id: str, *, revision: str | None = None) -> Path | None:
    """The snapshot folder of a repository with its weights, in the local cache; None when it is not there."""
    if not looks_like_hub_id(hub_id):
        return None
    from huggingface_hub import try_to_load_from_cache

    for name in _FILES:
        found = try_to_load_from_cache(hub_id, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None
