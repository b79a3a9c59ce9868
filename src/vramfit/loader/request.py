"""What a load was asked for, checked as a workload is, before anything heavy is imported."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramfit.errors import WorkloadError
from vramfit.settings import having
from vramfit.units import plain, shown
from vramfit.workload import Workload, switched

if TYPE_CHECKING:
    import torch

FROM_PLAN = tuple(name for name in having(at_load=True) if name not in ("model", "offload"))
OPTIONS = {"device": "cuda", "random_weights": False, "trust_remote_code": False, "seed": 0}
"""What a load is asked for beside a workload, and the defaults."""
KEYWORDS = (*FROM_PLAN, "offload", *OPTIONS)
"""All that `load` takes."""


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
        return self.workload.offloads_layers


def make_request(model: Any, *, plan: Any = None, **keywords: Any) -> LoadRequest:
    """A request from the keywords of `load` and of `Workload`; a plan's workload decides what it speaks of.

    Raises:
        WorkloadError: a bad seed or value, with the nearest; an offload that is no load's.
    """
    options = {name: keywords.pop(name, default) for name, default in OPTIONS.items()}
    problems = [
        problem for name in ("random_weights", "trust_remote_code") for problem in switched(name, options[name])
    ]
    if plan is not None and not isinstance(getattr(plan, "workload", None), Workload):
        problems.append(f"plan {shown(plan)} is not a Plan, as vramfit.plan gives it")
    if problems:
        raise WorkloadError(problems)
    if plan is not None:
        keywords |= {name: getattr(plan.workload, name) for name in FROM_PLAN}
        keywords["offload"] = None
        if plan.workload.offloads_layers and plan.workload.trains:  # `offloading.apply` takes it from there
            options["device"], keywords["memory"] = "cpu", None
        elif plan.workload.offloads_layers:  # the plan's memory is for activations too
            keywords["offload"], keywords["memory"] = "weights", plan.estimate.breakdown["weights"]
    if isinstance(keywords.get("offload"), str) and keywords["offload"] == "activations":
        raise WorkloadError(["offload activations is for training; a load offers offload weights"])
    name = model if isinstance(model, str) else "" if model is None else str(model)[:200]
    workload = Workload.from_keywords(model=name, mode="infer", **keywords)
    seed = plain(options["seed"])
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise WorkloadError([f"seed {shown(seed)} is not a whole number from 0"])
    return LoadRequest(model=model, workload=workload, **options | {"seed": seed, "device": str(options["device"])})


def find_device(name: str, *others: str) -> "torch.device":
    """The device of torch that `cuda`, `cuda:N` or `cpu` names, a GPU by its number.

    Args:
        others: further names that the caller takes, for the error.

    Raises:
        WorkloadError: no such device, or none here.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise WorkloadError([f"device {name!r} is not one of {', '.join(('cuda', 'cuda:N', 'cpu', *others))}"])
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        emulated = ", or emulated with a memory" if "emulated" in others else ""
        raise WorkloadError(
            [f"device {name}: this machine has {count} CUDA devices"], hint=f"take device cpu{emulated}"
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
