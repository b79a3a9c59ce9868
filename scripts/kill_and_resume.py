"""Kill `vramfit train` at random moments with SIGKILL, resume it, and compare the weights with an undisturbed run.

    python scripts/kill_and_resume.py --count 50

A small model is trained on the CPU. Every kill is followed by a look at all checkpoints (each must be whole) and by
`--resume`, which may be killed again; a run that comes to its end must have saved the same weights bit for bit.
Leaves with 0 when all of them have.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = [
    "fine",
    "great",
    "dull",
    "poor",
    "the",
    "film",
    "was",
    "and",
    "music",
    "in",
    "a",
    "very",
    "story",
    "slow",
    "warm",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_inputs(folder: Path) -> None:
    """A model of two layers with a tokenizer, and data to learn from and to evaluate on."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **sizes)).save_pretrained(
        folder / "model"
    )
    BertTokenizer(vocab=vocabulary, model_max_length=32).save_pretrained(folder / "model")
    draw = random.Random(0)
    for name, num_rows in (("train", 160), ("dev", 24)):
        rows = [
            {"text": " ".join(draw.choices(WORDS, k=draw.randint(3, 20))), "label": draw.choice("ab")}
            for _ in range(num_rows)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def command(folder: Path, output: Path, num_steps: int) -> list[str]:
    arguments = {
        "--model": folder / "model",
        "--eval-data": folder / "dev.jsonl",
        "--output": output,
        "--device": "cpu",
        "--batch": 8,
        "--micro-batch": 4,
        "--max-steps": num_steps,
        "--eval-every": 7,
        "--save-every": 3,
        "--lr": 0.001,
    }
    given = [str(part) for pair in arguments.items() for part in pair]
    return [sys.executable, "-m", "vramfit", "train", str(folder / "train.jsonl"), *given, "--resume", "--json"]


def start(folder: Path, output: Path, num_steps: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(folder, output, num_steps), env=environment, text=True, **pipes)


def wait_until_begun(process: "subprocess.Popen[str]", output: Path) -> None:
    """Until a session writes its journal anew; what comes before it is mostly imports."""
    journal, begun = output / "metrics.jsonl", time.time()
    while process.poll() is None and not (journal.exists() and journal.stat().st_mtime >= begun - 0.01):
        time.sleep(0.005)


def damaged(output: Path) -> list[str]:
    from vramfit.runtime.training.checkpoints import CheckpointStore

    store = CheckpointStore(output / "checkpoints")
    return [f"step {step}" for step in store.steps() if store.at(step) is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="kills")
    parser.add_argument("--steps", type=int, default=150, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        plain = folder / "undisturbed"
        began = start(folder, plain, options.steps)
        wait_until_begun(began, plain)
        first = time.monotonic()
        if began.wait() != 0:
            print(began.stderr.read() if began.stderr else "", file=sys.stderr)
            return 1
        length_s = time.monotonic() - first
        print(f"undisturbed: {options.steps} steps in {length_s:.1f} s")
        expected = (plain / "model.safetensors").read_bytes()
        num_kills = num_runs = num_wrong = 0
        while num_kills < options.count or num_runs == 0:
            num_runs += 1
            output = folder / f"run{num_runs}"
            kills = 0
            while True:
                process = start(folder, output, options.steps)
                if num_kills < options.count:
                    if draw.random() < 0.85:
                        wait_until_begun(process, output)
                        pause_s = draw.uniform(0, length_s * 0.7)
                    else:
                        pause_s = draw.uniform(0, 4)
                    try:
                        process.wait(timeout=pause_s)
                    except subprocess.TimeoutExpired:
                        process.send_signal(signal.SIGKILL)
                        kills += 1
                        num_kills += 1
                code = process.wait()
                broken = damaged(output)
                if broken:
                    print(f"run {num_runs}: not whole after kill {num_kills}: {', '.join(broken)}")
                    num_wrong += 1
                if code == 0:
                    break
                if code != -signal.SIGKILL:
                    print(process.stderr.read() if process.stderr else "", file=sys.stderr)
                    return 1
            same = (output / "model.safetensors").read_bytes() == expected
            num_wrong += not same
            print(f"run {num_runs}: {kills} kills, weights {'equal to the bit' if same else 'DIFFER'}", flush=True)
        print(f"{num_kills} kills in {num_runs} runs; {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
