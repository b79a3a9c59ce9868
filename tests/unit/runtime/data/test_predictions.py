"""Predictions as rows for JSON."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vramfit.tasks import find_task
from vramfit.tasks.parts.reading import Tokenizing


def predictions(
    output: Any, batch: Any, references: Any, names: Any, task: str, tokenizer: Any = None
) -> list[dict[str, Any]]:
    how = Tokenizing(tokenizer=tokenizer, max_length=12, label_names=names)
    return find_task(task).predictions(output, batch, references, how)


def test_a_label_with_its_probability(read: Any, write: Any) -> None:
    samples = read(write("a.csv", "text\ngood\nbad\n"), needs_labels=False, label_names=["neg", "pos"])
    output = SimpleNamespace(logits=torch.tensor([[0.0, 3.0], [0.0, -1.0]]))
    rows = predictions(output, samples.collate([0, 1]), samples.references, samples.label_names, samples.task)
    assert [(row["row"], row["index"], row["label"]) for row in rows] == [(2, 0, "pos"), (3, 1, "neg")]
    assert rows[0]["probability"] == pytest.approx(1 / (1 + torch.tensor(-3.0).exp().item()))
    json.dumps(rows)


def test_entities_with_their_text(read: Any, write: Any) -> None:
    names = ("B-place", "I-place", "O")
    samples = read(write("a.txt", "in berlin film.\n"), "token-classification", needs_labels=False, label_names=names)
    batch = samples.collate([0])
    chosen = torch.tensor([[2, 2, 0, 1, 2, 2]])
    output = SimpleNamespace(logits=50.0 * torch.nn.functional.one_hot(chosen, 3).float())
    (row,) = predictions(output, batch, samples.references, names, samples.task)
    assert (row["row"], row["index"]) == (1, 0)
    (entity,) = row["entities"]
    assert entity == {"type": "place", "text": "berlin film", "start": 3, "end": 14, "probability": pytest.approx(1.0)}
    assert row["tags"] == ["O", "B-place", "I-place", "O"]
    assert "num_words_cut" not in row
    json.dumps(row)


def test_words_that_were_cut_are_counted(read: Any, write: Any) -> None:
    samples = read(
        write("a.txt", "a b c d e\n"), "token-classification", needs_labels=False, max_length=4, label_names=["NOUN"]
    )
    output = SimpleNamespace(logits=torch.zeros(1, 4, 1))
    (row,) = predictions(output, samples.collate([0]), samples.references, ["NOUN"], samples.task)
    assert row["num_words_cut"] == 3
    assert [e["text"] for e in row["entities"]] == ["a", "b"]


def test_windows_of_a_question_become_one_row(read: Any, write: Any) -> None:
    rows = [
        {"id": "x", "question": "where is anna", "context": "a b c d e f good bad film very berlin a b"},
        {"id": "y", "question": "where", "context": "good film"},
    ]
    path = write("a.jsonl", "\n".join(map(json.dumps, rows)))
    samples = read(path, "question-answering", needs_labels=False, max_length=12, stride=2)
    batch = samples.collate(range(len(samples)))
    assert len(samples) > 2
    berlin = batch["input_ids"][2, 7]
    logits = 5.0 * (batch["input_ids"] == berlin).float()
    output = SimpleNamespace(start_logits=logits, end_logits=logits)
    found = predictions(output, batch, samples.references, (), samples.task)
    first, second = find_task(samples.task).merged(reversed(found))
    assert (first["id"], first["answer"], first["score"]) == ("x", "berlin", 10.0)
    assert rows[0]["context"][first["start"] : first["end"]] == "berlin"
    assert (second["id"], second["row"], second["index"]) == ("y", 2, 1)
    json.dumps(found)


def test_masks_are_filled(read: Any, write: Any, tokenizer: Any) -> None:
    samples = read(write("a.txt", "good [MASK]\nbad\n"), "masked-lm", needs_labels=False)
    batch = samples.collate([0, 1])
    logits = torch.zeros(2, 4, len(tokenizer))
    logits[0, 2, tokenizer.convert_tokens_to_ids("film")] = 30
    output = SimpleNamespace(logits=logits)
    first, second = predictions(output, batch, samples.references, (), samples.task, tokenizer=tokenizer)
    assert first["fills"] == [{"position": 2, "token": "film", "probability": pytest.approx(1.0)}]
    assert second == {"row": 2, "index": 1, "fills": []}


def test_the_scores_of_the_best_labels_on_demand(read: Any, write: Any) -> None:
    names = ["a", "b", "c"]
    samples = read(write("a.csv", "text\ngood\nbad\nfilm\n"), needs_labels=False, label_names=names)
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 2.0], [0.5, 0.25, 0.0]])
    references = [r | {"top_k": k} for r, k in zip(samples.references, (2, None, 10), strict=True)]
    rows = predictions(SimpleNamespace(logits=logits), samples.collate([0, 1, 2]), references, names, samples.task)
    assert [s["label"] for s in rows[0]["scores"]] == ["b", "c"]
    assert set(rows[1]) == {"row", "index", "label", "probability"}
    assert [s["label"] for s in rows[2]["scores"]] == ["a", "b", "c"]
    assert sum(s["probability"] for s in rows[2]["scores"]) == pytest.approx(1.0, abs=1e-5)
    for row, values in zip(rows, logits.softmax(-1).tolist(), strict=True):
        assert row["probability"] == float(f"{max(values):.6g}")
        assert row.get("scores", [row])[0]["probability"] == row["probability"]
    assert [row["label"] for row in rows] == ["b", "a", "a"]


def test_the_scores_of_every_word_and_every_mask_on_demand(read: Any, write: Any, tokenizer: Any) -> None:
    names = ("B-place", "I-place", "O")
    samples = read(
        write("a.txt", "in berlin good\n"), "token-classification", needs_labels=False, max_length=4, label_names=names
    )
    output = SimpleNamespace(
        logits=torch.tensor([[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    )
    asked = [r | {"top_k": 2} for r in samples.references]
    (row,) = predictions(output, samples.collate([0]), asked, names, samples.task)
    assert [[s["label"] for s in word] for word in row["scores"]] == [["O", "I-place"], ["B-place", "I-place"], []]
    assert (row["tags"], row["num_words_cut"]) == (["O", "B-place", "O"], 1)
    masked = read(write("b.txt", "good [MASK]\n"), "masked-lm", needs_labels=False)
    logits = torch.zeros(1, 4, len(tokenizer))
    for token, value in (("film", 30), ("bad", 29)):
        logits[0, 2, tokenizer.convert_tokens_to_ids(token)] = value
    asked = [r | {"top_k": 2} for r in masked.references]
    (row,) = predictions(
        SimpleNamespace(logits=logits), masked.collate([0]), asked, (), masked.task, tokenizer=tokenizer
    )
    (fill,) = row["fills"]
    assert [s["token"] for s in fill["scores"]] == ["film", "bad"]
    assert (fill["position"], fill["token"]) == (2, "film")
