"""`Stepper` on a real GPU: a long run inside a budget, one beside a process that takes memory, and its overhead.

    python benchmarks/stepper_run.py undisturbed disturbed overhead

`undisturbed`: BERT-large, 512 tokens, samples of varied lengths, capped at 11.17 GiB, 300 steps, beside the prediction;
and at the same time, on the same card, once more in micro-batches of half the size, to see how far clean runs differ by
rounding alone. `disturbed`: the same run while another process holds all but 11.9 GiB of the card, and
one more takes 3 GiB at step 100, when the run has emptied its cache as an evaluation would. `overhead`: against a loop
written by hand.
Each run is a process of its own; results are written after each, and a part that is there is not done again.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import forked
from forked import Child

GIB = 2**30
MODEL, SEQ, BATCH, MEMORY = "bert-large-uncased", 512, 10, int(11.17 * GIB)
LENGTHS_MARGIN = 0.03
"""Left free for windows of varied lengths, whose blocks do not fit into each other's places."""
LEFT_BY_OTHERS = int(11.9 * GIB)
TAKEN, TAKEN_AT = 3 * GIB, 100
CHUNK = 64 * 2**20
TIMEOUT_S = 280
NUM_WARM, NUM_PAIRS = 4, 20
"""Steps of both loops in turn, the first few not counted; the overhead is the median over pairs."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for; parts that a results file has already are left."""
    options = _parse(arguments)
    forked.import_all()
    head = forked.in_child(forked.head, timeout_s=TIMEOUT_S)
    name = head["gpu"].lower().replace("nvidia ", "").replace(" ", "-")
    path = options.results / f"stepper_{name}_{head['date']}.json"
    made: dict[str, Any] = json.loads(path.read_text()) if path.exists() else head
    for part in options.parts:
        if part == "disturbed" and "undisturbed" not in made:
            print("disturbed needs undisturbed", flush=True)
            continue
        if part not in made:
            made[part] = PARTS[part](options, made)
            if '"error"' in json.dumps(made[part]):
                print(part, json.dumps(_without_losses(made.pop(part))), flush=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(made, indent=1) + "\n")
        print(part, json.dumps(_without_losses(made[part])), flush=True)
    return 0


def _without_losses(part: dict[str, Any]) -> dict[str, Any]:
    return {k: _without_losses(v) if isinstance(v, dict) else v for k, v in part.items() if k != "losses"}


def undisturbed(options: argparse.Namespace, made: dict[str, Any]) -> dict[str, Any]:
    """The long run, the prediction made for it beforehand, and a clean run of another split to compare losses with."""
    predicted = forked.in_child(_choose, timeout_s=TIMEOUT_S)
    sizes = {"itself": predicted["micro_batch"], "halved": max(1, predicted["micro_batch"] // 2)}
    started = {name: Child(_train, size, options.steps) for name, size in sizes.items()}
    runs = {name: child.result(TIMEOUT_S) for name, child in started.items()}
    made["undisturbed"] = runs["itself"]
    return {
        "predicted": predicted,
        "halved": _beside(runs["halved"], made),
        **runs["itself"],
    }


def _beside(run: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """The largest difference of a run's losses to the undisturbed ones, in all and before memory was taken."""
    if "error" in run or "error" in made["undisturbed"]:
        return run
    pairs = list(zip(run["losses"], made["undisturbed"]["losses"], strict=True))
    run["max_loss_difference"] = max(abs(a - b) for a, b in pairs)
    run["mean_loss_difference"] = sum(abs(a - b) for a, b in pairs) / len(pairs)
    run["max_loss_difference_before"] = max(abs(a - b) for a, b in pairs[:TAKEN_AT])
    return run


def disturbed(options: argparse.Namespace, made: dict[str, Any]) -> dict[str, Any]:
    """The same run among others; the largest difference of its losses to the undisturbed ones."""
    with tempfile.TemporaryDirectory() as folder:
        taker = Child(_take, folder)
        _wait_for(Path(folder) / "taker_ready")
        holder = Child(_hold, folder)
        try:
            _wait_for(Path(folder) / "holder_ready")
            micro_batch = made["undisturbed"]["predicted"]["micro_batch"]
            run = Child(_train, micro_batch, options.steps, folder).result(TIMEOUT_S)
        finally:
            (Path(folder) / "end").touch()
            for child in (taker, holder):
                child.result(30)
        run["taken_bytes"] = int((Path(folder) / "taken").read_text() or 0)
    return _beside(run, made)


def overhead(options: argparse.Namespace, made: dict[str, Any]) -> dict[str, Any]:
    """Seconds a step of `Stepper` over those of a loop written by hand, for two models and two optimizers."""
    cases = [("bert-base-uncased", 128, 32, 8), ("bert-large-uncased", 512, 16, 4)]
    rows = [Child(_compare, case, fused).result(TIMEOUT_S) for case in cases for fused in (True, False)]
    return {"rows": rows}


PARTS = {"undisturbed": undisturbed, "disturbed": disturbed, "overhead": overhead}


def _choose() -> dict[str, Any]:
    """The largest micro-batch whose prediction leaves the margin."""
    import vramfit

    for micro_batch in range(BATCH, 0, -1):
        e = vramfit.estimate(
            MODEL, seq=SEQ, batch=BATCH, micro_batch=micro_batch, precision="fp32", optimizer="adamw-fused",
            max_grad_norm=1.0, dropout=False, loop="stepper", allocator="expandable", gpu="h200", memory=MEMORY,
        )  # fmt: skip
        if e.fits and e.safe_reserved_bytes <= (1 - LENGTHS_MARGIN) * MEMORY:
            break
    return {
        "micro_batch": micro_batch,
        "peak_allocated_bytes": e.peak_allocated_bytes,
        "peak_reserved_bytes": e.peak_reserved_bytes,
        "safe_reserved_bytes": e.safe_reserved_bytes,
        "basis": e.basis,
    }


def _train(micro_batch: int, num_steps: int, folder: str | None = None) -> dict[str, Any]:
    import torch

    import vramfit
    from vramfit.runtime.stepper import Stepper
    from vramfit.techniques.application import use_expandable_segments

    torch.manual_seed(0)
    use_expandable_segments(torch.device("cuda"))
    model, _ = vramfit.load(MODEL, random_weights=True, device="cuda")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    stepper = Stepper(model, optimizer, micro_batch=micro_batch, seq=SEQ, memory=MEMORY, max_grad_norm=1.0)
    draw = torch.Generator().manual_seed(1)
    batches = [_varied_batch(draw) for _ in range(num_steps)]
    stepper.rehearse(batches[0])
    rehearsed = torch.cuda.max_memory_reserved()
    losses, sizes, started = [], [], time.perf_counter()
    for index, batch in enumerate(batches):
        if folder is not None and index == TAKEN_AT:
            torch.cuda.empty_cache()  # as after an evaluation
            (Path(folder) / "take").touch()
            _wait_for(Path(folder) / "taken")
        losses.append(stepper.step(batch))
        sizes.append(stepper.micro_batch)
    stats = torch.cuda.memory_stats()
    return {
        "seconds": time.perf_counter() - started,
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "max_reserved_bytes": torch.cuda.max_memory_reserved(),
        "rehearsed_reserved_bytes": rehearsed,
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
        "num_recoveries": stepper.num_recoveries,
        "num_steps": stepper.num_steps,
        "micro_batches": sorted(set(sizes)),
        "losses": losses,
    }


def _varied_batch(draw: Any) -> dict[str, Any]:
    """Samples of 32 to 512 tokens, padded to the longest."""
    import torch

    lengths = torch.randint(32, SEQ + 1, (BATCH,), generator=draw)
    width = int(lengths.max())
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    ids = torch.randint(1000, 30000, (BATCH, width), generator=draw) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 2, (BATCH,), generator=draw)}


def _hold(folder: str) -> dict[str, Any]:
    """Take all of the card but what the run is to have."""
    import torch

    torch.zeros(1, device="cuda")
    kept = []
    while torch.cuda.mem_get_info()[0] > LEFT_BY_OTHERS:
        size = min(8 * GIB, torch.cuda.mem_get_info()[0] - LEFT_BY_OTHERS)
        kept.append(torch.empty(max(size, 2**21), dtype=torch.uint8, device="cuda"))
    (Path(folder) / "holder_ready").touch()
    _wait_for(Path(folder) / "end", TIMEOUT_S)
    return {"held_bytes": sum(t.numel() for t in kept)}


def _take(folder: str) -> dict[str, Any]:
    """Wait for the word, then take 3 GiB in pieces."""
    import torch

    torch.zeros(1, device="cuda")
    (Path(folder) / "taker_ready").touch()
    kept = []
    _wait_for(Path(folder) / "take", TIMEOUT_S)
    try:
        while sum(t.numel() for t in kept) < TAKEN:
            kept.append(torch.empty(CHUNK, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    (Path(folder) / "taken.new").write_text(str(sum(t.numel() for t in kept)))
    os.replace(Path(folder) / "taken.new", Path(folder) / "taken")
    _wait_for(Path(folder) / "end", TIMEOUT_S)
    return {}


def _compare(case: tuple[str, int, int, int], fused: bool) -> dict[str, Any]:
    import torch

    import vramfit
    from vramfit.runtime.stepper import Stepper

    name, seq, batch_size, micro_batch = case
    model, _ = vramfit.load(name, random_weights=True, device="cuda")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused, foreach=not fused)
    batch = {
        "input_ids": torch.randint(1000, 30000, (batch_size, seq)),
        "attention_mask": torch.ones(batch_size, seq, dtype=torch.long),
        "labels": torch.randint(0, 2, (batch_size,)),
    }
    batch["attention_mask"][:, 1] = 0
    stepper = Stepper(model, optimizer, micro_batch=micro_batch, seq=seq, max_grad_norm=1.0, precision="amp-bf16")

    def by_hand() -> None:
        total = 0.0
        for begin in range(0, batch_size, micro_batch):
            part = {k: v[begin : begin + micro_batch].cuda(non_blocking=True) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**part).loss * micro_batch / batch_size
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(total)

    loops = {"by_hand": by_hand, "stepper": lambda: stepper.step(batch)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for index in range(NUM_PAIRS + NUM_WARM):
        for loop, run in loops.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if index >= NUM_WARM:
                times[loop].append(time.perf_counter() - started)
    ratios = [mine / hand - 1 for mine, hand in zip(times["stepper"], times["by_hand"], strict=True)]
    seconds = {loop: median(values) for loop, values in times.items()}
    return {"case": case, "fused": fused, **seconds, "overhead": median(ratios)}


def _wait_for(path: Path, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
