"""What a model says about each sample, as rows for JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vramfit.runtime.data.answers import Answer, read_answers
from vramfit.runtime.data.entities import OUTSIDE, are_spans, entities
from vramfit.step.inputs import Batch
from vramfit.workload import Task


def predictions(
    output: Any,
    batch: Batch,
    references: Sequence[dict[str, Any]],
    label_names: Sequence[str],
    task: Task,
    *,
    tokenizer: Any = None,
) -> list[dict[str, Any]]:
    """A row for each sample of a batch, in its order; each names the `row` and the `index` that its reference has.

    By task: `label` and `probability`; `entities` with type, text, characters and probability, and a tag for each word;
    `answer` with its characters and score, a row for each window (see `merge_windows`); `fills` of mask tokens.

    Args:
        output: with logits, on any device.
        batch: its inputs.
        references: of its samples, in its order.
        label_names: names of the classes.
        task: what the model does.
        tokenizer: gives filled tokens their text (masked-lm); without it there are only their numbers.
    """
    if task == "sequence-classification":
        return _classes(output.logits, references, label_names)
    if task == "token-classification":
        return _tags(output.logits, references, label_names)
    if task == "question-answering":
        pairs = zip(read_answers(output, references), references, strict=True)
        return [_answer_row(answer, reference) for answer, reference in pairs]
    return _fills(output.logits, batch["input_ids"], references, tokenizer)


def merge_windows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a question, in the order of the questions: of the windows of a long context, the best answer stays."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        number = row["question_number"]
        known = merged.get(number, row)
        silence = min(known["no_answer_score"], row["no_answer_score"])
        best = row if (row["score"], -row["start"]) > (known["score"], -known["start"]) else known
        merged[number] = best | {"no_answer_score": silence}
    return [merged[number] for number in sorted(merged)]


def _place(reference: dict[str, Any]) -> dict[str, Any]:
    """Where a sample is in its file; a request of a server has no more than a number."""
    return {name: reference[name] for name in ("row", "index") if name in reference}


def _classes(logits: torch.Tensor, references: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    probabilities, chosen = logits.float().softmax(-1).max(-1)
    found = zip(references, chosen.tolist(), probabilities.tolist(), strict=True)
    return [_place(r) | {"label": names[label], "probability": p} for r, label, p in found]


def _tags(logits: torch.Tensor, references: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    probabilities, chosen = logits.float().softmax(-1).max(-1)
    found = zip(references, chosen.tolist(), probabilities.tolist(), strict=True)
    return [_tag_row(r, labels, p, names) for r, labels, p in found]


def _tag_row(
    reference: dict[str, Any], labels: list[int], probabilities: list[float], names: Sequence[str]
) -> dict[str, Any]:
    first, text, spans = reference["first"], reference["text"], reference["spans"]
    tags = [names[labels[place]] if place >= 0 else OUTSIDE for place in first]
    found = []
    for kind, begin, end in entities(tags) if are_spans(names) else _words(tags):
        sure = [probabilities[first[word]] for word in range(begin, end + 1)]
        start, stop = spans[begin][0], spans[end][1]
        entity = {"type": kind, "text": text[start:stop], "start": start, "end": stop}
        found.append(entity | {"probability": sum(sure) / len(sure)})
    row = _place(reference) | {"entities": found, "tags": tags}
    num_cut = sum(place < 0 for place in first)
    return row | {"num_words_cut": num_cut} if num_cut else row


def _words(tags: list[str]) -> list[tuple[str, int, int]]:
    """Tags that mark no spans: each word by itself."""
    return [(tag, place, place) for place, tag in enumerate(tags) if tag != OUTSIDE]


def _answer_row(answer: Answer, reference: dict[str, Any]) -> dict[str, Any]:
    return _place(reference) | {
        "id": reference["id"],
        "question_number": reference["question_number"],
        "answer": answer.text,
        "start": answer.begin,
        "end": answer.end,
        "score": answer.score,
        "no_answer_score": answer.no_answer_score,
    }


def _fills(
    logits: torch.Tensor, ids: torch.Tensor, references: Sequence[dict[str, Any]], tokenizer: Any
) -> list[dict[str, Any]]:
    rows = []
    for i, reference in enumerate(references):
        places = [] if tokenizer is None else (ids[i] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
        fills = []
        for place in places:
            probability, token = logits[i, place].float().softmax(-1).max(-1)
            text = tokenizer.convert_ids_to_tokens(int(token))
            fills.append({"position": place, "token": text, "probability": float(probability)})
        rows.append(_place(reference) | {"fills": fills})
    return rows
