"""How fast do models encode and rerank? vramfit's drop-ins beside sentence-transformers, under one memory cap.

    python benchmarks/encoding.py --data imdb/texts.csv --pairs rte/train.tsv --tokenizer DIR        # on a GPU
    python benchmarks/encoding.py --data texts.csv --pairs pairs.tsv --tokenizer DIR --device cpu --small
    python benchmarks/encoding.py --data imdb/texts.csv --pairs rte/train.tsv --tokenizer DIR --host --label after

Texts to vectors with `SentenceTransformer.encode`, pairs to scores with `CrossEncoder.predict`; tokens are real ones,
padding is none. Weights are random, in bf16 on a GPU and in fp32 on a CPU; a name of the catalogue says which model.
`default` is sentence-transformers with its batch of 32, `best` with the best of `BATCHES` (those that run out of memory
say so), `vramfit` the same object after `fit_encoder` or `fit_reranker` with the cap as its memory. All sides of a case
run in one process, in turns, so that a GPU that grows hot does so for all; the cap holds for the allocator. One line of
JSON a case is added to the results, and cases that are there are not run again.

`--host` asks what the host has to do: on the CPU, around a model that only looks tokens up, in batches as large as
a GPU takes. `tokenizer` is the tokenizer alone. Seconds are those of cores (`process_time`), so that other programs do
not count, nor how many cores share the work.
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

MODELS = ("bert-base-uncased", "all-minilm-l6-v2", "modernbert-base")
SMALL = ("bert-tiny",)
WORK = ("encode", "rerank")
CAP, SMALL_CAP = "11.17GiB", "400MiB"
BATCHES, SMALL_BATCHES = (64, 128, 256, 512, 1024), (64,)
DEFAULT_BATCH = 32
SEQ, SMALL_SEQ = 512, 64
NUM_TURNS, NUM_WARM = 3, 1
NUM_SMALL = 40
"""Texts and pairs of a small run."""
KEYS = ("model", "work", "cap", "seq")
HOST_BATCHES = (32, 256)
HOST_KEYS = ("label", "work", "parallel", "seq")


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet; 1 where a case failed."""
    options = _parse(arguments)
    forked.import_all()  # not sentence-transformers, which starts CUDA when imported
    if options.host:
        return _run_host_cases(options)
    done = {tuple(line[k] for k in KEYS) for line in forked.read_lines(options.out, *KEYS) if "error" not in line}
    for model in options.models:
        for work in WORK:
            key = (model, work, options.cap, options.seq)
            if key in done:
                continue
            made = forked.in_child(run_case, model, work, options, timeout_s=options.timeout_s)
            line = {**dict(zip(KEYS, key, strict=True)), **made}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return int(any("error" in line for line in forked.read_lines(options.out, *KEYS)))


def _run_host_cases(options: argparse.Namespace) -> int:
    made: dict[str, Any] = {}
    for work in WORK:
        for parallel in (True, False):
            made = forked.in_child(run_host_case, work, parallel, options, timeout_s=options.timeout_s)
            line = {**dict(zip(HOST_KEYS, (options.label, work, parallel, options.seq), strict=True)), **made}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return int("error" in made)


def run_host_case(work: str, parallel: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a core of all sides, and of those beside the tokenizer; in turns.

    Args:
        parallel: whether the tokenizer may take several cores.
    """
    import numpy as np
    import sentence_transformers
    import torch

    import vramfit
    from vramfit.integrations import text_passes
    from vramfit.runtime.trained import MAX_PACKED_TOKENS

    os.environ["TOKENIZERS_PARALLELISM"] = str(parallel).lower()
    torch.set_num_threads(1)
    text_passes.CPU_TOKENS = MAX_PACKED_TOKENS  # a batch of what fits a large GPU, not of what suits a CPU
    inputs, model = _inputs(work, options), make_host_model(work, options)
    num_tokens = sum(int(model.preprocess([one])["attention_mask"].sum()) for one in inputs)
    backend = model.tokenizer.backend_tokenizer
    fit = vramfit.fit_encoder if work == "encode" else vramfit.fit_reranker

    def tokenize() -> tuple[None, float]:
        backend.no_padding()
        begin = time.process_time()
        backend.encode_batch_fast(inputs)
        return None, time.process_time() - begin

    def fitted() -> tuple[Any, float]:
        mine = fit(model, packs=True)  # as on a GPU
        try:
            return _caller(model, work, inputs, DEFAULT_BATCH, time.process_time)()
        finally:
            mine.undo()

    sides = {f"batch-{n}": _caller(model, work, inputs, n, time.process_time) for n in HOST_BATCHES}
    found = take_turns(sides | {"vramfit": fitted, "tokenizer": tokenize}, "cpu")
    cpu_s = {name: median(mine["seconds"]) for name, mine in found.items()}
    beside_s = {name: cpu_s[name] - cpu_s["tokenizer"] for name in cpu_s if name != "tokenizer"}
    best = min((f"batch-{n}" for n in HOST_BATCHES), key=lambda name: cpu_s[name])
    wanted = np.asarray(found["batch-32"]["made"])
    return {
        "cpu_s": cpu_s,
        "beside_tokenizer_s": beside_s,
        "tokens_per_cpu_s": {name: num_tokens / seconds for name, seconds in cpu_s.items()},
        "best": best,
        "times_best": cpu_s[best] / cpu_s["vramfit"],
        "times_best_beside_tokenizer": beside_s[best] / beside_s["vramfit"],
        "largest_difference": float(np.abs(np.asarray(found["vramfit"]["made"]) - wanted).max()),
        "num_inputs": len(inputs),
        "num_tokens": num_tokens,
        "sentence_transformers": sentence_transformers.__version__,
        **forked.head(),
    }


def make_host_model(work: str, options: argparse.Namespace) -> Any:
    """A model of sentence-transformers whose encoder costs nothing but to look tokens up in a small table."""
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, model_max_length=options.seq)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=1, **sizes)
    encodes = work == "encode"
    with tempfile.TemporaryDirectory() as folder:
        (BertModel if encodes else BertForSequenceClassification)(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made = (SentenceTransformer if encodes else CrossEncoder)(folder, device="cpu")
    made.max_seq_length = options.seq
    base = made[0].model.base_model

    def look_up(input_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
        # a pair is known by its second token: the first is always the same
        hidden = base.embeddings.word_embeddings(input_ids if encodes else input_ids.roll(-1, 1))
        return BaseModelOutputWithPooling(hidden, None if encodes else base.pooler(hidden))

    base.forward = look_up
    return made


def read_column(path: str, *names: str) -> list[tuple[str, ...]]:
    """Some columns of a file, row by row."""
    delimiter = "\t" if path.endswith(".tsv") else ","
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter == "\t" else 0)
        return [tuple(row[name] for name in names) for row in rows]


def run_case(name: str, work: str, options: argparse.Namespace) -> dict[str, Any]:
    """All sides of a case: real tokens a second, inputs a second, peaks, and how far results differ."""
    import torch

    import vramfit
    from vramfit.units import parse_bytes

    cap = parse_bytes(options.cap, name="cap")
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total)
    inputs = _inputs(work, options)
    model = make_model(name, work, options)
    num_tokens = sum(int(model.preprocess([one])["attention_mask"].sum()) for one in inputs)
    sides = {f"batch-{n}": _caller(model, work, inputs, n) for n in (DEFAULT_BATCH, *options.batches)}
    fit = vramfit.fit_encoder if work == "encode" else vramfit.fit_reranker
    call = _caller(model, work, inputs, DEFAULT_BATCH)
    told: dict[str, Any] = {"num_recoveries": 0}

    def fitted() -> Any:
        mine = fit(model, memory=cap if options.device == "cuda" else None)
        try:
            return call()
        finally:
            told["num_recoveries"] += mine.num_recoveries
            told.update(max_tokens=mine.max_tokens, packs=mine.packs)
            if "predicted_reserved_bytes" not in told:
                told["predicted_reserved_bytes"] = getattr(mine.estimate(), "safe_reserved_bytes", None)
            mine.undo()

    sides["vramfit"] = fitted
    found = take_turns(sides, options.device)
    return summary(found, len(inputs), num_tokens) | {
        "num_inputs": len(inputs),
        "num_tokens": num_tokens,
        **told,
        **forked.head(),
    }


def _inputs(work: str, options: argparse.Namespace) -> list[Any]:
    if work == "encode":
        texts: list[Any] = [text for (text,) in read_column(options.data, "text")]
    else:
        texts = read_column(options.pairs, "sentence1", "sentence2")
    return texts[:NUM_SMALL] if options.small else texts


def make_model(name: str, work: str, options: argparse.Namespace) -> Any:
    """A model of sentence-transformers with random weights."""
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from transformers import AutoTokenizer

    import vramfit

    torch.manual_seed(0)
    task, labels = ("features", {}) if work == "encode" else ("sequence-classification", {"num_labels": 1})
    model, _ = vramfit.load(name, task=task, random_weights=True, device="cpu", **labels)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        model.to(dtype).save_pretrained(folder)
        AutoTokenizer.from_pretrained(options.tokenizer, model_max_length=options.seq).save_pretrained(folder)
        kind = SentenceTransformer if work == "encode" else CrossEncoder
        made = kind(folder, device=options.device, model_kwargs={"dtype": dtype})
    made.max_seq_length = options.seq
    return made


def _caller(
    model: Any, work: str, inputs: list[Any], batch_size: int, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], Any]:
    def call() -> Any:
        began = clock()
        run = model.encode if work == "encode" else model.predict
        made = run(inputs, batch_size=batch_size, show_progress_bar=False)
        return made, clock() - began

    return call


def take_turns(sides: dict[str, Callable[[], Any]], device: str) -> dict[str, dict[str, Any]]:
    """Every side once, and again, and again: seconds of each turn, the peak, what came out; or that memory ran out."""
    import torch

    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in sides}
    for turn in range(NUM_WARM + NUM_TURNS):
        for name, side in sides.items():
            mine = found[name]
            if "out_of_memory" in mine:
                continue
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                made, seconds = side()
            except torch.OutOfMemoryError as error:
                mine["out_of_memory"] = str(error).splitlines()[0]
                continue
            mine["made"] = made
            mine["seconds"] += [seconds] if turn >= NUM_WARM else []
            if device == "cuda":
                mine["peak_reserved_bytes"] = max(mine.get("peak_reserved_bytes", 0), torch.cuda.max_memory_reserved())
    return found


def summary(found: dict[str, dict[str, Any]], num_inputs: int, num_tokens: int) -> dict[str, Any]:
    """Speeds of every side, which batch was the best, and how many times as fast vramfit is."""
    import numpy as np

    wanted = found[f"batch-{DEFAULT_BATCH}"].get("made")
    sides: dict[str, Any] = {}
    for name, mine in found.items():
        made, seconds = mine.pop("made", None), mine.pop("seconds")
        if "out_of_memory" in mine:
            sides[name] = mine
            continue
        mid = median(seconds)
        sides[name] = {"tokens_per_s": num_tokens / mid, "inputs_per_s": num_inputs / mid, "seconds": seconds, **mine}
        if wanted is not None:
            sides[name]["largest_difference"] = float(np.abs(np.asarray(made) - np.asarray(wanted)).max())
    speeds = {name: side["tokens_per_s"] for name, side in sides.items() if "tokens_per_s" in side}
    own = speeds.pop("vramfit")
    best = max(speeds, key=lambda name: speeds[name])
    default = speeds.get(f"batch-{DEFAULT_BATCH}")
    return {
        "sides": sides,
        "best": best,
        "times_best": own / speeds[best],
        "times_default": None if default is None else own / default,
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a CSV or TSV with the column text")
    parser.add_argument("--pairs", required=True, help="one with the columns sentence1 and sentence2")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cap", help="what PyTorch may reserve on a GPU")
    parser.add_argument("--small", action="store_true", help="a few texts and one small model: does it run at all?")
    parser.add_argument("--host", action="store_true", help="what the host does, around a model that costs nothing")
    parser.add_argument("--label", default="", help="of the lines of --host: which state of the code it is")
    parser.add_argument("--timeout-s", type=float, default=1800)
    parser.add_argument("--out", type=Path, default=Path("encoding.jsonl"))
    options = parser.parse_args(arguments)
    options.models = options.models or (SMALL if options.small else MODELS)
    options.cap = options.cap or (SMALL_CAP if options.small else CAP)
    options.seq = SMALL_SEQ if options.small else SEQ
    options.batches = SMALL_BATCHES if options.small else BATCHES
    return options


if __name__ == "__main__":
    sys.exit(main())
