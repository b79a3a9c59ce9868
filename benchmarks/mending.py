"""A neighbour takes 40 % of the memory at step 50 and gives it back at step 150: what becomes of a run?

    python benchmarks/mending.py --memory 11.17GiB                       # on a GPU
    python benchmarks/mending.py --device emulated --memory 70MiB        # small, on the CPU: memory and maths, no speed

`disturbed`: `vramfit train` beside the neighbour. `kept`: the same with `mend=False`. `undisturbed`: the same without
a neighbour. `less`: a fresh run inside what the neighbour leaves. All have the same model with random weights, without
dropout, and the same data; they run in turns, several rounds, each in a process of its own. On a GPU another process
holds all but the budget, and the neighbour is one more, which takes its part when the run has emptied its cache, as an
evaluation would. One line of JSON a run is added to the results; the last lines compare.

On the emulated GPU, times are predictions: of the settings in use beside those of fresh plans. The script has not been
run on a GPU yet.
"""

import argparse
import csv
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import forked

TAKEN_SHARE, TAKEN_AT, BACK_AT, NUM_STEPS, WITHIN = 0.4, 50, 150, 200, 20
CHUNK_BYTES = 32 * 2**20
CONTEXT_BYTES = 700 * 2**20
"""Left by the holder for what CUDA itself takes in each of two processes."""
TIMEOUT_S, SIGNAL_S = 1800, 120
SIZES: dict[str, dict[str, Any]] = {
    "bert-base": {"vocab_size": 30522},
    "small": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 1024,
        "initializer_range": 0.2,
        "max_position_embeddings": 48,
    },
}
WORDS = ("the", "film", "was", "and", "music", "in", "good", "bad", "long", "short", "old", "new")
CASES = ("undisturbed", "disturbed", "kept", "less")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all runs have in common."""

    folder: str
    device: str
    memory_bytes: int
    batch: int
    gpu: str | None

    @property
    def taken_bytes(self) -> int:
        """The neighbour's part."""
        return int(TAKEN_SHARE * self.memory_bytes)

    @property
    def is_emulated(self) -> bool:
        """Whether the CPU stands for a GPU."""
        return self.device == "emulated"


def main(arguments: list[str] | None = None) -> int:
    """Run all cases in turns; 0 where the run went on as well as fresh ones do."""
    options = _parse(arguments)
    from vramfit.units import parse_bytes

    forked.import_all()
    with tempfile.TemporaryDirectory() as folder:
        sizes = options.size or ("small" if options.device == "emulated" else "bert-base")
        longest = 37 if sizes == "small" else 300
        write_files(Path(folder), SIZES[sizes], longest)
        memory_bytes = parse_bytes(options.memory, name="memory")
        gpu = "t4" if sizes == "small" else None
        job = Job(folder=folder, device=options.device, memory_bytes=memory_bytes, batch=options.batch, gpu=gpu)
        lines = []
        for number in range(options.rounds):
            for case in CASES:
                line = {"case": case, "round": number, **measured(job, case, f"{case}-{number}")}
                lines.append(line)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps({name: value for name, value in line.items() if name != "losses"}), flush=True)
    found = compared(lines)
    print(json.dumps(found, indent=1))
    return 0 if found["is_shown"] else 1


def write_files(folder: Path, sizes: dict[str, Any], longest: int) -> None:
    """A model with random weights and without dropout, its tokenizer, and sentences of varied lengths."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    torch.manual_seed(0)
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertModel(config).save_pretrained(folder / "model")
    most = config.max_position_embeddings
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=most).save_pretrained(
        folder / "model"
    )
    draw = random.Random(0)
    with (folder / "data.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(2000):
            text = [draw.choice(WORDS) for _ in range(draw.randint(longest * 3 // 4, longest))]
            writer.writerow([" ".join([("good", "bad")[i % 2], *text]), ("good", "bad")[i % 2]])


def measured(job: Job, case: str, name: str) -> dict[str, Any]:
    """One run, beside a neighbour where the case has one."""
    if job.is_emulated or case in ("undisturbed", "less"):
        return forked.in_child(train, job, case, name, "", timeout_s=TIMEOUT_S)
    with tempfile.TemporaryDirectory() as signals:
        others = [forked.Child(hold, signals, job.memory_bytes), forked.Child(neighbour, signals)]
        try:
            for word in ("holds", "waits"):
                wait_for(Path(signals) / word)
            return forked.in_child(train, job, case, name, signals, timeout_s=TIMEOUT_S)
        finally:
            (Path(signals) / "end").touch()
            for child in others:
                child.result(SIGNAL_S)


def train(job: Job, case: str, name: str, signals: str) -> dict[str, Any]:
    """One run of `vramfit train`, and how quick its steps were."""
    from vramfit.records.plan import Plan
    from vramfit.runtime.training import train as module
    from vramfit.runtime.training.events import Stepped
    from vramfit.runtime.training.request import TrainRequest

    devices: list[Any] = []
    make: Any = module.RunDevice
    module.RunDevice = lambda *given, **named: devices.append(make(*given, **named)) or devices[-1]  # type: ignore
    act = _neighbour_of(job, signals, devices) if case in ("disturbed", "kept") else lambda step: None
    steps: list[Stepped] = []

    def see(event: Any) -> None:
        if isinstance(event, Stepped):
            steps.append(event)
            act(event.step)

    memory = job.memory_bytes - job.taken_bytes if case == "less" else job.memory_bytes
    output = Path(job.folder) / name
    request = TrainRequest(
        model=f"{job.folder}/model",
        data=f"{job.folder}/data.csv",
        output=str(output),
        device=job.device,
        memory=memory,
        gpu=job.gpu,
        batch=job.batch,
        max_steps=NUM_STEPS,
        max_rows=2000,
        lr=1e-3 if job.is_emulated else 1e-4,
        mend=case != "kept",
    )
    record = module.train(request, on_event=see)
    plan = Plan.load(output / "plan.json")
    parts = {"before": (20, TAKEN_AT), "during": (TAKEN_AT + WITHIN, BACK_AT), "after": (BACK_AT + WITHIN, NUM_STEPS)}
    return {
        "num_steps": record.num_steps,
        "tokens_per_s": {n: median(s.tokens_per_s for s in steps[a:b]) for n, (a, b) in parts.items()},
        "micro_batches": {n: sorted({s.micro_batch for s in steps[a:b]}) for n, (a, b) in parts.items()},
        "predicted_step_time_s": plan.step_time_s,
        "changes": [
            {"step": c.step, "cause": c.cause, "step_time_s": c.step_time_s, "plan_s": c.plan_s, "said": c.said}
            for c in record.changes
        ],
        "num_recoveries": record.num_recoveries,
        "num_retries": record.num_retries,
        "train_loss": record.train_loss,
        "losses": [s.loss for s in steps],
    }


def _neighbour_of(job: Job, signals: str, devices: list[Any]) -> Callable[[int], None]:
    """What makes the neighbour of a run take and give back after steps."""

    def emulated(step: int) -> None:
        gpu = devices[-1].emulated
        if step == TAKEN_AT:
            gpu.take(job.taken_bytes)
        elif step == BACK_AT:
            gpu.release()

    def real(step: int) -> None:
        import torch

        folder = Path(signals)
        if step == TAKEN_AT:
            torch.cuda.empty_cache()
            left_bytes = job.memory_bytes - job.taken_bytes - torch.cuda.memory_reserved()
            (folder / "told").write_text(str(left_bytes))
            (folder / "told").rename(folder / "take")
            wait_for(folder / "taken")
        elif step == BACK_AT:
            (folder / "give").touch()
            wait_for(folder / "given")

    return emulated if job.is_emulated else real


def neighbour(signals: str) -> dict[str, Any]:
    """Another process: takes of the GPU what is free when it is told to, but for what it is told to leave, and gives it
    back."""
    import torch

    folder = Path(signals)
    torch.zeros(1, device="cuda")
    (folder / "waits").touch()
    wait_for(folder / "take", TIMEOUT_S)
    num_bytes = max(torch.cuda.mem_get_info()[0] - int((folder / "take").read_text()), 0)
    chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(num_bytes // CHUNK_BYTES)]
    (folder / "taken").touch()
    wait_for(folder / "give", TIMEOUT_S)
    chunks.clear()
    torch.cuda.empty_cache()
    (folder / "given").touch()
    wait_for(folder / "end", TIMEOUT_S)
    return {}


def hold(signals: str, left_bytes: int) -> dict[str, Any]:
    """Another process: holds all of the GPU but so much, and what CUDA takes."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(free_bytes - left_bytes - 2 * CONTEXT_BYTES, 1), dtype=torch.uint8, device="cuda")
    (Path(signals) / "holds").touch()
    wait_for(Path(signals) / "end", TIMEOUT_S)
    return {"held_bytes": held.nbytes}


def wait_for(path: Path, limit_s: float = SIGNAL_S) -> None:
    """Wait until a file is there.

    Raises:
        TimeoutError: it does not come; or the run has ended.
    """
    until = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > until or ((path.parent / "end").exists() and path.name != "end"):
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.05)


def compared(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The disturbed runs beside fresh ones: throughput, predicted times, losses, steps."""
    by_case = {case: [line for line in lines if line["case"] == case and "error" not in line] for case in CASES}
    if not all(by_case.values()):
        return {"is_shown": False, "errors": [line["error"] for line in lines if "error" in line]}

    def speed(case: str, part: str) -> float:
        return median(line["tokens_per_s"][part] for line in by_case[case])

    changes = [line["changes"] for line in by_case["disturbed"]]
    found: dict[str, Any] = {
        "during_over_best": speed("disturbed", "during") / speed("less", "during"),
        "after_over_best": speed("disturbed", "after") / speed("undisturbed", "after"),
        "kept_during_over_best": speed("kept", "during") / speed("less", "during"),
        "steps_until_changed": [
            [c["step"] - at for c, at in zip(one, (TAKEN_AT, BACK_AT), strict=False)] for one in changes
        ],
        "num_changes": [len(one) for one in changes],
        "max_loss_difference": max(
            abs(a - b)
            for one, other in zip(by_case["disturbed"], by_case["undisturbed"], strict=True)
            for a, b in zip(one["losses"], other["losses"], strict=True)
        ),
        "num_steps": sorted({line["num_steps"] for line in lines}),
    }
    best = [by_case[case][0]["predicted_step_time_s"] for case in ("less", "undisturbed")]
    found["predicted_over_best"] = [[c["step_time_s"] / b for c, b in zip(one, best, strict=False)] for one in changes]
    found["is_shown"] = found["num_steps"] == [NUM_STEPS] and all(
        len(one) == 2 and all(0 <= n <= WITHIN for n in steps) and all(r <= 1.1 for r in ratios)
        for one, steps, ratios in zip(changes, found["steps_until_changed"], found["predicted_over_best"], strict=True)
    )
    return found


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda or emulated")
    parser.add_argument("--memory", required=True, help="the run's budget, such as 11.17GiB")
    parser.add_argument("--size", choices=sorted(SIZES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("mending.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
