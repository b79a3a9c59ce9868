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
    `answer` with its characters and score, a row for each window (see `merge_windows`); `fills` of mask tokens. Where a
    reference has a `top_k`, as many of the best labels or tokens with their probabilities, as `scores`. Scores have
    six significant digits.

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
    names = ("score", "no_answer_score")
    return [merged[number] | {name: _shown(merged[number][name]) for name in names} for number in sorted(merged)]


def _place(reference: dict[str, Any]) -> dict[str, Any]:
    """Where a sample is in its file; a request of a server has no more than a number."""
    return {name: reference[name] for name in ("row", "index") if name in reference}


def _shown(score: float) -> float:
    """A score in six significant digits, which is what fp32 leaves of it."""
    return float(f"{score:.6g}")


def _scores(values: Sequence[float], places: Sequence[int], names: Sequence[str], top_k: int) -> list[dict[str, Any]]:
    """The best labels of one text or word."""
    best = list(zip(places, values, strict=True))[:top_k]
    return [{"label": names[place], "probability": _shown(value)} for place, value in best]


def _best(logits: torch.Tensor, references: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Probabilities and places of the best labels, the best first: as many as any of the samples asks for."""
    most = max((reference.get("top_k") or 1 for reference in references), default=1)
    probabilities = logits.float().softmax(-1)
    if most == 1:
        values, places = probabilities.max(-1, keepdim=True)
    else:
        values, places = probabilities.topk(min(most, logits.shape[-1]), -1)
    return values.tolist(), places.tolist()


def _classes(logits: torch.Tensor, references: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for reference, values, places in zip(references, *_best(logits, references), strict=True):
        row = _place(reference) | {"label": names[places[0]], "probability": _shown(values[0])}
        top_k = reference.get("top_k")
        rows.append(row | {"scores": _scores(values, places, names, top_k)} if top_k else row)
    return rows


def _tags(logits: torch.Tensor, references: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    found = zip(references, *_best(logits, references), strict=True)
    return [_tag_row(reference, places, values, names) for reference, values, places in found]


def _tag_row(
    reference: dict[str, Any], labels: list[list[int]], probabilities: list[list[float]], names: Sequence[str]
) -> dict[str, Any]:
    """Of each token, the best labels and their probabilities are given, the best first."""
    first, text, spans = reference["first"], reference["text"], reference["spans"]
    tags = [names[labels[place][0]] if place >= 0 else OUTSIDE for place in first]
    found = []
    for kind, begin, end in entities(tags) if are_spans(names) else _words(tags):
        sure = [probabilities[first[word]][0] for word in range(begin, end + 1)]
        start, stop = spans[begin][0], spans[end][1]
        entity = {"type": kind, "text": text[start:stop], "start": start, "end": stop}
        found.append(entity | {"probability": _shown(sum(sure) / len(sure))})
    row = _place(reference) | {"entities": found, "tags": tags}
    if top_k := reference.get("top_k"):
        seen = [(probabilities[place], labels[place]) if place >= 0 else ([], []) for place in first]
        row["scores"] = [_scores(values, places, names, top_k) for values, places in seen]
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
        top_k = reference.get("top_k")
        fills = []
        for place in places:
            values, tokens = _best(logits[i, place], [reference])
            texts = tokenizer.convert_ids_to_tokens(tokens)
            found = [{"token": t, "probability": _shown(p)} for t, p in zip(texts, values, strict=True)]
            fills.append({"position": place, **found[0]} | ({"scores": found} if top_k else {}))
        rows.append(_place(reference) | {"fills": fills})
    return rows
