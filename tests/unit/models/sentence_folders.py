"""Folders of sentence-transformers, written by hand: a small encoder, and the parts that a test asks for."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.unit.runtime.training.small_runs import write_model

WIDTH = 32
"""Of the encoder's vectors."""
TEXTS = ["the film was great", "anna", "tom saw the awful film and the music was dull . tom lives in berlin ."]


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def list_modules(folder: Path, *kinds: str, encoder: str = "") -> None:
    """Write modules.json: the encoder, then these."""
    paths = [encoder, *(f"{place}_{kind}" for place, kind in enumerate(kinds, 1))]
    names = ["Transformer", *kinds]
    rows = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
        for place, (path, name) in enumerate(zip(paths, names, strict=True))
    ]
    write_json(folder / "modules.json", rows)


def write_pooling(folder: Path, **config: Any) -> None:
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH} | config)


def write_dense(folder: Path, place: int = 2, *, wide: int = WIDTH, narrow: int = 12, pickled: bool = False) -> None:
    """A dense layer with weights of its own."""
    part = folder / f"{place}_Dense"
    config = {"in_features": wide, "out_features": narrow, "bias": True}
    write_json(part / "config.json", config | {"activation_function": "torch.nn.modules.activation.Tanh"})
    generator = torch.Generator().manual_seed(place)
    weight = torch.randn(narrow, wide, generator=generator) / wide**0.5
    tensors = {"linear.weight": weight, "linear.bias": torch.randn(narrow, generator=generator)}
    if pickled:
        torch.save(tensors, part / "pytorch_model.bin")
    else:
        save_file(tensors, part / "model.safetensors")


def write_folder(folder: Path, *kinds: str, **pooling: Any) -> Path:
    """An encoder, a pooling, and after it the kinds that are named."""
    write_model(folder)
    list_modules(folder, "Pooling", *kinds)
    write_pooling(folder, **pooling)
    for place, kind in enumerate(kinds, 2):
        if kind == "Dense":
            write_dense(folder, place)
    return folder
