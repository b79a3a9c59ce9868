"""From the command to the first step, and to the end: `vramfit train` beside a Trainer script on the same job.

    python benchmarks/start.py --data ../shared/data                       # on a GPU
    python benchmarks/start.py --data ../shared/data --limit-s 570         # again and again until nothing is left
    python benchmarks/start.py --small --device cpu --turns 1              # small models: does it run at all

Both are whole programs, timed from outside, in turns; random weights of the published sizes are written to a folder
first. vramfit plans by itself what fits the budget, and begins every turn without remembered plans. The Trainer has a
cap of the same size on its allocator, and as many samples a pass as run under it: where memory runs out, its samples a
pass are halved and the program begins again; only the run that came through counts. Neither evaluates; both write a
checkpoint after each epoch, and the model. One line of JSON a turn of a case is added to the results, and turns that
are there are not run again, nor are the halvings that led to the Trainer's samples a pass; at the end medians are
shown, and ratios of vramfit to the Trainer. Every case has its first turn before any has its second, and with
`--limit-s` no turn begins that would not end in time, by how long the case's turns took so far.
"""

import argparse
import csv
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import forked
from start_trainer import OUT_OF_MEMORY

SIDES = ("vramfit", "trainer")
FIGURES = ("first_step_s", "whole_s", "reserved_bytes")
FIRST_STEP = "step 1/"
"""How the line begins that either program writes to stderr after its first step."""
KEEP = 2
"""Checkpoints that stay."""
SMALL_ROWS, SMALL_STEPS = 48, 3
SMALL_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SMALL_SIZES |= {"embedding_size": 32, "max_position_embeddings": 64}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("fine", "great", "poor", "dull", "the", "film", "was", "music", "and", "in")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job."""

    name: str
    model: str
    """Of the catalogue; its tokenizer is that of BERT, uncased."""
    data: str
    texts: tuple[str, ...]
    label: str
    memory_bytes: int
    epochs: int
    batch: int = 64
    seq: int = 512
    max_steps: int | None = None


GIB = 2**30
CASES = (
    Case(
        name="banking77",
        model="bert-base-uncased",
        data="banking77/train.csv",
        texts=("text",),
        label="category",
        memory_bytes=3 * GIB,
        epochs=6,
    ),
    Case(
        name="imdb",
        model="bert-base-uncased",
        data="imdb_sample/texts.csv",
        texts=("text",),
        label="label",
        memory_bytes=9 * GIB,
        epochs=3,
    ),
    Case(
        name="rte",
        model="electra-base-discriminator",
        data="rte/train.tsv",
        texts=("sentence1", "sentence2"),
        label="label",
        memory_bytes=5 * GIB,
        epochs=6,
        batch=32,
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the turns that are not there yet; 1 where one failed."""
    options = _parse(arguments)
    cases = [case for case in CASES if case.name in options.cases]
    kind = {"small": options.small, "device": options.device}
    began, has_failed = time.monotonic(), False
    made: dict[str, Case] = {}
    with tempfile.TemporaryDirectory() as work:
        for turn, case in itertools.product(range(options.turns), cases):
            whole = [line for line in _lines(options.out, case, **kind) if "error" not in line]
            if any(line["turn"] == turn for line in whole):
                continue
            left_s = options.limit_s - (time.monotonic() - began)
            if left_s < 1.1 * longest_s(whole):
                print(f"{case.name}, turn {turn}: left for another call, {left_s:.0f} s are not enough", flush=True)
                continue
            if case.name not in made:
                made[case.name] = prepare(case, options, Path(work))
            micro_batch = whole[-1]["trainer"]["micro_batch"] if whole else made[case.name].batch
            line = run_turn(made[case.name], turn, micro_batch, options, Path(work))
            has_failed |= "error" in line
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    for case in cases:
        print(summary(case.name, _lines(options.out, case, **kind)))
    return int(has_failed)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of banking77, imdb_sample, …")
    parser.add_argument("--tokenizer", type=Path, help="of BERT, uncased; bert_uncased_tokenizer in the data")
    parser.add_argument("--cases", nargs="+", default=[c.name for c in CASES], choices=[c.name for c in CASES])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, made-up rows and a few steps")
    parser.add_argument("--timeout-s", type=float, default=280.0, help="of one program")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of all that is run")
    parser.add_argument("--out", type=Path, default=Path("start.jsonl"))
    return parser.parse_args(arguments)


def longest_s(lines: list[dict[str, Any]]) -> float:
    """Of the turns so far, both programs together."""
    return max((sum(line[side]["whole_s"] for side in SIDES) for line in lines), default=0.0)


def _lines(path: Path, case: Case, *, small: bool, device: str) -> list[dict[str, Any]]:
    keys = {"case": case.name, "small": small, "device": device}
    found = forked.read_lines(path, *keys, "turn")
    return [line for line in found if all(line[key] == value for key, value in keys.items())]


def prepare(case: Case, options: argparse.Namespace, work: Path) -> Case:
    """The case with its model and data as files: a folder of random weights with a tokenizer."""
    folder = work / f"model-{case.name}"
    if options.small:
        case = replace(case, data=str(_write_rows(case, work)), batch=8, seq=64, max_steps=SMALL_STEPS)
    else:
        case = replace(case, data=str((options.data / case.data).resolve()))
    tokenizer = options.tokenizer or options.data / "bert_uncased_tokenizer"
    # in a child: this process stays as it is, whatever torch does with threads and the GPU
    made = forked.in_child(
        _write_model, case.model, folder, None if options.small else tokenizer, timeout_s=options.timeout_s
    )
    if "error" in made:
        raise RuntimeError(f"the model of {case.name} was not written: {made['error']}")
    return replace(case, model=str(folder))


def _write_model(name: str, folder: Path, tokenizer: Path | None) -> dict[str, Any]:
    """Random weights of a published configuration, or of a small one of its kind where no tokenizer is given."""
    import torch
    from transformers import AutoModelForSequenceClassification, BertTokenizer

    from vramfit.models.resolve import resolve

    config = resolve(name).config
    if tokenizer is None:
        words = [*SPECIAL, *WORDS]
        config.update({**SMALL_SIZES, "vocab_size": len(words)})
        BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=64).save_pretrained(folder)
    else:
        shutil.copytree(tokenizer, folder)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return {}


def _write_rows(case: Case, work: Path) -> Path:
    """A few made-up rows under the columns of the case's data."""
    draw, path = random.Random(0), work / f"{case.name}{Path(case.data).suffix}"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow([*case.texts, case.label])
        for row in range(SMALL_ROWS):
            texts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 12))) for _ in case.texts]
            writer.writerow([*texts, ("yes", "no", "perhaps")[row % 3]])
    return path


def run_turn(case: Case, turn: int, micro_batch: int, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Both programs once, one after the other; which is first changes from turn to turn."""
    line: dict[str, Any] = {"case": case.name, "turn": turn, "small": options.small, "device": options.device}
    for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
        output = work / "output"
        shutil.rmtree(output, ignore_errors=True)
        try:
            if side == "vramfit":
                line[side] = run_vramfit(case, options, output)
            else:
                line[side] = run_trainer(case, micro_batch, options, output)
        except RuntimeError as error:
            return {**line, "error": f"{side}: {error}"}
    return line | line["trainer"].pop("head")


def run_vramfit(case: Case, options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """`vramfit train`, which says itself what it reserved."""
    settings: dict[str, Any] = {
        "model": case.model,
        "output": output,
        "text_column": ",".join(case.texts),
        "label_column": case.label,
        "batch": case.batch,
        "seq": case.seq,
        "epochs": case.epochs,
        "lr": 5e-5,
        "keep": KEEP,
        "device": options.device,
    }
    if options.device == "cuda":
        settings["memory"] = f"{case.memory_bytes / GIB:g}GiB"
    if case.max_steps is not None:
        settings["max_steps"] = case.max_steps
    words = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "vramfit", "train", case.data, *words, "--json"]
        code, timed, out, err = run_program(command, options.timeout_s, VRAMFIT_CACHE=cache)
    if code != 0:
        raise RuntimeError(f"exit {code}: {err[-800:]}")
    record = json.loads(out)
    return {**timed, "reserved_bytes": record["measured_reserved_bytes"], "settings": record["settings"]}


def run_trainer(case: Case, micro_batch: int, options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """The Trainer script with the most samples a pass that it runs through with."""
    job = output.with_suffix(".json")
    while True:
        asked = {**asdict(case), "device": options.device, "output": str(output)}
        asked |= {"micro_batch": micro_batch, "keep": KEEP}
        job.write_text(json.dumps(asked), encoding="utf-8")
        script = Path(__file__).with_name("start_trainer.py")
        code, timed, out, err = run_program([sys.executable, str(script), str(job)], options.timeout_s)
        if code != OUT_OF_MEMORY or micro_batch == 1:
            break
        micro_batch //= 2
    if code != 0:
        raise RuntimeError(f"exit {code} with {micro_batch} samples a pass: {err[-800:]}")
    return {**timed, **json.loads(out.splitlines()[-1]), "micro_batch": micro_batch}


def run_program(command: list[str], timeout_s: float, **environment: str) -> tuple[int, dict[str, float], str, str]:
    """Exit code, seconds to the first step and to the end, stdout and stderr of a program.

    Raises:
        RuntimeError: it took too long, or ended well without a first step.
    """
    began, first_step_s, err = time.perf_counter(), None, []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        )
        is_late = threading.Event()
        alarm = threading.Timer(timeout_s, lambda: (is_late.set(), process.kill()))
        alarm.start()
        try:
            assert process.stderr is not None
            for text in process.stderr:
                if first_step_s is None and text.startswith(FIRST_STEP):
                    first_step_s = time.perf_counter() - began
                err.append(text)
            code = process.wait()
        finally:
            alarm.cancel()
            process.kill()
        whole_s = time.perf_counter() - began
        out.seek(0)
        said = out.read()
    if is_late.is_set():
        raise RuntimeError(f"took longer than {timeout_s:.0f} s: {''.join(err)[-400:]}")
    if code == 0 and first_step_s is None:
        raise RuntimeError(f"never said that its first step was done: {''.join(err)[-400:]}")
    return code, {"first_step_s": first_step_s or 0.0, "whole_s": whole_s}, said, "".join(err)


def summary(name: str, lines: list[dict[str, Any]]) -> str:
    """Medians of a case over its turns, and the ratio of vramfit to the Trainer."""
    whole = [line for line in lines if "error" not in line]
    if not whole:
        return f"{name}: no turn came through"
    parts = []
    for figure in FIGURES:
        found = [[line[side][figure] for line in whole if line[side][figure] is not None] for side in SIDES]
        if all(found):
            ours, theirs = map(median, found)
            parts.append(f"{figure} {ours:,.1f} against {theirs:,.1f} ({ours / theirs:.2f})")
    return f"{name}, medians of {len(whole)}, vramfit against the Trainer: {'; '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
