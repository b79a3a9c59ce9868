"""Kill `vramfit train` at random moments with SIGKILL, resume it, and compare the weights with an undisturbed run.

    python scripts/kill_and_resume.py --count 50
    python scripts/kill_and_resume.py --count 5 --fork      # quicker: children have torch imported already
    python scripts/kill_and_resume.py --train "--offload weights --precision bf16" --train ""

A small model is trained on the CPU. Every kill is followed by a look at all checkpoints (each must be whole) and by
`--resume`, which may be killed again; a run that comes to its end must have saved the same weights bit for bit.
Leaves with 0 when all of them have.
"""

import argparse
import gc
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
DURING_TRAINING = 0.85
"""Share of kills after training has begun; the others come at any moment."""
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


def command(folder: Path, output: Path, options: argparse.Namespace) -> list[str]:
    arguments = {
        "--model": folder / "model",
        "--eval-data": folder / "dev.jsonl",
        "--output": output,
        "--device": "cpu",
        "--batch": 8,
        "--micro-batch": 4,
        "--max-steps": options.steps,
        "--eval-every": 7,
        "--save-every": 3,
        "--lr": 0.001,
    }
    given = [str(part) for pair in arguments.items() for part in pair]
    return ["train", str(folder / "train.jsonl"), *given, *options.train.split(), "--resume", "--json"]


class Run:
    """`vramfit train` in a process of its own: a new one, or a fork of this one, which has imported everything."""

    def __init__(self, arguments: list[str], *, fork: bool) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the run)
        if fork:
            self.pid = os.fork()
            if self.pid == 0:
                become(arguments, self._log.fileno())
        else:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vramfit", *arguments], env=environment, stdout=self._log, stderr=self._log
            )
            self.pid = self._process.pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or the signal as a negative number; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, until_s: float = float("inf")) -> int | None:
        """Wait for the end, or for a moment."""
        while self.poll() is None and time.monotonic() < until_s:
            time.sleep(0.002)
        return self.code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read()


def become(arguments: list[str], log: int) -> None:
    """Be `vramfit`, in a child."""
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.argv = ["vramfit", *arguments]
    try:
        from vramfit.cli.main import main as vramfit

        vramfit()
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    finally:
        os._exit(1)


def import_everything() -> None:
    """What a run imports, so that its forks need not; on one thread, which a fork survives."""
    import torch
    import transformers.quantizers  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is no garbage, and forks need not look through it


def wait_until_begun(run: Run, output: Path) -> None:
    """Until a session writes its journal anew; what comes before it is mostly imports."""
    journal, begun = output / "metrics.jsonl", time.time()
    while run.poll() is None and not (journal.exists() and journal.stat().st_mtime >= begun - 0.01):
        time.sleep(0.002)


def damaged(output: Path) -> list[str]:
    from vramfit.runtime.training.checkpoints import CheckpointStore

    store = CheckpointStore(output / "checkpoints")
    return [f"step {step}" for step in store.steps() if store.at(step) is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="kills")
    parser.add_argument("--steps", type=int, default=150, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--train", action="append", metavar="OPTIONS", help="more options of `vramfit train`; again for another round"
    )
    parser.add_argument("--fork", action="store_true", help="fork this process in place of starting new ones")
    options = parser.parse_args()
    if options.fork:
        import_everything()
    return max([_round(options, settings) for settings in options.train or [""]])


def _round(options: argparse.Namespace, settings: str) -> int:
    """Kills with some settings."""
    print(f"train {settings}".rstrip(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        return disturb(Path(name), argparse.Namespace(**{**vars(options), "train": settings}))


def disturb(folder: Path, options: argparse.Namespace) -> int:
    """One undisturbed run, then others that are killed and resumed; 0 when all end with the same weights."""
    write_inputs(folder)
    plain = Run(command(folder, folder / "undisturbed", options), fork=options.fork)
    wait_until_begun(plain, folder / "undisturbed")
    began = time.monotonic()
    if plain.wait() != 0:
        print(plain.said(), file=sys.stderr)
        return 1
    length_s = time.monotonic() - began
    print(f"undisturbed: {options.steps} steps in {length_s:.1f} s", flush=True)
    expected = (folder / "undisturbed" / "model.safetensors").read_bytes()
    draw = random.Random(options.seed)
    num_kills = num_runs = num_wrong = 0
    while num_kills < options.count:
        num_runs += 1
        output = folder / f"run{num_runs}"
        kills, wrong = until_finished(folder, output, options, options.count - num_kills, length_s, draw)
        same = (output / "model.safetensors").read_bytes() == expected
        num_kills += kills
        num_wrong += wrong + (not same)
        print(f"run {num_runs}: {kills} kills, weights {'equal to the bit' if same else 'DIFFER'}", flush=True)
    print(f"{num_kills} kills in {num_runs} runs; {num_wrong} wrong")
    return 1 if num_wrong else 0


def until_finished(
    folder: Path, output: Path, options: argparse.Namespace, most: int, length_s: float, draw: random.Random
) -> tuple[int, int]:
    """Start, kill and resume a run until it is done; the kills, and the checkpoints that were not whole."""
    kills = wrong = 0
    while True:
        run = Run(command(folder, output, options), fork=options.fork)
        if kills < most:
            if draw.random() < DURING_TRAINING:
                wait_until_begun(run, output)
            if run.wait(until_s=time.monotonic() + draw.uniform(0, 0.7 * length_s)) is None:
                run.kill()
                kills += 1
        code = run.wait()
        broken = damaged(output)
        if broken:
            print(f"{output.name}: not whole: {', '.join(broken)}", flush=True)
            wrong += len(broken)
        if code == 0:
            return kills, wrong
        if code != -signal.SIGKILL:
            print(run.said(), file=sys.stderr)
            raise SystemExit(f"a resumed run ended with {code}")


if __name__ == "__main__":
    sys.exit(main())
