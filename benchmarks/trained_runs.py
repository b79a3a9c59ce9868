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
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import fine_tuning
import forked
from fine_tuning import QUICK, TIMEOUT_S, Data, Options, child, train

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
    runs = [child(fine_tuning.plain, **settings, seed=seed)[0] for seed in options.seeds]
    least = min(run["reserved_bytes"] for run in runs)
    return {"accuracy": mean(run["accuracy"] for run in runs), "least_reserved_bytes": least, "runs": runs}


def sst2_budget(options: Options, made: Data) -> Data:
    """The same training by `vramfit train` with a third of the memory; how far its accuracy is from the plain one."""
    plain = made["sst2-plain"]
    settings = {**SST2, "memory": plain["least_reserved_bytes"] // SHARE}
    runs = [train(options, name=f"sst2-budget-{seed}", seed=seed, **settings) for seed in options.seeds]
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
    done, said = child(fine_tuning.run_cli, arguments=settings)
    compared, _ = child(_compare, folder=str(folder), dev=dev, predicted=rows, device=options.device)
    return {**compared, "predict": {**done, "said": said}}


def xquad(options: Options, made: Data) -> Data:
    """Answers in paragraphs, on articles that were not learned from."""
    return train(options, files=fine_tuning.split_xquad(options), **XQUAD)


def imdb(options: Options, made: Data) -> Data:
    """Long texts, cut at the model's 512 tokens."""
    return train(options, files=fine_tuning.split_imdb(options), memory="1.5GiB", epochs=2, lr=2e-4)


def _trained(**settings: Any) -> Callable[[Options, Data], Data]:
    return lambda options, made: train(options, **settings)


PARTS: dict[str, Callable[[Options, Data], Data]] = {
    "sst2-plain": sst2_plain,
    "sst2-budget": sst2_budget,
    "saved-folder": saved_folder,
    "sst2-int8-head": _trained(**INT8_HEAD),
    "sst2-lora": _trained(**LORA),
    "wnut17": _trained(**WNUT17),
    "xquad": xquad,
    "imdb": imdb,
}


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


def _parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    fine_tuning.add_arguments(parser)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vramfit_trained_runs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = fine_tuning.settle(parser.parse_args(arguments))
    options.results.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
