"""From a model and keywords to a workload that can be predicted; every problem at once."""

from dataclasses import replace
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.estimator.offload import settle_offload
from vramfit.estimator.target import Target, target_of
from vramfit.estimator.traced import TracedWorkload
from vramfit.models.anatomy import max_positions
from vramfit.models.resolve import ResolvedModel, resolve
from vramfit.models.tasks import default_attention, supported_attention
from vramfit.settings import conflicts
from vramfit.tasks import find_task
from vramfit.techniques.packed_attention import takes_heads
from vramfit.workload import CHOICES, Workload, switched


def resolve_workload(model: Any, keywords: dict[str, Any]) -> tuple[TracedWorkload, Target]:
    """A workload checked against its model and its GPU.

    Args:
        model: a name, a folder, a hub id, a configuration or an `nn.Module`.
        keywords: fields of `Workload`, and `trust_remote_code`.

    Raises:
        WorkloadError: everything that does not go together.
        UnknownModel, UnknownGPU: no such name.
    """
    trust = keywords.get("trust_remote_code", False)
    if problems := switched("trust_remote_code", trust):
        raise WorkloadError(problems)
    given = {name: value for name, value in keywords.items() if name != "trust_remote_code"}
    name = model if isinstance(model, str) and model else type(model).__name__
    workload = Workload.from_keywords(model=name, **given)
    resolved = resolve(model, task=workload.task, num_labels=workload.num_labels, trust_remote_code=trust)
    problems = _beyond_the_model(workload, resolved)
    target = _target(workload, problems)
    if target is None or problems:
        raise WorkloadError(problems)
    workload = replace(
        workload,
        model=resolved.name,
        task=resolved.task,
        attention=workload.attention or _own_attention(resolved),
    )
    traced = TracedWorkload(workload, resolved, target.profile)
    waits = workload.offload == "weights" and not workload.trains  # in training, all layers do
    return (settle_offload(traced, target) if waits else traced), target


def _target(workload: Workload, problems: list[str]) -> Target | None:
    """Where the workload is to run; what it asks of a GPU that does not have it is added to the problems."""
    try:
        target = target_of(workload)
    except WorkloadError as error:
        problems += error.problems
        return None
    name = "the GPU" if target.gpu is None else target.gpu.name
    problems += conflicts(workload, target.profile.compute_capability, name)
    return target


def _own_attention(resolved: ResolvedModel) -> Any:
    """The kernel a model takes when none is asked for; a module that was given has one already."""
    if resolved.module is None:
        return default_attention(resolved.model_class)
    chosen = getattr(resolved.config, "_attn_implementation", None)
    return chosen if chosen in CHOICES["attention"] else None


def _beyond_the_model(workload: Workload, resolved: ResolvedModel) -> list[str]:
    """What the workload asks of this model that it does not have."""
    why_no_loss = find_task(workload.task).why_no_loss
    problems = [why_no_loss] if why_no_loss and workload.trains and resolved.module is None else []
    longest = max_positions(resolved.config) if resolved.config is not None else None
    if longest is not None and workload.seq > longest:
        problems.append(
            f"seq {workload.seq} is beyond the {longest} positions of {resolved.name}: take {longest} or fewer"
        )
    supported = supported_attention(resolved.model_class)
    if workload.attention in ("sdpa", "eager") and workload.attention not in supported:
        has = ", ".join(a for a in supported if a in ("sdpa", "eager"))
        problems.append(f"{resolved.name} has no attention {workload.attention} (it has {has})")
    if workload.attention == "packed" and not takes_heads(resolved.config):
        problems.append(
            f"attention packed: the flash kernel takes heads of 8, 16, … 256, and {resolved.name} has others"
        )
    return problems
