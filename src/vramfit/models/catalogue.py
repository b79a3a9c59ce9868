"""The published configurations that vramfit knows without a network: names, aliases, headline figures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vramfit.errors import NEAR, UnknownModel, nearest_names

_HERE = Path(__file__).parent
USES = {
    "encoder": "Encoders, to fine-tune",
    "embedding": "Embedding models",
    "reranker": "Rerankers",
    "classifier": "Classifiers",
}
"""What models are for → the heading of their group, in the order that groups are listed in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """One model of the catalogue; enough to list it without importing transformers."""

    name: str
    """The catalogue name, also the name of its configuration file."""
    family: str
    """`model_type` of the configuration: bert, roberta, modernbert, …"""
    hub_id: str
    """The model's own repository on the hub."""
    aliases: tuple[str, ...]
    """Further names and hub ids that mean the same configuration."""
    use: str
    """What it was trained for, one of `USES`."""
    num_layers: int
    """Transformer layers a token passes, shared or not."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Attention heads a layer."""
    max_positions: int
    """Longest usable sequence in tokens."""
    vocab_size: int
    """Rows of the word embedding."""
    num_parameters: int
    """Parameters of the bare encoder (`AutoModel`), tied ones once."""
    kind: str
    """How near the file is to the official one: official, exact duplicate, re-save of base, …"""
    source: str
    """Where the values were published."""
    note: str = ""
    """What a reader of the values should know."""

    def config_data(self) -> dict[str, Any]:
        """The configuration as published, as plain data; a fresh copy each time."""
        text = (_HERE / "configs" / f"{self.name}.json").read_text(encoding="utf-8")
        data: dict[str, Any] = json.loads(text)
        return data


@cache
def _entries() -> Mapping[str, CatalogueEntry]:
    data = json.loads((_HERE / "catalogue.json").read_text(encoding="utf-8"))
    return {
        name: CatalogueEntry(name=name, **(fields | {"aliases": tuple(fields["aliases"])}))
        for name, fields in data.items()
    }


@cache
def _by_any_name() -> Mapping[str, CatalogueEntry]:
    """Entries by lower-case name, hub id and alias."""
    return {
        alias.lower(): entry for entry in _entries().values() for alias in (*entry.aliases, entry.hub_id, entry.name)
    }


def model_names() -> tuple[str, ...]:
    """All catalogue names, in alphabetical order.

    >>> "bert-base-uncased" in model_names()
    True
    """
    return tuple(sorted(_entries()))


def all_entries() -> tuple[CatalogueEntry, ...]:
    """All entries, in the order of `model_names()`."""
    return tuple(_entries()[name] for name in model_names())


def find_entry(name: str) -> CatalogueEntry | None:
    """The entry of that name, alias or hub id, whatever the case; None when there is none.

    >>> find_entry("Google-BERT/bert-base-uncased").name
    'bert-base-uncased'
    """
    return _by_any_name().get(name.strip().lower())


def unknown_model(name: str, *, because: str = "") -> UnknownModel:
    """The error for a name that means nothing: one line, with the nearest catalogue names, three at most.

    Args:
        name: what was asked for.
        because: why nothing else was found either, e.g. "the hub has no such repository".
    """
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    nearest = nearest_names(shown, model_names(), least=NEAR)
    reason = f" ({because})" if because else ""
    return UnknownModel(
        f"unknown model {shown!r}{reason}" + (f"; nearest: {', '.join(nearest)}" if nearest else ""),
        nearest=nearest,
        hint="give a catalogue name (`vramfit models` lists them), a hub id, or a folder with config.json",
    )
