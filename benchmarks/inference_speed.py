"""How fast are predictions? `vramfit predict` beside a `transformers` pipeline, under one memory cap, in bf16.

    python benchmarks/inference_speed.py --data texts.csv --model bert-base-uncased --tokenizer DIR        # on a GPU

From the texts of a file to labels and probabilities, cut at 512 tokens; tokens are real ones, padding is none. The
model is loaded and warm on every side. `pipeline` is `pipeline("text-classification")` with texts as they come,
`sorted` the same with texts of like length side by side, `loop` a plain loop over tokens that are there already: each
with the best of its batches from 8 to 512. `packed` and `padded` are the engine of `vramfit predict`, which reads the
file too and finds its batch by prediction; `forward_tokens_per_s` is theirs over tokens that are there already, to be
held against `loop`. A name of the catalogue stands for random weights. Every side runs in a process of its own; one
line of JSON a side is added to the results, and sides that are there are not run again.
"""

import argparse
import csv
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import forked

GIB = 2**30
CAP = int(11.17 * GIB)
SEQ = 512
BATCHES = (8, 16, 32, 64, 128, 256, 512)
SIDES = ("pipeline", "sorted", "loop", "padded", "packed")
NUM_RUNS = 5
"""Of which the first only warms up."""
WEIGHT_SCALE = 4
"""Of random weights, so that answers differ from text to text."""
NUM_COMPARED = 200
"""Texts whose probabilities are kept, to compare sides."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet; 1 where a side failed."""
    options = _parse(arguments)
    forked.import_all()
    with tempfile.TemporaryDirectory() as folder:
        made = forked.in_child(write_model, options.model, options.tokenizer, folder, timeout_s=300)
        if "error" in made:
            print(made["error"])
            return 1
        for side in options.sides:
            key = {"model": options.model, "side": side, "cap": options.cap}
            if any(_is(line, key) and "error" not in line for line in _read(options.out)):
                continue
            run = forked.in_child(run_side, side, made["folder"], options, timeout_s=options.timeout_s)
            line = {**key, **run}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps({k: v for k, v in line.items() if k != "probabilities"}), flush=True)
    lines = [line for line in _read(options.out) if line["model"] == options.model and line["cap"] == options.cap]
    _compare(lines)
    return int(any("error" in line for line in lines))


def write_model(model: str, tokenizer: str, folder: str) -> dict[str, Any]:
    """A folder with weights and a tokenizer; a name of the catalogue gets random weights."""
    from transformers import AutoTokenizer

    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.workload import Workload

    if (Path(model) / "config.json").exists():
        return {"folder": model}
    made: Any = prepare(resolve(model), Workload(model=model, seq=SEQ))
    for weight in (p for p in made.parameters() if p.dim() > 1):
        weight.data.mul_(WEIGHT_SCALE)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return {"folder": folder}


def run_side(side: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """One side in this process: real tokens a second from texts to labels, and its peak."""
    import torch
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap / total))
    with open(options.data, encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)][: options.max_rows]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(texts, truncation=True, max_length=SEQ)["input_ids"]
    num_tokens = sum(map(len, ids))
    if side in ("pipeline", "sorted"):
        made = _pipeline(folder, texts, sorts=side == "sorted")
    elif side == "loop":
        made = _loop(folder, ids)
    else:
        made = _predict(folder, options, attention="packed" if side == "packed" else "sdpa")
    times = {name: made.pop(name) for name in ("total_s", "forward_s") if name in made}
    rates = {name.replace("_s", "_tokens_per_s"): num_tokens / seconds for name, seconds in times.items()}
    made |= {"tokens_per_s" if name == "total_tokens_per_s" else name: rate for name, rate in rates.items()}
    if on_gpu:
        made |= {
            "max_reserved_bytes": torch.cuda.max_memory_reserved(),
            "max_allocated_bytes": torch.cuda.max_memory_allocated(),
            **forked.head(),
        }
    return {"num_texts": len(texts), "num_tokens": num_tokens, "num_cpus": os.cpu_count(), **made}


def _pipeline(folder: str, texts: list[str], *, sorts: bool) -> dict[str, Any]:
    """The pipeline of transformers, with the batch that is fastest."""
    import torch
    from transformers import pipeline

    device = 0 if torch.cuda.is_available() else "cpu"
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i])) if sorts else list(range(len(texts)))
    given = [texts[i] for i in order]
    run = pipeline("text-classification", model=folder, dtype=torch.bfloat16, device=device)
    answers: list[Any] = []

    def classify(batch: int) -> None:
        answers[:] = run(given, batch_size=batch, truncation=True, max_length=SEQ, top_k=None)

    found = _best(classify)
    by_text = dict(zip(order, answers, strict=True))
    scores = [{a["label"]: a["score"] for a in by_text[i]} for i in range(min(len(texts), NUM_COMPARED))]
    return {**found, "probabilities": [s[min(s)] for s in scores]}


def _loop(folder: str, ids: list[list[int]]) -> dict[str, Any]:
    """Padded batches of tokens that are there already, pinned, their answers fetched at the end."""
    import torch
    from transformers import AutoModelForSequenceClassification

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()

    @torch.inference_mode()
    def classify(batch: int) -> None:
        outputs = []
        for begin in range(0, len(ids), batch):
            rows = [torch.tensor(row) for row in ids[begin : begin + batch]]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(row) for row in rows])
            mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
            inputs = [x.pin_memory() if device.type == "cuda" else x for x in (padded, mask)]
            padded, mask = (x.to(device, non_blocking=True) for x in inputs)
            outputs.append(model(input_ids=padded, attention_mask=mask).logits)
        torch.cat(outputs).float().softmax(-1).cpu()

    return {("forward_s" if name == "total_s" else name): value for name, value in _best(classify).items()}


def _best(classify: Callable[[int], None]) -> dict[str, Any]:
    """Seconds with the fastest batch; what does not fit is left out."""
    import torch

    times: dict[int, float] = {}
    for batch in BATCHES:
        try:
            classify(batch)
            times[batch] = _seconds(lambda batch=batch: classify(batch), 1)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
    best = min(times, key=lambda batch: times[batch])
    return {"batch": best, "total_s": _seconds(lambda: classify(best), NUM_RUNS - 1), "seconds_by_batch": times}


def _predict(folder: str, options: argparse.Namespace, *, attention: Any) -> dict[str, Any]:
    """What `vramfit predict` does, but for writing the rows down; the file is read each time."""
    from vramfit.runtime.data.source import DataSource
    from vramfit.runtime.device import RunDevice
    from vramfit.runtime.trained import open_model

    trained = open_model(folder, seq=SEQ)
    run_device = RunDevice()
    source = DataSource(
        path=options.data, task=trained.task, needs_labels=False, skip_bad_rows=True, max_rows=options.max_rows
    )
    inference = trained.load(run_device, memory=options.cap, precision="bf16", attention=attention, batch=options.batch)
    rows: list[dict[str, Any]] = []

    def take(samples: Any, output: Any, batch: Any, numbers: list[int]) -> None:
        references = [samples.references[i] for i in numbers]
        rows.extend(trained.kind.predictions(output, batch, references, trained.tokenizing))

    def predict() -> None:
        rows.clear()
        inference.run_parts(trained.read_ahead(source) if inference.packs else [trained.read(source)], take)

    predict()
    total_s = _seconds(predict, NUM_RUNS - 1)
    first = min(trained.label_names)
    answers = sorted(rows, key=lambda row: row["row"])[:NUM_COMPARED]
    samples = trained.read(source)
    return {
        "total_s": total_s,
        "forward_s": _seconds(lambda: inference.run_parts([samples], take), NUM_RUNS - 1),
        "max_tokens": inference.max_tokens,
        "num_recoveries": inference.num_recoveries,
        "probabilities": [a["probability"] if a["label"] == first else 1 - a["probability"] for a in answers],
    }


def _seconds(do: Callable[[], None], num_runs: int) -> float:
    """The median of some runs."""
    import torch

    times = []
    for _ in range(num_runs):
        began = time.perf_counter()
        do()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)


def _compare(lines: list[dict[str, Any]]) -> None:
    """How many times as fast, and how far answers are apart."""
    sides = {line["side"]: line for line in lines if "error" not in line}
    ours = sides.get("packed")
    for name, rate in (("pipeline", "tokens_per_s"), ("sorted", "tokens_per_s"), ("loop", "forward_tokens_per_s")):
        other = sides.get(name)
        if ours is None or other is None:
            continue
        pairs = zip(ours.get("probabilities", ()), other.get("probabilities", ()), strict=False)
        apart = max((abs(a - b) for a, b in pairs), default=None)
        spread = max(ours["probabilities"]) - min(ours["probabilities"])
        said = "" if apart is None else f", probabilities {apart:.4f} apart at most (they span {spread:.2f})"
        print(f"packed / {name}: {ours[rate] / other[rate]:.2f} times the real tokens a second{said}")


def _read(path: Path) -> list[dict[str, Any]]:
    return forked.read_lines(path, "model", "side", "cap")


def _is(line: dict[str, Any], key: dict[str, Any]) -> bool:
    return all(line[name] == value for name, value in key.items())


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a CSV file with a column text")
    parser.add_argument("--model", required=True, help="a folder with weights and a tokenizer, or a catalogue name")
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer, for a catalogue name")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--cap", type=int, default=CAP, help="bytes that the allocator may reserve")
    parser.add_argument("--batch", type=int, help="samples of full length for our sides; else what is predicted to fit")
    parser.add_argument("--max-rows", type=int, help="read no more texts")
    parser.add_argument("--out", type=Path, default=Path("inference_speed.jsonl"))
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of one side")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
