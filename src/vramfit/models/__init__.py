"""Models: published configurations by name, and everything else that can name a model, to its class."""

from vramfit.models.anatomy import (
    ModelCard,
    backbone,
    embeddings,
    encoder_layers,
    head_parameters,
    max_positions,
    model_card,
    num_layer_applications,
    vocab_size,
)
from vramfit.models.build import build_meta
from vramfit.models.catalogue import CatalogueEntry, all_entries, find_entry, model_names
from vramfit.models.configuration import default_attention, supported_attention, supported_tasks
from vramfit.models.resolve import ResolvedModel, resolve

__all__ = [
    "CatalogueEntry",
    "ModelCard",
    "ResolvedModel",
    "all_entries",
    "backbone",
    "build_meta",
    "default_attention",
    "embeddings",
    "encoder_layers",
    "find_entry",
    "head_parameters",
    "max_positions",
    "model_card",
    "model_names",
    "num_layer_applications",
    "resolve",
    "supported_attention",
    "supported_tasks",
    "vocab_size",
]
