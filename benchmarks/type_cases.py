"""Does the prediction hold for types of models nobody looked at? Cases over all types with a classification head.

    python benchmarks/type_cases.py --list                            # the cases that the seed draws
    python benchmarks/type_cases.py --out types.jsonl --limit-s 200   # on a GPU; goes on where it stopped
    python benchmarks/type_cases.py --summary types.jsonl             # what came out, beside the bars
    python benchmarks/type_cases.py --again types.jsonl --out again.jsonl     # the same runs, predicted by today's code
    python benchmarks/type_cases.py --page docs/decoders.md types_33.jsonl types_34.jsonl

Every type is built as `coverage.py` builds it, from its default configuration with two layers. A case is predicted and
then run for real, in a process of its own, several at a time, since PyTorch counts memory per process. One line of JSON
a case is added as it ends: the prediction is written beside the measurement, as it was made before it.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pages
from case_comparison import FIGURES, STEPS, is_exact, is_under, summarize
from coverage import all_types, is_estimated, make_config

KNOWN = Path(__file__).parent / "results" / "coverage_cpu_2026-11-18.jsonl"
SEED, COUNT = 33, 120
TASK = "sequence-classification"
PRECISIONS = {
    "train": ("fp32", "tf32", "amp-fp16", "amp-bf16", "bf16"),
    "infer": ("fp32", "tf32", "amp-fp16", "bf16", "fp16"),
}
BATCHES, LENGTHS = (2, 3, 5, 8, 13, 16), (48, 64, 96, 128, 192, 256)
MASKS, OPTIMIZERS = ("none", "ones", "padded"), ("adamw", "adamw-fused", "sgd")
MOST_BYTES = 15 * 2**30
"""A case that is predicted to take more is left out: it would take the memory that the cases beside it need."""
LEAST_S, CASE_TIMEOUT_S = 20.0, 120.0
EXACT_SHARE, MOST_ERROR, MANY_CASES, MANY_TYPES = 0.75, 0.01, 80, 45
"""The bars: cases that are exact to the byte, the worst error, and what was to be run."""

Case = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet, or sum up; 0 where the bars are held."""
    options = _parse(arguments)
    if options.summary is not None:
        return report(forked.read_lines(options.summary, "name"))
    if options.page is not None:
        page, *files = options.page
        pages.put(page, "benchmarks/type_cases.py", types=table([forked.read_lines(file, "name") for file in files]))
        return 0
    if options.again is not None:
        lines = [predicted_again(line, options.gpu) for line in forked.read_lines(options.again, "name")]
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return report(lines)
    cases = draw_cases(options.seed, options.count)
    if options.list:
        print("\n".join(json.dumps(case) for case in cases))
        return 0
    run_cases(cases, options)
    return report(forked.read_lines(options.out, "name"))


def draw_cases(seed: int, count: int) -> list[Case]:
    """So many cases; types come in shuffled rounds, and the first cases are the same whatever the count."""
    draw, deck, cases = random.Random(seed), [], []
    types = sorted(line["type"] for line in forked.read_lines(KNOWN, "type") if is_estimated(line))
    while len(cases) < count:
        deck = deck or draw.sample(types, len(types))
        mode = draw.choices(("train", "infer"), (2, 1))[0]
        case: Case = {
            "name": f"{seed}-{len(cases):03}",
            "type": deck.pop(),
            "mode": mode,
            "batch": draw.choice(BATCHES),
            "seq": draw.choice(LENGTHS),
            "precision": draw.choice(PRECISIONS[mode]),
            "mask": draw.choice(MASKS),
        }
        optimizer = draw.choice(OPTIMIZERS)
        cases.append(case | ({"optimizer": optimizer} if mode == "train" else {}))
    return cases


def run_cases(cases: list[Case], options: argparse.Namespace) -> None:
    """Run what the file does not hold yet, until the time is over."""
    deadline = time.monotonic() + options.limit_s
    forked.import_all()
    known = set(all_types())
    done = {line["name"] for line in forked.read_lines(options.out, "name") if "error" not in line}
    waiting = [case for case in cases if case["name"] not in done]
    print(f"{len(cases)} cases, {len(cases) - len(waiting)} done before", flush=True)

    def begun() -> Iterator[tuple[Case, str]]:
        for case in waiting:
            if deadline - time.monotonic() > LEAST_S:
                yield case, options.gpu

    runs = forked.in_children(
        run_case, begun(), num_processes=options.processes, timeout_s=min(CASE_TIMEOUT_S, options.limit_s)
    )
    for (case, _), found in runs:
        line = case | ({"not_run": "this transformers has no such type"} if case["type"] not in known else found)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(_short(line), flush=True)


def run_case(case: Case, gpu: str) -> dict[str, Any]:
    """The prediction of a case and then its measurement; or why there is none."""
    from vramfit.errors import VramfitError
    from vramfit.records.codec import to_data
    from vramfit.records.measurement import compare
    from vramfit.runtime.measurement import run_workload

    try:
        config = make_config(case["type"])
    except Exception as error:  # what the installed release makes of a default is its own matter
        return {"not_run": f"{type(error).__name__}: {error}"[:300]}
    try:
        predicted = predict(config, case, gpu)
    except VramfitError as error:
        return {"not_run": f"{type(error).__name__}: {error}"[:300]}
    if predicted.safe_reserved_bytes > MOST_BYTES:
        return {"not_run": f"predicted to reserve {predicted.safe_reserved_bytes:,} bytes"}
    measured = run_workload(predicted.workload, model=config)
    phases = compare(predicted, measured)
    return {
        "differences": [to_data(d) for d in phases.differences if d.phase in STEPS],
        "safe_reserved_bytes": predicted.safe_reserved_bytes,
        "out_of_memory": measured.out_of_memory,
        "not_run": None,
        **forked.head(),
    }


def predict(config: Any, case: Case, gpu: str, **versions: str) -> Any:
    """The estimate of a case."""
    import vramfit

    asked = {key: case[key] for key in ("mode", "batch", "seq", "precision", "mask", "optimizer") if key in case}
    return vramfit.estimate(config, task=TASK, gpu=gpu, **asked, **versions)


def predicted_again(line: Case, gpu: str) -> Case:
    """A case that was run, with the prediction that today's code makes for the same torch.

    The installed transformers must be the one of the run: types change between releases.
    """
    import transformers

    if not line.get("differences"):
        return line
    if transformers.__version__ != line["transformers"]:
        raise SystemExit(f"the run had transformers {line['transformers']}, here is {transformers.__version__}")
    predicted = predict(make_config(line["type"]), line, gpu, torch_version=line["torch"])
    found = []
    for was in line["differences"]:
        now = getattr(predicted.phases[was["phase"]], f"peak_{was['figure']}_bytes")
        error_bytes = now - was["measured_bytes"]
        error = error_bytes / was["measured_bytes"]
        found.append(was | {"predicted_bytes": now, "error_bytes": error_bytes, "error": error})
    return line | {"differences": found, "safe_reserved_bytes": predicted.safe_reserved_bytes}


def table(files: list[list[Case]]) -> str:
    """A row for each seed: what came out of predictions that were made before the runs."""
    rows = []
    for lines in files:
        found = summarise(lines)
        exact = (f"{found[key]:.0%}" for key in ("exact_share_requested", "exact_share"))
        below = f"{len(found['under'])}, by at most {lowest(lines):.2%}" if found["under"] else "none"
        beyond = max(most(x, "reserved") / x["safe_reserved_bytes"] - 1 for x in lines if x.get("differences"))
        above = f"{len(found['reserved_above_the_bound'])}, by at most {beyond:.2%}" if beyond > 0 else "none"
        seed = lines[0]["name"].partition("-")[0]
        rows.append([seed, found["num_cases"], *exact, f"{found['worst_error']:.2%}", below, above])
    head = ("seed", "types, a case each", "requested, exact", "allocated, exact", "allocated, worst error", "too low")
    return pages.table((*head, "reserved above the bound"), rows)


def lowest(lines: list[Case]) -> float:
    """By what share the prediction of an allocated peak is too low at the worst."""
    errors = [d["error"] for line in lines for d in line.get("differences") or () if d["figure"] == "allocated"]
    return -min(errors, default=0.0)


def report(lines: list[Case]) -> int:
    """Print the summary and every case that is not exact; 1 where a bar was not held."""
    found = summarise(lines)
    for line in sorted(lines, key=worst, reverse=True):
        if (line.get("differences") and worst(line)) or "error" in line or line.get("not_run"):
            print(_short(line))
    print(json.dumps(found, indent=1))
    missed = misses(found)
    print("\n".join(missed) if missed else "all bars are held")
    return int(bool(missed))


def summarise(lines: list[Case]) -> dict[str, Any]:
    """Shares of exact cases, the worst errors, and which were too low."""
    ran = [line for line in lines if line.get("differences")]
    above = [x["name"] for x in ran if most(x, "reserved") > x["safe_reserved_bytes"]]
    return {
        "num_cases": len(ran),
        "num_types": len({line["type"] for line in ran}),
        "not_run": {line["name"]: line["not_run"] for line in lines if line.get("not_run")},
        "failed": [line["name"] for line in lines if "error" in line],
        "exact_share": sum(is_exact(x, "allocated") for x in ran) / len(ran) if ran else None,
        "exact_share_requested": sum(is_exact(x, "requested") for x in ran) / len(ran) if ran else None,
        "worst_error": max((worst(line) for line in ran), default=None),
        "under": [line["name"] for line in ran if is_under(line, "allocated")],
        "reserved_above_the_bound": above,
        **{k: v for k, v in summarize([{**x, "not_run": None} for x in ran]).items() if "reserved" in k},
    }


def misses(found: dict[str, Any]) -> list[str]:
    """The bars that were not held, in words."""
    said = {
        f"{found['num_cases']} cases over {found['num_types']} types": (
            found["num_cases"] < MANY_CASES or found["num_types"] < MANY_TYPES
        ),
        f"exact in {found['exact_share'] or 0:.0%}": (found["exact_share"] or 0) < EXACT_SHARE,
        f"worst error {found['worst_error'] or math.inf:.2%}": (found["worst_error"] or 0) > MOST_ERROR,
        f"{len(found['under'])} predictions are too low": found["under"],
        f"{len(found['reserved_above_the_bound'])} reserved more than the bound": found["reserved_above_the_bound"],
    }
    return [words for words, is_missed in said.items() if is_missed]


def worst(line: Case) -> float:
    """The largest error of allocated peaks, as a share."""
    return max((abs(d["error"]) for d in line.get("differences", ()) if d["figure"] == "allocated"), default=0.0)


def most(line: Case, figure: str) -> int:
    """The highest measured peak."""
    return max(d["measured_bytes"] for d in line["differences"] if d["figure"] == figure)


def _short(line: Case) -> str:
    job = " ".join(str(line[k]) for k in ("name", "type", "mode", "batch", "seq", "precision", "mask"))
    if not line.get("differences"):
        return f"{job}: {str(line.get('not_run') or line.get('error') or line.get('out_of_memory'))[-300:]}"
    found = {f: [d["error_bytes"] for d in line["differences"] if d["figure"] == f] for f in ("requested", *FIGURES)}
    return f"{job}: {worst(line):.3%} {found}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=Path("type_cases.jsonl"))
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--again", type=Path, help="a file of outcomes to predict again, into --out")
    parser.add_argument("--page", type=Path, nargs="+", metavar="PAGE FILE", help="write a page's table")
    parser.add_argument("--summary", type=Path, help="sum up a file of outcomes and end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
