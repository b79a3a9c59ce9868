"""Small models with a tokenizer, small data for every task, and runs over them."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, BertTokenizer

from vramfit.records.run import RunRecord
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.train import train

GOOD = ("fine", "great", "lovely", "warm", "bright", "clever")
BAD = ("poor", "dull", "awful", "cold", "weak", "silly")
PLAIN = (
    "the",
    "film",
    "was",
    "and",
    "music",
    "in",
    "paris",
    "anna",
    "berlin",
    "tom",
    "who",
    "saw",
    "where",
    "lives",
    ".",
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_model(folder: Path, **changes: Any) -> Path:
    """A two-layer encoder with random weights and a tokenizer of a few words."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *GOOD, *BAD, *PLAIN]
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=48, initializer_range=0.2, **(sizes | changes))
    BertModel(config).save_pretrained(folder)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=48).save_pretrained(folder)
    vocabulary.unlink()
    return folder


def write_classes(path: Path, *, num_rows: int = 48, seed: int = 0) -> Path:
    """Sentences of uneven length with one telling word, and its label."""
    draw = random.Random(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(num_rows):
            good = i % 2 == 0
            words = [draw.choice(PLAIN[:4]) for _ in range(draw.randint(1, 6))]
            words.insert(draw.randrange(len(words)), draw.choice(GOOD if good else BAD))
            writer.writerow([" ".join(words), "good" if good else "bad"])
    return path


def write_tags(path: Path, *, num_rows: int = 32) -> Path:
    """Sentences with the places and people in them marked."""
    draw = random.Random(1)
    tags = {"paris": "B-place", "berlin": "B-place", "anna": "B-person", "tom": "B-person"}
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            words = [draw.choice(PLAIN[:10]) for _ in range(draw.randint(3, 8))]
            file.write(json.dumps({"tokens": words, "tags": [tags.get(word, "O") for word in words]}) + "\n")
    return path


def write_questions(path: Path, *, num_rows: int = 24) -> Path:
    """Where people live."""
    draw = random.Random(2)
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            who, where = draw.choice(("anna", "tom")), draw.choice(("paris", "berlin"))
            context = f"the film was {draw.choice(GOOD)} . {who} lives in {where} ."
            answers = {"text": [where], "answer_start": [context.index(where)]}
            row = {"id": str(i), "question": f"where lives {who}", "context": context, "answers": answers}
            file.write(json.dumps(row) + "\n")
    return path


def write_texts(path: Path, *, num_rows: int = 40) -> Path:
    """Sentences to hide words of."""
    draw = random.Random(3)
    lines = [" ".join(draw.choice(PLAIN) for _ in range(draw.randint(6, 12))) for _ in range(num_rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def request_of(folder: Path, **changes: Any) -> TrainRequest:
    """A short run on the CPU over sentences with labels."""
    model, data = folder / "source", folder / "train.csv"
    if not model.exists():
        write_model(model)
    if not data.exists():
        write_classes(data)
    usual = {"epochs": 2, "batch": 8, "lr": 1e-3, "device": "cpu", "output": str(folder / "out")}
    return TrainRequest(model=str(model), **({"data": str(data)} | usual | changes))


def run(folder: Path, **changes: Any) -> RunRecord:
    return train(request_of(folder, **changes))


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(Path(folder) / "model.safetensors")
    return loaded


def same_weights(one: Path | str, other: Path | str) -> bool:
    """Whether two saved models are equal to the bit."""
    first, second = weights(one), weights(other)
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)
