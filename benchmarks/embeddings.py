"""How fast do embeddings learn from large batches? vramfit beside sentence-transformers, under one memory cap.

    python benchmarks/embeddings.py --data pairs.tsv --tokenizer DIR        # on a GPU
    python benchmarks/embeddings.py --page docs/embeddings.md embeddings.jsonl     # writes its table anew
    python benchmarks/embeddings.py --data pairs.tsv --tokenizer DIR --device cpu --models bert-tiny --cases 8:2GiB

Pairs of texts of a file with the columns sentence1 and sentence2, repeated until there are enough; random weights,
in-batch negatives, bf16 autocast and fused AdamW for every side; the cap holds for the allocator. `vramfit` is what
`vramfit plan` makes of these lengths and this cap. `in-batch` is MultipleNegativesRankingLoss of sentence-transformers,
and `cached-32` CachedMultipleNegativesRankingLoss with a mini-batch of 32: sides whose batch does not fit say so. Every
side runs in a process of its own; one line of JSON a side is added to the results, and sides that are there are not run
again; nothing begins after `--limit-s`, which ends what still runs.
"""

import argparse
import csv
import itertools
import json
import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import forked
import pages

GIB = 2**30
MODELS = ("bert-base-uncased", "all-minilm-l6-v2", "bert-large-uncased")
CASES = ("1024:11.17GiB", "16384:4GiB", "65536:11.17GiB")
"""Pairs a step, and the cap."""
MINI_BATCHES = (16, 32, 64, 128)
SIDES = ("vramfit", "in-batch", *(f"cached-{n}" for n in MINI_BATCHES))
PEERS_UP_TO = 1024
"""Pairs a step up to which peers run: beyond, a step of theirs takes minutes."""
SEQ, NUM_STEPS, NUM_WARM = 256, 8, 3
ENOUGH_S = 15.0
"""Steps end after so many seconds, once one was timed after a first one."""
FIGURES = ("max_allocated_bytes", "predicted_allocated_bytes", "max_reserved_bytes")
KEYS = ("model", "side", "batch", "cap")


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet; 1 where a side failed for another reason than memory."""
    options = _parse(arguments)
    if options.page is not None:
        page, *files = options.page
        lines = [line for file in files for line in forked.read_lines(Path(file), *KEYS)]
        pages.put(Path(page), "benchmarks/embeddings.py", speed=table(lines))
        return 0
    began = time.monotonic()
    forked.import_all()
    done = {tuple(line[k] for k in KEYS) for line in forked.read_lines(options.out, *KEYS) if "error" not in line}
    pairs = forked.in_child(tokenize, options.data, options.tokenizer, timeout_s=300)
    if "error" in pairs:
        print(pairs["error"])
        return 1
    for case, model in itertools.product(options.cases, options.models):
        batch, cap = case.split(":")
        for side in options.sides if int(batch) <= PEERS_UP_TO else ("vramfit",):
            key = (model, side, int(batch), cap)
            left_s = min(options.timeout_s, options.limit_s - (time.monotonic() - began))
            if key in done or left_s <= 0:
                continue
            made = forked.in_child(run_side, *key, pairs["ids"], options.device, timeout_s=left_s)
            line = {**dict(zip(KEYS, key, strict=True)), **made}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return int(any("error" in line for line in forked.read_lines(options.out, *KEYS)))


def tokenize(data: str, tokenizer: str) -> dict[str, Any]:
    """Ids of both texts of every row."""
    from transformers import AutoTokenizer

    with open(data, encoding="utf-8", newline="") as file:
        delimiter = "\t" if data.endswith(".tsv") else ","
        rows = list(csv.DictReader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter == "\t" else 0))
    made = AutoTokenizer.from_pretrained(tokenizer)
    texts = [row[name] for row in rows for name in ("sentence1", "sentence2")]
    return {"ids": made(texts, truncation=True, max_length=SEQ)["input_ids"]}


def run_side(name: str, side: str, batch: int, cap: str, ids: list[list[int]], device: str) -> dict[str, Any]:
    """One side in this process: pairs a second, peaks, and what was predicted."""
    import torch

    from vramfit.units import parse_bytes

    num_bytes = parse_bytes(cap, name="cap")
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    batches = [make_batch(ids, batch, index) for index in range(2)]
    run = run_vramfit if side == "vramfit" else run_peer
    try:
        return run(name, side, batches, num_bytes, device)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}


def make_batch(ids: list[list[int]], num_pairs: int, index: int) -> dict[str, Any]:
    """So many pairs, padded to the longest text; every row of the file in turn."""
    import torch

    begin = 2 * index * num_pairs
    rows = [ids[(begin + i) % len(ids)] for i in range(2 * num_pairs)]
    width = max(map(len, rows))
    made = torch.zeros(len(rows), width, dtype=torch.long)
    for line, row in zip(made, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    mask = (torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]).long()
    number = {tuple(row): place for place, row in enumerate(rows)}
    same = torch.tensor([number[tuple(row)] for row in rows])
    return {"input_ids": made, "attention_mask": mask, "text_rows": torch.arange(len(rows)), "text_ids": same}


def run_vramfit(name: str, side: str, batches: list[Any], cap: int, device: str) -> dict[str, Any]:
    import torch

    import vramfit

    lengths = [int(n) for n in batches[0]["attention_mask"].sum(1)]
    num_pairs = len(lengths) // 2
    on_gpu = device == "cuda"
    plan = vramfit.plan(
        name, task="embedding", batch=num_pairs, seq=max(lengths), lengths=lengths, memory=cap, exact=not on_gpu,
        **({"gpu": "h200", "precision": "amp-bf16", "optimizer": "adamw-fused"} if on_gpu else {"attention": "sdpa"}),
    )  # fmt: skip
    model, _ = vramfit.load(name, task="embedding", random_weights=True, device="cpu")
    vramfit.prepare(model, plan, device)
    model.train()
    stepper = vramfit.Stepper(model, vramfit.make_optimizer(model, plan), plan)
    began = time.perf_counter()
    stepper.rehearse(batches[0])
    start_s = time.perf_counter() - began
    found = timed(lambda batch: stepper.step(batch), batches, device)
    w = plan.workload
    torch.manual_seed(0)
    return found | {
        "micro_batch": plan.micro_batch,
        "settings": {k: getattr(w, k) for k in ("precision", "attention", "checkpointing", "optimizer", "fused")},
        "predicted_allocated_bytes": plan.estimate.peak_allocated_bytes,
        "predicted_reserved_bytes": plan.estimate.safe_reserved_bytes,
        "predicted_step_s": plan.step_time_s,
        "num_recoveries": stepper.num_recoveries,
        "rehearsal_s": start_s,
    }


def run_peer(name: str, side: str, batches: list[Any], cap: int, device: str) -> dict[str, Any]:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses, modules
    from transformers import AutoModel

    import vramfit

    encoder, _ = vramfit.load(name, task="features", random_weights=True, device="cpu")
    transformer = _Encoder(AutoModel.from_config(encoder.config))
    model = SentenceTransformer(
        modules=[transformer, modules.Pooling(encoder.config.hidden_size, "mean")], device=device
    )
    model.train()
    loss: Any = losses.MultipleNegativesRankingLoss(model)
    if side.startswith("cached-"):
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=int(side.partition("-")[2]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    def step(batch: dict[str, Any]) -> None:
        features = []
        for column in (0, 1):  # each column padded to its own longest text, as its collator does
            mask = batch["attention_mask"][column::2]
            width = int(mask.sum(1).max())
            one = {"input_ids": batch["input_ids"][column::2, :width], "attention_mask": mask[:, :width]}
            features.append({k: v.to(device) for k, v in one.items()})
        with torch.autocast(device, dtype=torch.bfloat16):
            value = loss(features, None)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, batches, device)


def _Encoder(encoder: Any) -> Any:  # noqa: N802
    """A module of sentence-transformers around an encoder that no folder holds."""
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.auto_model = encoder

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            output = self.auto_model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            return features | {"token_embeddings": output.last_hidden_state}

        def get_word_embedding_dimension(self) -> int:
            return int(self.auto_model.config.hidden_size)

    return Encoder()


def timed(step: Any, batches: list[Any], device: str) -> dict[str, Any]:
    """Seconds of steps after the first ones, and the peaks of all of them."""
    import torch

    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for index in range(NUM_STEPS):
        if len(times) > 1 and sum(times) > ENOUGH_S:
            break
        began = time.perf_counter()
        step(batches[index % len(batches)])
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    num_pairs = len(batches[0]["input_ids"]) // 2
    step_s = median(times[min(NUM_WARM, len(times) - 1) :])
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches) / len(batches)
    made = {
        "num_steps": len(times),
        "step_s": step_s,
        "pairs_per_s": num_pairs / step_s,
        "tokens_per_s": tokens / step_s,
    }
    if on_gpu:
        made["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
        made["max_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return made | {"device": torch.cuda.get_device_name(0) if on_gpu else "cpu", "torch": torch.__version__}


def table(lines: list[dict[str, Any]]) -> str:
    """A row a side: its speed and what it took; or that it ran out of memory. Sides that were cut off are left out."""
    rows = []
    for line in lines:
        job = [line["model"], line["side"], f"{line['batch']:,}", line["cap"].replace("GiB", " GiB")]
        if "out_of_memory" in line:
            rows.append([*job, "out of memory", None, None, None])
        elif "error" not in line:
            bounds = [f"{line[key] / GIB:.2f} GiB" if key in line else None for key in FIGURES]
            rows.append([*job, f"{line['pairs_per_s']:,.0f}", *bounds])
    head = ("model", "side", "pairs a step", "cap", "pairs/s", "allocated", "planned", "reserved")
    return pages.table(head, rows)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--tokenizer")
    parser.add_argument("--page", nargs="+", metavar="PAGE FILE", help="write the table of a page from these results")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--timeout-s", type=float, default=300, help="of one side")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of all that is run")
    parser.add_argument("--out", type=Path, default=Path("embeddings.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
