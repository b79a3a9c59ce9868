"""What `vramfit.watch` costs a training step on a real GPU: light and in detail, beside the same step unwatched.

    python benchmarks/watch_overhead.py

BERT-base with 128 tokens, whose steps wait for the host, and BERT-large with 512, whose steps wait for the GPU; fp32
and bf16 autocast, AdamW fused. Each case is a process of its own that takes steps in turn: unwatched, light, in detail;
the overhead is the median over rounds, and the peaks that the watch saw stand beside torch's own. Results are written
after each case, and a case that is there is not done again.
"""

import argparse
import io
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import forked
from forked import Child

TIMEOUT_S = 240
NUM_WARM, NUM_ROUNDS, STEPS_A_ROUND = 1, 10, 20
CASES = {
    "base_128_fp32": ("bert-base-uncased", 128, 32, False),
    "base_128_bf16": ("bert-base-uncased", 128, 32, True),
    "large_512_bf16": ("bert-large-uncased", 512, 16, True),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for; those that a results file has already are left."""
    options = _parse(arguments)
    forked.import_all()
    import vramfit.runtime.watching  # noqa: F401

    head = forked.in_child(forked.head, timeout_s=TIMEOUT_S)
    name = head["gpu"].lower().replace("nvidia ", "").replace(" ", "-")
    path = options.results / f"watch_overhead_{name}_{head['date']}.json"
    made: dict[str, Any] = json.loads(path.read_text()) if path.exists() else head
    for case in options.cases:
        if case not in made:
            result = Child(_measure, CASES[case]).result(TIMEOUT_S)
            print(case, json.dumps(result), flush=True)
            if "error" in result:
                continue
            made[case] = result
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(made, indent=1) + "\n")
    return 0


def _measure(case: tuple[str, int, int, bool]) -> dict[str, Any]:
    import torch

    import vramfit
    from vramfit.runtime.watching import watch

    name, seq, size, autocast = case
    model, _ = vramfit.load(name, random_weights=True, device="cuda")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = {
        "input_ids": torch.randint(1000, 30000, (size, seq), device="cuda"),
        "attention_mask": torch.ones(size, seq, dtype=torch.long, device="cuda"),
        "labels": torch.randint(0, 2, (size,), device="cuda"),
    }
    batch["attention_mask"][:, 1] = 0

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def timed() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(STEPS_A_ROUND):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / STEPS_A_ROUND

    ways = {
        "light": watch(stream=io.StringIO(), plan_on_failure=False),
        "detailed": watch(detailed=True, stream=io.StringIO(), plan_on_failure=False),
    }
    times: dict[str, list[float]] = {"plain": [], **{way: [] for way in ways}}
    for index in range(NUM_WARM + NUM_ROUNDS):
        seconds = {"plain": timed()}
        for way, watching in ways.items():
            with watching:
                step()  # models are found in the first pass
                seconds[way] = timed()
        if index >= NUM_WARM:
            for way, value in seconds.items():
                times[way].append(value)
    light, torch_peak = _agreement(step)
    return {
        "case": case,
        "seconds": {way: median(values) for way, values in times.items()},
        "overhead": {way: median(b / a - 1 for a, b in zip(times["plain"], times[way], strict=True)) for way in ways},
        "peak_allocated_bytes": {"watch": light, "torch": torch_peak},
        "notes": [note for watching in ways.values() for note in watching.record.notes],
        "findings": [f.what for watching in ways.values() for f in watching.findings],
    }


def _agreement(step: Any) -> tuple[int | None, int]:
    """The peak that a light watch saw, and torch's own."""
    import torch

    from vramfit.runtime.watching import watch

    torch.cuda.reset_peak_memory_stats()
    with watch(stream=io.StringIO(), plan_on_failure=False) as watching:
        for _ in range(4):
            step()
    return watching.record.peak_allocated_bytes, torch.cuda.max_memory_allocated()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
