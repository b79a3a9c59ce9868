"""Do plans hold? Jobs drawn at random over models, tasks, techniques, budgets and data, each trained for real.

    python benchmarks/soak.py --list                                  # the jobs that the seed draws
    python benchmarks/soak.py --out soak_h200.jsonl --hours 8         # on a GPU; goes on where it stopped
    python benchmarks/soak.py --quick --device emulated --count 4     # a rehearsal without a GPU: tiny models
    python benchmarks/soak.py --out soak_h200.jsonl --processes 14    # all of them, for memory; times do not count
    python benchmarks/soak.py --out soak_times.jsonl --count 100 --alone --processes 4      # and some for their times
    python benchmarks/soak.py --summary soak_h200.jsonl soak_times.jsonl           # what came out, beside the bars

Every job is `vramfit train` in a process of its own: it plans for the lengths of its data and takes `NUM_STEPS` steps.
One line of JSON a job is added as it ends; jobs that are there are not run again, but for those that failed. Written
down are memory that ran out, allocator retries, the reserved peak beside what was promised, and the median step beside
the predicted one. With `--alone`, jobs plan side by side, and each has the GPU alone once it is planned. A job that has
no plan, or that contradicts itself, is a line too.

This script has not been run on a GPU yet. On the emulated GPU it shows that it works, and nothing about a card.
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import forked
from soak_jobs import NUM_STEPS, Job, draw_jobs, file_name, write_data, write_model

SEED, COUNT = 36, 400
CASE_TIMEOUT_S = 900
KEPT = ("vramfit", "torch", "transformers", "gpu")
"""Of the environment of a run."""
GIB = 2**30
MODELS = multiprocessing.get_context("fork").Lock()
MOST_RETRIES, MOST_TIME_ERROR, MOST_TIMES = 0.01, 0.08, 1.5
"""The bars: shares of runs with a retry, the median error of step times, and how far off one may be unwarned."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet, or sum up; 0 where the bars are held."""
    options = _parse(arguments)
    if options.summary is not None:
        return report([line for file in options.summary for line in forked.read_lines(file, "name")])
    jobs = draw_jobs(options.seed, options.count, quick=options.quick)
    if options.list:
        print("\n".join(json.dumps(job) for job in jobs))
        return 0
    run_jobs(jobs, options)
    return report(forked.read_lines(options.out, "name"))


def run_jobs(jobs: list[Job], options: argparse.Namespace) -> None:
    """Run the jobs that the file has no outcome of, until the time is over."""
    lines = {line["name"]: line for line in forked.read_lines(options.out, "name")}
    waiting = [job for job in jobs if lines.get(job["name"], {}).get("status", "error") == "error"]
    print(f"{len(jobs)} jobs, {len(jobs) - len(waiting)} done before", flush=True)
    deadline = time.monotonic() + 3600 * options.hours
    options.work.mkdir(parents=True, exist_ok=True)
    forked.import_all()
    alone = options.alone or options.processes == 1
    cases = ((job, str(options.work), options.device, alone) for job in waiting if time.monotonic() < deadline)
    for case, outcome in forked.in_children(
        run_job, cases, num_processes=options.processes, timeout_s=min(CASE_TIMEOUT_S, 3600 * options.hours)
    ):
        line = {**case[0], "device": options.device, "status": "error", **outcome, "had_the_gpu_alone": alone}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(_short(line), flush=True)


def run_job(job: Job, work: str, device: str, alone: bool = True) -> dict[str, Any]:
    """Plan and train one job in this process, alone on the GPU once it is planned: what it took, what was promised."""
    from vramfit.errors import NoPlanFits, VramfitError
    from vramfit.records.plan import Plan
    from vramfit.runtime.training import events
    from vramfit.runtime.training.request import TrainRequest
    from vramfit.runtime.training.train import train

    model, output = Path(work) / "models" / job["model"], Path(tempfile.mkdtemp(dir=work))
    with MODELS:  # one process writes a model, others find it
        write_model(model, job["model"])
    data = output / file_name(job["task"])
    write_data(data, job, job["batch"] * NUM_STEPS)
    times: list[float] = []
    begun: list[Any] = []
    kept = ExitStack()

    def listen(event: events.Event) -> None:
        if alone and not begun and isinstance(event, events.Loading | events.Started):  # the plan is made
            begun.append(kept.enter_context(forked.GPU))
        if isinstance(event, events.Stepped):
            times.append(time.perf_counter())

    try:
        request = TrainRequest(
            model=str(model),
            data=str(data),
            output=str(output / "model"),
            task=job["task"],
            batch=job["batch"],
            seq=job["seq"],
            memory=int(job["memory_gib"] * GIB),
            device=device,
            max_steps=NUM_STEPS,
            **job["fixed"],
        )
        record = train(request, on_event=listen)
        plan = Plan.load(output / "model" / "plan.json")
    except NoPlanFits as error:
        return {"status": "no plan", "why": _said(error, model)}
    except VramfitError as error:
        is_memory = type(error).__name__ in ("RecoveryExhausted", "BudgetExceeded")
        return {"status": "out of memory" if is_memory else "refused", "why": _said(error, model)}
    finally:
        kept.close()
        shutil.rmtree(output, ignore_errors=True)
    steps = [after - before for before, after in pairwise(times)]
    return {
        "status": "done",
        "settings": dict(record.settings),
        "num_recoveries": record.num_recoveries,
        "num_retries": record.num_retries,
        "budget_bytes": record.budget_bytes,
        "predicted_reserved_bytes": record.predicted_reserved_bytes,
        "promised_bytes": record.most_reserved_bytes,
        "measured_reserved_bytes": record.measured_reserved_bytes,
        "measured_allocated_bytes": record.measured_allocated_bytes,
        "predicted_step_s": record.predicted_step_time_s,
        "step_s": median(steps[len(steps) // 2 :]) if steps else None,
        "warnings": [*plan.notes, *record.notes, plan.margin_reason],
        "environment": {name: record.environment[name] for name in KEPT if name in record.environment},
    }


def _said(error: Exception, model: Path) -> str:
    """What an error says, without the folder of this machine."""
    return str(error).replace(str(model), model.name)[:300]


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the bars are about."""
    ran = [line for line in lines if line["status"] in ("done", "out of memory")]
    done = [line for line in ran if line["status"] == "done"]
    timed = [x for x in done if x["predicted_step_s"] and x["step_s"] and x.get("had_the_gpu_alone", True)]
    times = {line["name"]: line["step_s"] / line["predicted_step_s"] for line in timed}
    above = [
        line["name"]
        for line in done
        if line["promised_bytes"] is not None and line["measured_reserved_bytes"] > line["promised_bytes"]
    ]
    far = [name for name, ratio in times.items() if max(ratio, 1 / ratio) > MOST_TIMES]
    warned = {line["name"] for line in timed if any(_warns_of_time(text) for text in line["warnings"])}
    return {
        "num_jobs": len(lines),
        "by_status": {s: sum(x["status"] == s for x in lines) for s in sorted({x["status"] for x in lines})},
        "num_run": len(ran),
        "ran_out": [x["name"] for x in ran if x["status"] == "out of memory" or x["num_recoveries"]],
        "with_retries": [x["name"] for x in done if x["num_retries"]],
        "above_the_promise": above,
        "num_timed": len(times),
        "median_time_error": median(abs(ratio - 1) for ratio in times.values()) if times else None,
        "far_off_without_a_warning": [name for name in far if name not in warned],
    }


def _warns_of_time(text: str) -> bool:
    """Whether a note says that steps may take longer than predicted."""
    return any(word in text for word in ("slow", "memory was short", "only ", "takes longer"))


def misses(summary: dict[str, Any]) -> list[str]:
    """The bars that were not held, in words."""
    found = {
        f"{len(summary['ran_out'])} runs ran out of memory": summary["ran_out"],
        f"{len(summary['with_retries'])} runs with an allocator retry": (
            len(summary["with_retries"]) > MOST_RETRIES * summary["num_run"]
        ),
        f"{len(summary['above_the_promise'])} runs reserved more than promised": summary["above_the_promise"],
        f"the median step time is off by {summary['median_time_error'] or 0:.1%}": (
            (summary["median_time_error"] or 0) > MOST_TIME_ERROR
        ),
        f"{len(summary['far_off_without_a_warning'])} step times are far off without a warning": (
            summary["far_off_without_a_warning"]
        ),
    }
    return [words for words, is_missed in found.items() if is_missed]


def report(lines: list[dict[str, Any]]) -> int:
    """Print the summary; 1 where a bar was not held, or nothing ran."""
    summary = summarise(lines)
    print(json.dumps(summary, indent=1))
    missed = misses(summary)
    if any(not line["device"].startswith("cuda") for line in lines):
        print("no GPU ran these: they show that the script works, and nothing about a card")
        return int(bool(summary["by_status"].get("error")))
    missed += [] if summary["num_timed"] else ["no step time was compared"]
    print("\n".join(missed) if missed else f"all bars are held by {summary['num_run']} runs")
    return int(bool(missed))


def _short(line: dict[str, Any]) -> str:
    job = f"{line['name']} {line['model']} {line['task']} {line['batch']} × {line['seq']} in {line['memory_gib']} GiB"
    if line["status"] != "done":
        return f"{job}: {line['status']}: {str(line.get('why') or line.get('error'))[-160:]}"
    reserved, promised = line["measured_reserved_bytes"], line["promised_bytes"] or line["budget_bytes"]
    return f"{job}: reserved {reserved / GIB:.3f} of {promised / GIB:.3f} GiB, {line['num_retries']} retries"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vramfit-soak")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--processes", type=int, default=1, help="jobs at a time; step times count only alone")
    parser.add_argument("--quick", action="store_true", help="tiny models, for a rehearsal")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    parser.add_argument("--alone", action="store_true", help="jobs plan side by side, and have the GPU one by one")
    parser.add_argument("--summary", type=Path, nargs="+", help="sum up files of outcomes and end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
