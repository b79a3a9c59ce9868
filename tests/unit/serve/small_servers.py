"""Small models with a head for every task, and engines that serve them on the CPU."""

import json
from pathlib import Path
from typing import Any

import torch
from tests.unit.runtime.training.small_runs import write_model
from transformers import (
    AutoConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)

from vramfit.serve.engine import Engine
from vramfit.serve.loading import load_model
from vramfit.serve.settings import ServeSettings

HEADS = {
    "sequence-classification": BertForSequenceClassification,
    "token-classification": BertForTokenClassification,
    "question-answering": BertForQuestionAnswering,
    "masked-lm": BertForMaskedLM,
}
LABELS = {"token-classification": ["O", "B-place", "I-place"], "sequence-classification": ["bad", "good"]}


def write_head(folder: Path, task: str) -> Path:
    """A model for a task, with weights of its own; an encoder alone for features."""
    write_model(folder)
    if task == "features":
        return folder
    names = LABELS.get(task, ["LABEL_0", "LABEL_1"])
    config = AutoConfig.from_pretrained(folder, id2label=dict(enumerate(names)))
    torch.manual_seed(3)
    HEADS[task](config).save_pretrained(folder)
    return folder


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(load_model(ServeSettings(model=str(folder), **({"devices": ("cpu",)} | settings))))


def ask(engine: Engine, inputs: Any, status: int = 200) -> Any:
    """What an engine says to some inputs."""
    reply = engine.answer(json.dumps({"inputs": inputs}).encode())
    assert reply.status == status, reply.body
    return json.loads(reply.body)
