"""What does learning from a teacher take on a GPU? Peaks of distilled runs beside their predictions.

    python benchmarks/distilled_memory.py --out distilled.jsonl            # on a GPU; goes on where it stopped
    python benchmarks/distilled_memory.py --summary distilled.jsonl        # what came out, beside the bars
    python benchmarks/distilled_memory.py --page docs/distillation.md distilled.jsonl    # writes its table anew
    python benchmarks/distilled_memory.py --device emulated --quick --out rehearsal.jsonl    # a rehearsal without a GPU

Teachers have random weights, students half of their layers, and texts full length, so that a plan's peak is that of the
steps. Every case is a run of `vramfit distill` in a process of its own, inside a budget, several at a time: PyTorch
counts memory per process. One line of JSON a case is added as it ends.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import forked
import pages
import soak_jobs

NUM_STEPS, CASE_TIMEOUT_S, LEAST_S = 4, 200.0, 20.0
MOST_ERROR = 0.005
"""The bar: how far a prediction of what is allocated may be above; it may never be below."""
GIB = 2**30
Case = dict[str, Any]


def all_cases(*, quick: bool) -> list[Case]:
    """Teachers on the disk and in memory, over tasks, kinds of distillation, precisions and attention."""
    classes, tokens = "sequence-classification", "token-classification"
    packed, padded, plain = {}, {"attention": "sdpa"}, {"precision": "fp32", "attention": "sdpa"}
    drawn = [
        ("bert-base-uncased", classes, 32, 256, 4.0, "logits", packed),
        ("bert-base-uncased", classes, 32, 256, 4.0, "logits", padded),
        ("bert-base-uncased", classes, 32, 128, 6.0, "hidden", plain),
        ("roberta-base", tokens, 16, 384, 5.0, "hidden", padded),
        ("modernbert-base", classes, 16, 512, 6.0, "logits", packed),
        ("bert-large-uncased", classes, 64, 128, 11.17, "logits", padded),
    ]
    made = [
        {"model": m, "task": t, "batch": b, "seq": s, "memory_gib": g, "distill": d, "answers": answers, "fixed": fixed}
        for m, t, b, s, g, d, fixed in drawn
        for answers in ("disk", "memory")
    ]
    relations = {"model": "bert-base-uncased", "task": classes, "batch": 32, "seq": 256, "memory_gib": 6.0}
    made.append({**relations, "distill": "relations", "answers": "memory", "fixed": padded})
    if quick:
        made = [c | {"model": "bert-mini", "batch": 8, "seq": 64, "memory_gib": 0.5, "fixed": plain} for c in made[:2]]
    return [{"name": f"{index:02}", **case} for index, case in enumerate(made)]


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet, or sum up; 0 where the bars are held."""
    options = _parse(arguments)
    if options.summary is not None:
        return report(forked.read_lines(options.summary, "name"))
    if options.page is not None:
        page, file = options.page
        pages.put(page, "benchmarks/distilled_memory.py", memory=table(forked.read_lines(file, "name")))
        return 0
    deadline = time.monotonic() + options.limit_s
    done = {line["name"] for line in forked.read_lines(options.out, "name") if "error" not in line}
    options.work.mkdir(parents=True, exist_ok=True)
    forked.import_all()
    cases = (
        (case, str(options.work), options.device)
        for case in all_cases(quick=options.quick)
        if case["name"] not in done and deadline - time.monotonic() > LEAST_S
    )
    runs = forked.in_children(
        run_case, cases, num_processes=options.processes, timeout_s=min(CASE_TIMEOUT_S, options.limit_s)
    )
    for (case, _, device), found in runs:
        line = {**case, "device": device, **found}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(_short(line), flush=True)
    return report(forked.read_lines(options.out, "name"))


def run_case(case: Case, work: str, device: str) -> dict[str, Any]:
    """Distil in this process: what the run took, and what its plan said."""
    import vramfit
    from vramfit.records.plan import Plan

    folder = Path(tempfile.mkdtemp(dir=work))
    longer = case["seq"] + soak_jobs.NUM_SPARE - 2  # special tokens: one before a text, one behind it
    job = {**case, "seq": longer, "lengths": "full", "seed": int(case["name"])}
    try:
        data = folder / soak_jobs.file_name(case["task"])
        soak_jobs.write_data(data, job, case["batch"] * NUM_STEPS)
        teacher = _teacher(Path(work), case)
        asked = {key: case[key] for key in ("task", "batch", "seq", "distill")} | case["fixed"]
        record = vramfit.distill(
            str(teacher),
            str(data),
            output=str(folder / "model"),
            memory=int(case["memory_gib"] * GIB),
            teacher_answers=case["answers"],
            max_steps=NUM_STEPS,
            device=device,
            **asked,
        )
        plan = Plan.load(folder / "model" / "plan.json")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "settings": {name: value for name, value in record.settings.items() if name != "held_teacher"},
        "predicted_allocated_bytes": plan.estimate.peak_allocated_bytes,
        "measured_allocated_bytes": record.measured_allocated_bytes,
        "promised_bytes": record.most_reserved_bytes,
        "measured_reserved_bytes": record.measured_reserved_bytes,
        "num_recoveries": record.num_recoveries,
        "num_retries": record.num_retries,
        "environment": {n: record.environment[n] for n in ("torch", "transformers", "gpu") if n in record.environment},
    }


def _teacher(work: Path, case: Case) -> Path:
    """A model with a head for the case's labels and random weights, written once for all cases that share it."""
    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.workload import Workload

    folder = work / f"{case['model']}-{case['task']}"
    with forked.GPU:
        if not (folder / "tokenizer.json").exists():
            names = ("0", "1") if case["task"] == "sequence-classification" else ("O", "B-a", "I-a")
            config = resolve(case["model"], task=case["task"], num_labels=len(names)).config
            config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
            resolved = resolve(config, task=case["task"], num_labels=len(names))
            sizes = {"mode": "infer", "batch": 1, "seq": 8, "num_labels": len(names)}
            asked = Workload(model=case["model"], task=case["task"], **sizes)
            model: Any = prepare(resolved, asked)
            model.save_pretrained(folder)
            soak_jobs.write_tokenizer(folder, resolved.config)
    return folder


def summarise(lines: list[Case]) -> dict[str, Any]:
    """The figures that the bars are about."""
    done = [line for line in lines if "error" not in line]
    errors = [_error(line) for line in done]
    return {
        "num_cases": len(lines),
        "num_failed": len(lines) - len(done),
        "num_exact": errors.count(0.0),
        "most_above": max(errors, default=0.0),
        "most_below": -min(errors, default=0.0),
        "above_the_promise": [
            x["name"] for x in done if x["measured_reserved_bytes"] > (x["promised_bytes"] or math.inf)
        ],
        "with_recoveries": [x["name"] for x in done if x["num_recoveries"]],
        "with_retries": [x["name"] for x in done if x["num_retries"]],
    }


def table(lines: list[Case]) -> str:
    """What was allocated, and by how much it had been predicted too high."""
    rows = []
    for line in sorted(lines, key=lambda line: line["name"]):
        settings = line["settings"]
        sizes = f"{settings['micro_batch']} × {settings['seq']}"
        allocated = f"{line['measured_allocated_bytes'] / 2**20:,.0f} MiB"
        how = [line["distill"], line["answers"], sizes, settings["precision"], settings["attention"]]
        rows.append([line["model"], *how, allocated, f"{_error(line):+.3%}"])
    head = ("teacher", "learned", "teacher's answers", "pass", "precision", "attention", "allocated")
    return pages.table((*head, "predicted"), rows)


def predicted_again(line: Case) -> int | None:
    """The peak that today's code predicts for a student of half the layers; None where its teacher was in memory."""
    import vramfit
    from vramfit.models.resolve import resolve

    if line["answers"] != "disk":
        return None
    config = resolve(line["model"], task=line["task"]).config
    config.num_hidden_layers //= 2
    config.num_labels = 2 if line["task"] == "sequence-classification" else 3
    kept = {name: value for name, value in line["settings"].items() if name != "held_teacher"}
    job = {"task": line["task"], "gpu": "h200", "torch_version": line["environment"]["torch"], "loop": "stepper"}
    peak: int = vramfit.estimate(config, allocator="expandable", **job, **kept).peak_allocated_bytes
    return peak


def report(lines: list[Case]) -> int:
    """Print every case and the summary; 1 where a bar was not held or nothing ran on a GPU."""
    for line in sorted(lines, key=lambda line: line["name"]):
        print(_short(line))
    found = summarise(lines)
    print(json.dumps(found, indent=1))
    is_held = not (found["num_failed"] or found["above_the_promise"] or found["with_recoveries"])
    is_held &= found["most_above"] <= MOST_ERROR and found["most_below"] <= 0
    if not all(line["device"].startswith("cuda") for line in lines):
        print("no GPU ran these: they show that the script works, and nothing about a card")
    return int(not (is_held and lines))


def _error(line: Case) -> float:
    """By what share the prediction is above what was allocated."""
    return float(line["predicted_allocated_bytes"] / line["measured_allocated_bytes"] - 1)


def _short(line: Case) -> str:
    about = f"{line['name']} {line['model']} {line['task']} {line['distill']} teacher's answers: {line['answers']}"
    if "error" in line:
        return f"{about}: {line['error'][-300:]}"
    gib = line["measured_allocated_bytes"] / GIB
    return f"{about}: {gib:.3f} GiB allocated, predicted {_error(line):+.3%}; {line['num_recoveries']} recoveries"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("distilled.jsonl"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vramfit-distilled")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=3, help="cases at a time")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no case begins later")
    parser.add_argument("--quick", action="store_true", help="tiny models, for a rehearsal")
    parser.add_argument("--page", type=Path, nargs=2, metavar=("PAGE", "FILE"), help="write a page's table and end")
    parser.add_argument("--summary", type=Path, help="sum up a file of outcomes and end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
