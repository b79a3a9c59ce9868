"""What a load was asked for, checked as a workload is, before anything heavy is imported."""

from dataclasses import dataclass
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.units import plain, shown
from vramfit.workload import Workload, switched

FROM_PLAN = ("task", "precision", "quantize", "attention", "num_labels", "memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """One load: the model, how its weights are to lie, and where."""

    model: Any
    """A folder, a hub id, a catalogue name; a configuration where weights are to be random."""
    workload: Workload
    """Task, precision, quantize, attention, num_labels and memory (of the weights), checked; its batch means
    nothing here."""
    device: str
    random_weights: bool
    trust_remote_code: bool
    seed: int = 0
    """Of weights that no checkpoint holds."""

    @property
    def offloads(self) -> bool:
        """Whether layers that do not fit may stay on the host."""
        return self.workload.offload == "weights"


def make_request(
    model: Any,
    *,
    plan: Any = None,
    device: str = "cuda",
    random_weights: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    **keywords: Any,
) -> LoadRequest:
    """A request from keywords; a plan's workload decides what it speaks of.

    Raises:
        WorkloadError: a bad seed or value, with the nearest; an offload that is no load's.
    """
    problems = switched("random_weights", random_weights) + switched("trust_remote_code", trust_remote_code)
    if plan is not None and not isinstance(getattr(plan, "workload", None), Workload):
        problems.append(f"plan {shown(plan)} is not a Plan, as vramfit.plan gives it")
    if problems:
        raise WorkloadError(problems)
    if plan is not None:
        keywords |= {name: getattr(plan.workload, name) for name in FROM_PLAN}
        keywords["offload"] = None
        if plan.workload.offload == "weights" and plan.workload.trains:  # `offloading.apply` takes it from there
            device, keywords["memory"] = "cpu", None
        elif plan.workload.offload == "weights":  # the plan's memory is for activations too
            keywords["offload"], keywords["memory"] = "weights", plan.estimate.breakdown["weights"]
    if isinstance(keywords.get("offload"), str) and keywords["offload"] == "activations":
        raise WorkloadError(["offload activations is for training; a load offers offload weights"])
    name = model if isinstance(model, str) else "" if model is None else str(model)[:200]
    workload = Workload.from_keywords(model=name, mode="infer", **keywords)
    seed = plain(seed)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise WorkloadError([f"seed {shown(seed)} is not a whole number from 0"])
    return LoadRequest(
        model=model,
        workload=workload,
        device=str(device),
        random_weights=random_weights,
        trust_remote_code=trust_remote_code,
        seed=seed,
    )
