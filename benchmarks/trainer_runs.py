"""A Trainer script under memory caps: with `fit_trainer`, with `auto_find_batch_size`, and plain.

    python benchmarks/trainer_runs.py            # on a GPU
    python benchmarks/trainer_runs.py --quick    # a small model on an emulated GPU: does it run at all
    python benchmarks/trainer_runs.py --models bert-base-uncased --tasks token-classification --caps 8 --sides auto

Samples of random tokens, log-normal lengths (median 185, at most 512), padded to the longest of a batch, bf16 autocast,
an effective batch of 64, under each cap. `fitted` is the script with its one line; `auto` the same with
`auto_find_batch_size`, whose search is reported apart; `disturbed` is `fitted` while something else takes most of the
cap from the sixth to the tenth step. `evaluated` and `plain-evaluated` evaluate a token classifier of 200 labels whose
logits are larger than the cap. Tokens are real ones, padding is none. Steps after the first few are timed together, on
every side alike: from one wait for the GPU to another, with none of ours in between. Every side runs in a process of
its own; one line of JSON a side is added to the results, and sides that are there are not run again. `--processes` of
them get ready side by side; only one at a time is on the GPU.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import forked

GIB, MIB = 2**30, 2**20
MODELS = ("bert-base-uncased", "bert-large-uncased")
TASKS = ("sequence-classification", "token-classification")
CAPS = tuple(int(g * GIB) for g in (6, 8, 11.17, 16, 24))
TRAINED, EVALUATED = ("fitted", "auto", "disturbed"), ("evaluated", "plain-evaluated")
SIDES = TRAINED + EVALUATED
BATCH, SEQ, MEDIAN, SPREAD = 64, 512, 185, 0.7
NUM_STEPS, NUM_WARM = 48, 16
QUICK_STEPS, QUICK_WARM = 12, 6
TAKEN_FROM, TAKEN_UNTIL = 5, 10
EVALUATION = {"model": "bert-base-uncased", "cap": 3 * GIB, "num_samples": 10_000, "num_labels": 200}
QUICK = {"model": "bert-mini", "cap": 320 * MIB, "num_samples": 200, "num_labels": 4000}


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet; 1 where a side that was asked for failed and must not."""
    options = _parse(arguments)
    jobs = _jobs(options)
    forked.import_all()
    done = {
        (r["model"], r["task"], r["cap"], r["side"])
        for r in forked.read_lines(options.out, "model", "task", "cap", "side")
        if "error" not in r
    }
    waiting = [(*job, options.evaluation, options.quick) for job in jobs if job not in done]
    found = forked.in_children(run_side, waiting, num_processes=options.processes, timeout_s=options.timeout_s)
    for job, made in found:
        line = dict(zip(("model", "task", "cap", "side"), job[:4], strict=True)) | made
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    lines = forked.read_lines(options.out, "model", "task", "cap", "side")
    failed = [(r["model"], r["task"], r["cap"], r["side"]) for r in lines if "error" in r]
    return int(not set(failed).isdisjoint(jobs))


def _jobs(options: argparse.Namespace) -> list[tuple[str, str, int, str]]:
    """Model, task, cap and side of what was asked for; an evaluation has a model, a task and a cap of its own."""
    trained, evaluated = ([s for s in sides if s in options.sides] for sides in (TRAINED, EVALUATED))
    jobs = [(m, t, c, s) for m in options.models for t in options.tasks for c in options.caps for s in trained]
    if TASKS[1] in options.tasks:
        jobs += [(options.evaluation["model"], TASKS[1], options.evaluation["cap"], s) for s in evaluated]
    return jobs


def run_side(name: str, task: str, cap: int, side: str, evaluation: dict[str, Any], quick: bool) -> dict[str, Any]:
    """One side in this process."""
    import torch

    import vramfit

    if not quick:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    place: Any = vramfit.EmulatedGPU(memory=cap, allocator="expandable") if quick else nullcontext()
    run = _evaluate if side.endswith("evaluated") else _train
    with tempfile.TemporaryDirectory() as folder:
        made = run(folder, name, task, cap, side, evaluation, place, quick) | forked.head()
    if not quick:
        stats = torch.cuda.memory_stats()
        made |= {"max_reserved_bytes": torch.cuda.max_memory_reserved()}
        made |= {"num_alloc_retries": stats["num_alloc_retries"], "num_ooms": stats["num_ooms"]}
    return made


def _train(
    folder: str, name: str, task: str, cap: int, side: str, _: dict[str, Any], place: Any, quick: bool
) -> dict[str, Any]:
    from vramfit.integrations.trainer import fit_trainer

    num_steps = QUICK_STEPS if quick else NUM_STEPS
    trainer = _trainer(folder, name, task, num_samples=BATCH * num_steps, quick=quick, auto=side == "auto")
    trainer.args.max_steps = num_steps if side != "auto" else -1
    made: dict[str, Any] = {}
    if side != "auto":
        began = time.perf_counter()
        fitting = fit_trainer(trainer, memory=cap)
        settings = [f"{c.name}={c.after}" for c in fitting.changes if c.name != "attention"]
        settings.append(f"attention={fitting.plan.workload.attention}")
        made = {"fit_s": time.perf_counter() - began, "settings": settings}
        made |= {"micro_batch": fitting.plan.micro_batch, "predicted_bytes": fitting.most_bytes}
    with forked.GPU, place as gpu:
        thief = _thief(cap, gpu)
        if side == "disturbed":
            trainer.add_callback(thief)
        began = time.perf_counter()
        trainer.train()
    clock, last = trainer.clock, trainer.state.global_step
    made |= {
        "search_s": clock.began - began,
        "batch": trainer._train_batch_size,
        "num_steps": trainer.state.global_step,
    }
    made |= {
        "num_recoveries": getattr(trainer, "num_recoveries", None),
        "num_padded": trainer.vramfit.num_padded if side != "auto" else None,
        "loss": trainer.state.log_history[-1]["train_loss"],
    }
    num_tokens = sum(clock.num_tokens[clock.num_warm : last])
    return {**made, "taken_bytes": thief.taken_bytes, "tokens_per_s": num_tokens / (clock.ended - clock.warm)}


def _evaluate(
    folder: str, name: str, task: str, cap: int, side: str, evaluation: dict[str, Any], place: Any, quick: bool
) -> dict[str, Any]:
    import torch

    from vramfit.integrations.trainer import fit_trainer

    count = evaluation["num_samples"]
    trainer = _trainer(folder, name, task, num_samples=count, quick=quick, num_labels=evaluation["num_labels"])
    trainer.compute_metrics = lambda p: {"mean": float(p.predictions.mean())}
    if side == "evaluated":
        fit_trainer(trainer, memory=cap)
    try:
        with forked.GPU, place:
            began = time.perf_counter()
            metrics = trainer.evaluate()
    except torch.OutOfMemoryError as error:
        return {"ran_out": str(error).splitlines()[0], "after_s": time.perf_counter() - began}
    seconds = time.perf_counter() - began
    return {"ran_out": None, "samples_per_s": count / seconds, "mean": metrics["eval_mean"]}


def _trainer(
    folder: str, name: str, task: str, *, num_samples: int, quick: bool, auto: bool = False, **changes: Any
) -> Any:
    """The script that is run, but for its one line."""
    import torch
    import transformers

    from vramfit.models.resolve import resolve

    clock = _clock(quick)
    torch.manual_seed(0)
    resolved = resolve(name, task=task, **changes)
    args = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        auto_find_batch_size=auto,
        bf16=not quick,
        num_train_epochs=1,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=quick,
    )
    samples = _samples(num_samples, task, SEQ // 8 if quick else SEQ)
    model = resolved.model_class(resolved.config)
    given = {"train_dataset": samples, "eval_dataset": samples, "data_collator": clock.pad}
    trainer = transformers.Trainer(model=model, args=args, callbacks=[clock], **given)
    trainer.clock = clock
    return trainer


def _clock(quick: bool) -> Any:
    """Knows when a run was warm, when it ended, and how many real tokens each batch had."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        num_tokens: list[int]
        began = warm = ended = 0.0
        num_warm = QUICK_WARM if quick else NUM_WARM

        def __init__(self) -> None:
            self.num_tokens = []

        def pad(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
            self.num_tokens.append(sum(len(row["input_ids"]) for row in rows))
            return _pad(rows)

        def now(self) -> float:
            if not quick:
                torch.cuda.synchronize()
            return time.perf_counter()

        def on_train_begin(self, *_: Any, **__: Any) -> None:  # a search that starts again counts from there
            self.num_tokens, self.began = [], time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.num_warm:
                self.warm = self.now()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.ended = self.now()

    return Clock()


def _samples(count: int, task: str, longest: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    made = []
    for i in range(count):
        length = min(max(int(draw.lognormvariate(math.log(MEDIAN * longest / SEQ), SPREAD)), 8), longest)
        ids = [draw.randrange(1000, 20_000) for _ in range(length)]
        labels: Any = i % 2 if task == TASKS[0] else [draw.randrange(2) for _ in range(length)]
        made.append({"input_ids": ids, "labels": labels})
    return made


def _pad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    width = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (width - len(values))

    per_token = isinstance(rows[0]["labels"], list)
    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) if per_token else row["labels"] for row in rows]),
    }


def _thief(cap: int, gpu: Any) -> Any:
    """Takes most of what a step needs beside weights, state and gradients, and gives it back later."""
    import torch
    from transformers import TrainerCallback

    class Thief(TrainerCallback):
        taken: Any = None
        taken_bytes = 0

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == TAKEN_FROM:
                used = gpu.allocated_bytes if gpu is not None else torch.cuda.memory_allocated()
                gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
                num_bytes = self.taken_bytes = max((cap - used - 2 * gradients) * 3 // 4, 0)
                if gpu is not None:
                    gpu.empty_cache()
                    gpu.take(num_bytes)
                else:
                    torch.cuda.empty_cache()
                    self.taken = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            if state.global_step == TAKEN_UNTIL:
                self.taken = None
                if gpu is not None:
                    gpu.release()

    return Thief()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trainer_runs.jsonl"))
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--tasks", type=_some(TASKS), default=list(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument(
        "--sides",
        type=_some(SIDES),
        default=list(SIDES),
        help=f"of {', '.join(SIDES)}; the last two are token classification",
    )
    parser.add_argument("--caps", type=lambda text: [int(float(c) * GIB) for c in text.split(",")], default=list(CAPS))
    parser.add_argument("--quick", action="store_true", help="a small model on an emulated GPU")
    parser.add_argument("--processes", type=int, default=1, help="sides that get ready at once")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    options = parser.parse_args(arguments)
    options.evaluation = QUICK if options.quick else EVALUATION
    if options.quick:
        options.models, options.caps = ["bert-mini"], [320 * MIB]
    if not _jobs(options):
        parser.error(f"{', '.join(options.sides)} of {', '.join(options.tasks)}: there is nothing to run")
    return options


def _some(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Reads a few of these, with commas between."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        return names

    return read


if __name__ == "__main__":
    sys.exit(main())
