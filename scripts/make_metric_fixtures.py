"""Writes tests/unit/tasks/metrics.json: tags and answers with the scores that the field's packages give them.

    pip install --target /tmp/scorers --no-deps seqeval scikit-learn scipy joblib threadpoolctl narwhals \
        torchmetrics lightning-utilities
    PYTHONPATH=/tmp/scorers python scripts/make_metric_fixtures.py

Entity scores are seqeval's, in its default mode. For answers there is no package with SQuAD's scripts in it:
torchmetrics has one in single precision which treats empty texts as SQuAD 2.0 does. So the expectation is the published
algorithm (evaluate-v1.1, and evaluate-v2.0 where questions may have no answer), in double precision, and torchmetrics
has to agree with every answer of which normalization leaves something.
"""

import json
import random
import re
import string
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score
from torchmetrics.functional.text import squad

TARGET = Path(__file__).parent.parent / "tests" / "unit" / "tasks" / "metrics.json"
TYPES = ("PER", "LOC", "ORG", "creative-work")
WORDS = (
    *("the", "a", "An", "The", "Paris", "paris", "New", "York", "1976", "3.5", "U.S.", "Beyoncé", "tower", "Tower"),
    *("of", "cat-a-log", "rock’n’roll", "$5", "%", "“quoted”", "then", "banana", "é", "五", "(born", "1889)"),
)
ENDS = ("", "", "", ".", ",", "!", " ", "  ", "'s")


def well_formed(draw: random.Random, length: int) -> list[str]:
    """IOB2: every entity begins with B."""
    tags: list[str] = []
    while len(tags) < length:
        kind = draw.choice(TYPES)
        tags += draw.choice([["O"], ["O", "O"], [f"B-{kind}", *[f"I-{kind}"] * draw.randrange(4)]])
    return tags[:length]


def changed(draw: random.Random, tags: list[str], names: list[str], share: float) -> list[str]:
    """Some tags are others, whatever follows from that: I without B, types that change inside."""
    return [draw.choice(names) if draw.random() < share else tag for tag in tags]


def tag_group(draw: random.Random, name: str, marks: str, num: int, *, broken: float, kinds: bool = True) -> Any:
    """Sentences with true and found tags, and seqeval's scores over all of them."""
    names = ["O", *(f"{mark}-{kind}" for mark in marks for kind in TYPES)] if kinds else ["O", *marks]
    true, found = [], []
    for _ in range(num):
        base = well_formed(draw, draw.randint(1, 12))
        base = base if kinds else [tag[0] for tag in base]
        true.append(changed(draw, base, names, broken))
        found.append(changed(draw, true[-1], names, draw.choice([0, 0.1, 0.3, 1])))
    scorers = {"precision": precision_score, "recall": recall_score, "f1": f1_score, "accuracy": accuracy_score}
    return {
        "name": name,
        "label_names": names,
        "sentences": [[" ".join(a), " ".join(b)] for a, b in zip(true, found, strict=True)],
        "scores": {key: float(scorer(true, found)) for key, scorer in scorers.items()},
    }


def phrase(draw: random.Random) -> str:
    return "".join(f"{draw.choice(WORDS)}{draw.choice(ENDS)} " for _ in range(draw.randint(1, 5))).strip()


def near(draw: random.Random, text: str) -> str:
    """The same answer, or almost."""
    words = text.split()
    how = draw.randrange(6)
    if how == 0:
        return f"the {text.upper()}."
    if how == 1 and len(words) > 1:
        return " ".join(words[1:])
    if how == 2:
        return f"{text} {words[0]}"
    return " ".join(reversed(words)) if how == 3 else text if how == 4 else phrase(draw)


def plain(text: str) -> str:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def published(said: str, gold: list[str], *, second: bool) -> tuple[float, float]:
    """Exact match and F1 by evaluate-v1.1, or v2.0 (`second`)."""
    if second:
        gold = [text for text in gold if plain(text)] or [""]
    overlaps = []
    for text in gold:
        one, other = plain(said).split(), plain(text).split()
        same = sum((Counter(one) & Counter(other)).values())
        if second and not (one and other):
            overlaps.append(float(one == other))
        else:
            overlaps.append(
                2 * (same / len(one)) * (same / len(other)) / (same / len(one) + same / len(other)) if same else 0.0
            )
    return float(any(plain(said) == plain(text) for text in gold)), max(overlaps)


def check_torchmetrics(said: str, gold: list[str], expected: tuple[float, float], *, second: bool) -> None:
    if second:
        gold = [text for text in gold if plain(text)] or [""]
    elif not plain(said):
        return  # SQuAD 1.1 finds no shared words in nothing; torchmetrics does
    theirs = squad([{"prediction_text": said, "id": "0"}], [{"answers": {"text": gold}, "id": "0"}])
    ours = torch.tensor(expected) * 100
    assert torch.allclose(torch.stack([theirs["exact_match"], theirs["f1"]]), ours, atol=1e-3), (said, gold)


def answer_group(draw: random.Random, name: str, num: int, *, second: bool) -> Any:
    """Questions with what was said and what is true, and the scores over all of them, of 100."""
    questions, totals = [], [0.0, 0.0]
    for _ in range(num):
        said = "" if second and draw.random() < 0.3 else phrase(draw)
        gold = [near(draw, said or phrase(draw)) for _ in range(draw.randint(1, 4))]
        gold = [] if second and draw.random() < 0.3 else gold
        expected = published(said, gold, second=second)
        check_torchmetrics(said, gold, expected, second=second)
        questions.append([said, gold])
        totals = [total + value for total, value in zip(totals, expected, strict=True)]
    scores = {"exact_match": 100 * totals[0] / num, "f1": 100 * totals[1] / num}
    return {"name": name, "questions": questions, "scores": scores}


def main() -> None:
    warnings.simplefilter("ignore")  # seqeval's, of tags that are none
    draw = random.Random(2026)
    tags = [
        tag_group(draw, "IOB2", "BI", 100, broken=0),
        tag_group(draw, "malformed", "BI", 120, broken=0.4),
        tag_group(draw, "IOBES, malformed", "BIES", 50, broken=0.5),
        tag_group(draw, "one kind without a name", "BI", 25, broken=0.3, kinds=False),
        tag_group(draw, "one sentence", "BI", 1, broken=1),
    ]
    answers = [
        answer_group(draw, "SQuAD 1.1", 130, second=False),
        answer_group(draw, "SQuAD 2.0", 130, second=True),
    ]
    made_with = {name: version(name) for name in ("seqeval", "torchmetrics")}
    content = {"made_with": made_with, "tags": tags, "answers": answers}
    lines = json.dumps(content, ensure_ascii=False, indent=1)
    TARGET.write_text(re.sub(r"\[\s+(\"[^\n]*\"),\s+(\"[^\n]*\")\s+\]", r"[\1, \2]", lines) + "\n", encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
