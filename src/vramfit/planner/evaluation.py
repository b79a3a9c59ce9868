"""The evaluation batch: the largest that fits beside the training state, in a process that has trained."""

from dataclasses import replace
from typing import Any

from vramfit.estimator.evaluation import after_recorded, estimate_evaluation, evaluation_stream
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.traced import TracedWorkload
from vramfit.estimator.weighing import peak_requested, weigh
from vramfit.planner.bench import ANY_BATCH, PROBED_PASSES, Bench
from vramfit.planner.search import Choice
from vramfit.records.estimate import Estimate
from vramfit.settings import SETTINGS
from vramfit.tasks import find_task

MAX_TIMES = 4
"""No more than so many times the training batch: beyond that, nothing is gained."""
MAX_BATCH = 256


def choose_evaluation(bench: Bench, choice: Choice, limit_bytes: int) -> Estimate:
    """The estimate of the evaluation batch: a power of two, and the largest that fits."""
    traced, target = resolve_workload(bench.model, _keywords(bench, choice))
    traced = TracedWorkload(traced.workload, traced.resolved, traced.profile)  # layers that wait do so here too
    passes = min(bench.passes(choice.micro_batch), PROBED_PASSES)
    recipe = replace(choice.recipe, graphs=False)  # recorded passes are let go of before
    training, _ = bench.two_steps(recipe, choice.micro_batch)
    if choice.recipe.graphs:
        training = after_recorded(training, traced.profile)
    limit_bytes -= bench.traced(recipe, passes).template(ANY_BATCH).gathered_peak_bytes
    sizes = [2**i for i in range(9) if 2**i <= min(MAX_BATCH, MAX_TIMES * bench.batch)]
    while len(sizes) > 1:
        stream = evaluation_stream(training, traced, sizes[-1])
        if peak_requested(stream) <= limit_bytes:
            bench.num_predicted += 1
            if weigh(stream, traced.options, None).safe_reserved_bytes <= limit_bytes:
                break
        sizes.pop()
    return estimate_evaluation(training, traced, target, sizes[-1])


def _keywords(bench: Bench, choice: Choice) -> dict[str, Any]:
    """What a forward pass has of a training step; adapters add less than one percent, and are left out."""
    given = {**bench.fixed, **choice.recipe.keywords()}
    kept = {name: value for name, value in given.items() if SETTINGS[name].in_inference}
    is_unpacked = find_task(bench.base.task).why_not_unpacked is None
    if kept.get("attention") == "packed" and (bench.request.pads_evaluation or not is_unpacked):
        kept["attention"] = "sdpa"
    if kept.get("offload") in ("optimizer", "activations"):
        del kept["offload"]
    return {**kept, "mode": "infer", "batch": 1, "trust_remote_code": bench.request.trust_remote_code}
