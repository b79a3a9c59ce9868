"""How good is the step-time model, and how much of that is fitting? In-sample and held-out figures.

    python benchmarks/step_time_fit.py [--halves 10] [--output benchmarks/results/step_time_fit_DATE.json]

Fits the seven constants of `timing/speed.py` to the 75 workloads timed on an H200 and six large jobs, then fits them
to random halves of the 75 and judges each fit by the other half. `random_cases` are a third set, on which the share
of an optimizer's own operators was looked at (`light_share`) and nothing else; they ran several at a time on one GPU,
three steps each, so their times are rough. `brute_force` is a fourth, to which nothing was fitted: settings of one
model under memory caps, on another day.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.truth.step_times import median_error, rank_correlation, relative_errors, timed_cases, traced_work  # noqa: E402

from vramfit.devices.catalogue import find_gpu  # noqa: E402
from vramfit.errors import VramfitError  # noqa: E402
from vramfit.records.stream import Work  # noqa: E402
from vramfit.timing.model import step_seconds  # noqa: E402
from vramfit.timing.speed import DeviceSpeed, Efficiency, HostSpeed, catalogue_speed  # noqa: E402

START = {
    "operator_s": 10e-6,
    "step_s": 1e-3,
    "light_share": 1.0,
    "recompute_share": 1.0,
    "fp32_product": 0.9,
    "tensor_core_product": 0.9,
    "bandwidth": 0.9,
}
"""Every fitted constant, and where a fit begins: what one would guess who has seen no measurement."""
FITTED = tuple(START)
HOST = {f.name for f in fields(HostSpeed)}
SMOOTH = 0.05
"""Errors well below this count as squares: measured times are not surer than that."""
NUM_ROUNDS = 22
H200 = find_gpu("h200")
LARGE_JOBS = (
    ("bert-base-uncased", 64, "fp32", "eager", "none", "adamw", 0.4621),
    ("bert-large-uncased", 32, "fp32", "eager", "none", "adamw", 0.7631),
    ("bert-base-uncased", 64, "amp-bf16", "sdpa", "none", "adamw-fused", 0.0685),
    ("bert-large-uncased", 32, "amp-bf16", "sdpa", "none", "adamw-fused", 0.1039),
    ("bert-base-uncased", 128, "amp-bf16", "sdpa", "padded", "adamw-fused", 0.1341),
    ("bert-large-uncased", 64, "amp-bf16", "sdpa", "padded", "adamw-fused", 0.1963),
)
"""Model, batch, precision, attention, mask, optimizer, seconds: training at length 512 on an H200, torch 2.11, median
of eight steps. The GPU limits these, which it does in few of the 75."""


@dataclass(frozen=True)
class Sample:
    """A step's work and its measured time."""

    work: Work
    step_s: float


def speed_at(values: Sequence[float]) -> DeviceSpeed:
    """The H200 with other constants."""
    given = dict(zip(FITTED, values, strict=True))
    host = HostSpeed(**{k: v for k, v in given.items() if k in HOST})
    speed = catalogue_speed(H200, Efficiency(**{k: v for k, v in given.items() if k not in HOST}), host)
    assert speed is not None
    return speed


def shipped() -> list[float]:
    """The constants as they stand in the source."""
    return [getattr(HostSpeed() if name in HOST else Efficiency(), name) for name in FITTED]


def predict(values: Sequence[float], samples: Sequence[Sample]) -> list[float]:
    speed = speed_at(values)
    return [step_seconds(s.work, speed) for s in samples]


def loss(values: Sequence[float], samples: Sequence[Sample]) -> float:
    """Mean relative error, on a logarithmic scale, smooth near zero."""
    predicted = predict(values, samples)
    return mean(sqrt(log(p / s.step_s) ** 2 + SMOOTH**2) for p, s in zip(predicted, samples, strict=True))


def fit(samples: Sequence[Sample], num_rounds: int = NUM_ROUNDS) -> list[float]:
    """Each constant up or down, and all at once in random directions, by less and less."""
    chance = random.Random(0)
    values = list(START.values())
    best = loss(values, samples)
    for round_ in range(num_rounds):
        stride = 0.4 * 0.85**round_
        for i in range(2 * len(values)):
            one = [stride * (j == i) for j in range(len(values))]
            direction = one if any(one) else [stride * chance.gauss(0, 1) for _ in values]
            for sign in (1, -1):
                tried = [v * exp(sign * d) for v, d in zip(values, direction, strict=True)]
                found = loss(tried, samples)
                if found < best:
                    values, best = tried, found
                    break
    return values


def describe(name: str, values: Sequence[float], samples: Sequence[Sample]) -> None:
    predicted, measured = predict(values, samples), [s.step_s for s in samples]
    errors = sorted(relative_errors(predicted, measured))
    bias = median(log(p / m) for p, m in zip(predicted, measured, strict=True))
    print(
        f"{name:<34} n {len(samples):>3}  median error {100 * median(errors):5.1f} %  "
        f"4 of 5 within {100 * errors[int(0.8 * len(errors))]:5.1f} %  worst {100 * errors[-1]:5.1f} %  "
        f"bias {100 * bias:+5.1f} %  rank correlation {rank_correlation(predicted, measured):.3f}"
    )


def hold_out(samples: Sequence[Sample], always: Sequence[Sample], halves: int) -> float:
    """Fit to one half, judge by the other, both ways round; gives the mean of the median errors."""
    chance = random.Random(0)
    errors, correlations = [], []
    for _ in range(halves):
        order = list(samples)
        chance.shuffle(order)
        middle = len(order) // 2
        for learned, kept in ((order[:middle], order[middle:]), (order[middle:], order[:middle])):
            predicted, measured = predict(fit([*learned, *always]), kept), [s.step_s for s in kept]
            errors.append(median_error(predicted, measured))
            correlations.append(rank_correlation(predicted, measured))
    print(
        f"held out, {2 * halves} fits to random halves    median error {100 * mean(errors):.1f} % "
        f"(worst half {100 * max(errors):.1f} %)  rank correlation {mean(correlations):.3f} "
        f"(worst half {min(correlations):.3f})"
    )
    return mean(errors)


def random_cases() -> list[Sample]:
    """The newest run of `random_cases.py` on an H200."""
    newest = sorted((ROOT / "benchmarks" / "results").glob("random_cases_h200_*.json"))[-1]
    found = []
    for row in json.loads(newest.read_text())["cases"]:
        times = (row["measurement"] or {}).get("step_times_s", ())[1:]
        given = {k: v for k, v in row["workload"].items() if v is not None and k not in ("model", "micro_batch")}
        try:
            work = traced_work(row["workload"]["model"], **given, gpu="h200", torch_version="2.11")
        except VramfitError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        if times:
            found.append(Sample(work, min(times)))  # the second step often still loads kernels
    return found


def brute_force() -> list[Sample]:
    """What `brute_force.py` timed on an H200 with `Stepper`; torchao's 8-bit step, which is no more, left out."""
    newest = sorted((ROOT / "benchmarks" / "results").glob("brute_force_h200_*.jsonl"))[-1]
    found = []
    for line in map(json.loads, newest.read_text().splitlines()):
        if line["fits"] and line["optimizer"] == "adamw-fused":
            model, seq, _ = line["name"].split()
            settings = {name: line[name] for name in ("micro_batch", "precision", "optimizer", "checkpointing")}
            work = traced_work(
                model,
                batch=32,
                seq=int(seq),
                max_grad_norm=1.0,
                loop="stepper",
                gpu="h200",
                torch_version="2.11",
                **settings,
            )
            found.append(Sample(work, line["step_s"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--halves", type=int, default=10, help="random halvings of the 75 workloads")
    parser.add_argument("--output", type=Path, help="file for the figures of the README")
    options = parser.parse_args()
    timed = [Sample(c.work, c.step_s) for c in timed_cases()]
    large = [
        Sample(
            traced_work(model, batch=batch, seq=512, precision=p, attention=a, mask=m, optimizer=o, gpu="h200"), step_s
        )
        for model, batch, p, a, m, o, step_s in LARGE_JOBS
    ]
    rough = random_cases()
    values = fit([*timed, *large])
    print("constant              shipped     fitted anew")
    for name, now, anew in zip(FITTED, shipped(), values, strict=True):
        print(f"{name:<20} {now:>10.3g} {anew:>10.3g}")
    print(f"not fitted: attention {Efficiency().attention}, tensor_s {HostSpeed().tensor_s}\n")
    describe("75 timed workloads, shipped", shipped(), timed)
    describe("75 timed workloads, fitted anew", values, timed)
    describe("six large jobs, shipped", shipped(), large)
    describe("random cases (rough), shipped", shipped(), rough)
    describe("brute force, shipped", shipped(), brute_force())
    held_out = hold_out(timed, large, options.halves)
    if options.output is not None:
        figures = {
            "num_workloads": len(timed),
            "median_error": median_error(predict(shipped(), timed), [s.step_s for s in timed]),
            "num_halves": 2 * options.halves,
            "held_out_median_error": held_out,
        }
        options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
