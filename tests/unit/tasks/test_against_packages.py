"""Running metrics beside seqeval and SQuAD's scripts, on cases that `scripts/make_metric_fixtures.py` wrote."""

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vramfit.tasks.parts.results import AnswerMetrics
from vramfit.tasks.token_classification import TagMetrics

CASES = json.loads((Path(__file__).parent / "metrics.json").read_text(encoding="utf-8"))
BATCH = 7


def named(groups: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("group", groups, ids=[group["name"] for group in groups])


def in_batches(cases: list[Any]) -> list[list[Any]]:
    return [cases[i : i + BATCH] for i in range(0, len(cases), BATCH)]


@named(CASES["tags"])
def test_entities_are_scored_as_seqeval_does(group: dict[str, Any]) -> None:
    names = group["label_names"]
    metrics = TagMetrics(names)
    for sentences in in_batches([(true.split(), found.split()) for true, found in group["sentences"]]):
        width = max(len(true) for true, _ in sentences)
        chosen = torch.zeros(len(sentences), width, dtype=torch.long)
        for row, (_, found) in zip(chosen, sentences, strict=True):
            row[: len(found)] = torch.tensor([names.index(tag) for tag in found])
        output = SimpleNamespace(logits=F.one_hot(chosen, len(names)).float())
        references = [{"tags": true, "first": list(range(len(true)))} for true, _ in sentences]
        metrics.update(output, {"labels": torch.zeros_like(chosen)}, references)
    result = metrics.result()
    assert {name: result[name] for name in group["scores"]} == pytest.approx(group["scores"], abs=1e-9)


@named(CASES["answers"])
def test_answers_are_scored_as_squads_scripts_do(group: dict[str, Any]) -> None:
    metrics = AnswerMetrics()
    for questions in in_batches(list(enumerate(group["questions"]))):
        # the whole context is one token after [CLS], which wins where nothing is said
        logits = torch.tensor([[0.0, 1.0] if said else [1.0, 0.0] for _, (said, _) in questions])
        references = [
            {
                "question_number": number,
                "answers": gold,
                "context": said or "something",
                "context_at": 1,
                "offsets": array("i", [0, len(said or "something")]),
                "cls": 0,
            }
            for number, (said, gold) in questions
        ]
        places = torch.zeros(len(questions), dtype=torch.long)
        output = SimpleNamespace(start_logits=logits, end_logits=logits)
        metrics.update(output, {"start_positions": places, "end_positions": places}, references)
    result = metrics.result()
    assert {name: result[name] for name in group["scores"]} == pytest.approx(group["scores"], abs=1e-9)
