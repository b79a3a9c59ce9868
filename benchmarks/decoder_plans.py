"""Plans for a decoder of 0.6 billion weights, of Qwen3's shape, at 512 tokens: full fine-tuning, LoRA and QLoRA.

    python benchmarks/decoder_plans.py                        # writes benchmarks/results/decoder_plans.json
    python benchmarks/decoder_plans.py --run decoders.jsonl   # on a GPU: steps by these plans, under their budgets
    python benchmarks/decoder_plans.py --page docs/decoders.md decoders.jsonl    # plans and runs, as two tables

Each run is planned anew and has a process of its own, whose allocator is limited to the budget; one line of JSON a run
is added to the file.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import forked, pages

RESULTS = Path(__file__).parent / "results" / "decoder_plans.json"
GPU, BATCH, SEQ, RANK = "h200", 8, 512, 16
NUM_STEPS, NUM_WARM = 6, 2
RUN_TIMEOUT_S = 200.0
CASES: dict[str, dict[str, Any]] = {
    "full fine-tuning": {"memory": "12GiB"},
    "LoRA": {"memory": "4GiB", "lora": RANK, "lora_targets": "all-linear"},
    "QLoRA": {"memory": "2GiB", "lora": RANK, "lora_targets": "all-linear", "quantize": "nf4"},
}
"""What learns → what the plan is asked for."""


def qwen3_shape() -> Any:
    """28 layers of 1,024, 16 heads of 128 that share 8 of keys and values, 3,072 inside, 151,669 words."""
    from transformers import Qwen3Config

    return Qwen3Config(
        num_hidden_layers=28,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_669,
        tie_word_embeddings=True,
        eos_token_id=151_643,
        bos_token_id=151_643,
    )


def main(arguments: list[str] | None = None) -> int:
    """Plan each case and write what was planned, or run each plan; 1 where one did not do what it promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="FILE", help="train by each plan on the GPU, and add lines to it")
    parser.add_argument("--page", type=Path, nargs=2, metavar=("PAGE", "FILE"), help="write the tables of a page")
    options = parser.parse_args(arguments)
    if options.run is not None:
        return run_all(options.run)
    if options.page is not None:
        page, runs = options.page
        parts = {"plans": table_of_plans(), "runs": table_of_runs(forked.read_lines(runs, "name"))}
        pages.put(page, "benchmarks/decoder_plans.py", **parts)
        return 0
    found = {}
    for name, asked in CASES.items():
        found[name] = in_words(make_plan(asked), asked)
        print(name, found[name], flush=True)
    made = {"gpu": GPU, "batch": BATCH, "seq": SEQ, "predicted_only": True, "plans": found}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 0


def make_plan(asked: dict[str, Any]) -> Any:
    import vramfit

    return vramfit.plan(qwen3_shape(), batch=BATCH, seq=SEQ, gpu=GPU, **asked)


def in_words(plan: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What was planned."""
    w, estimate = plan.workload, plan.estimate
    return {
        "memory": asked["memory"],
        "micro_batch": w.micro_batch,
        "precision": w.precision,
        "checkpointing": w.checkpointing,
        "optimizer": w.optimizer,
        "offload": w.offload,
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "safe_reserved_bytes": estimate.safe_reserved_bytes,
        "step_s": round(plan.step_time_s, 3),
    }


def run_all(out: Path) -> int:
    """Steps of every plan, side by side: their times say little, their memory is counted for each process."""
    forked.import_all()
    promises_held = True
    cases = list(CASES.items())
    for (name, asked), found in forked.in_children(run, cases, num_processes=len(cases), timeout_s=RUN_TIMEOUT_S):
        line = {"name": name, "memory": asked["memory"], **found}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        promises_held &= "error" not in line and line["max_reserved_bytes"] <= line["safe_reserved_bytes"]
    return int(not promises_held)


def run(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Some steps of full texts under the budget, in this process."""
    import torch

    import vramfit
    from vramfit.units import parse_bytes

    plan = make_plan(asked)
    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(parse_bytes(asked["memory"], name="memory") / total)
    model, _ = vramfit.load(qwen3_shape(), random_weights=True, device="cpu")
    vramfit.prepare(model, plan, "cuda")
    model.train()
    stepper = vramfit.Stepper(model, vramfit.make_optimizer(model, plan), plan)
    draw = torch.Generator().manual_seed(0)
    times = []
    for _ in range(NUM_STEPS):
        ids = torch.randint(1000, 150_000, (BATCH, SEQ), generator=draw)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        began = time.perf_counter()
        loss = stepper.step(batch | {"labels": torch.randint(0, 2, (BATCH,), generator=draw)})
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {
        **in_words(plan, asked),
        "attention": plan.workload.attention,
        "allocator": plan.workload.allocator,
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "max_reserved_bytes": torch.cuda.max_memory_reserved(),
        "num_recoveries": stepper.num_recoveries,
        "num_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "loss": float(loss),
        "measured_step_s": median(times[NUM_WARM:]),
        **forked.head(),
    }


def table_of_plans() -> str:
    """What was planned."""
    made = json.loads(RESULTS.read_text(encoding="utf-8"))["plans"]
    rows = []
    for name, plan in made.items():
        layers = {None: "no layer computed twice", "full": "all layers computed twice"}
        checkpointing = layers.get(plan["checkpointing"], f"{plan['checkpointing']} of 28 layers computed twice")
        settings = f"{plan['precision']}, {plan['optimizer']}, {checkpointing}"
        rows.append([name, plan["memory"], f"{plan['safe_reserved_bytes'] / 2**30:.2f} GiB", settings])
    return pages.table(("what learns", "budget", "reserved at most", "settings"), rows)


def table_of_runs(lines: list[dict[str, Any]]) -> str:
    """What was run, beside its plan, and beside what is predicted for the same settings without padding, as it ran."""
    import vramfit

    rows = []
    for line in lines:
        same = ("micro_batch", "precision", "checkpointing", "optimizer", "attention", "allocator")
        asked = {**{key: line[key] for key in same}, **{k: v for k, v in CASES[line["name"]].items() if k != "memory"}}
        asked |= {"casts": "together"} if line["precision"].startswith("amp") else {}  # as plans have it
        where = {"gpu": GPU, "torch_version": line["torch"], "loop": "stepper", "mask": "ones"}
        again = vramfit.estimate(qwen3_shape(), batch=BATCH, seq=SEQ, **where, **asked)
        row = [line["name"], line["memory"], line["num_recoveries"]]
        for name, planned, now in (
            ("max_allocated_bytes", line["peak_allocated_bytes"], again.peak_allocated_bytes),
            ("max_reserved_bytes", line["safe_reserved_bytes"], again.safe_reserved_bytes),
        ):
            row += [f"{line[name] / 2**30:.3f} GiB", f"{planned / 2**30:.3f} GiB", f"{now / line[name] - 1:+.4%}"]
        rows.append(row)
    head = ("what learned", "budget", "recoveries", "allocated", "planned, at most", "predicted without padding")
    return pages.table((*head, "reserved", "planned, at most", "predicted without padding, at most"), rows)


if __name__ == "__main__":
    sys.exit(main())
