"""Cloud instances on which a job fits: a plan for each kind of GPU that a provider has."""

from collections.abc import Callable, Mapping
from typing import Any

from vramfit.devices.catalogue import GPU, Instance, all_instances, find_gpu
from vramfit.errors import NoPlanFits, VramfitError
from vramfit.estimator.target import OLDEST_CAPABILITY
from vramfit.estimator.traced import collection_paused
from vramfit.planner.alternatives import words_of
from vramfit.planner.bench import Bench
from vramfit.planner.plan import find
from vramfit.planner.request import Request
from vramfit.records.plan import InstanceFit

OnGPU = Callable[[str, int, int], None]


def fit_instances(
    model: Any,
    provider: str = "sagemaker",
    on_gpu: OnGPU = lambda name, done, total: None,
    **keywords: Any,
) -> list[InstanceFit]:
    """The instances of a provider, those on which the job fits first, smallest GPU first.

    Instances whose GPU the current torch no longer runs on are left out.

    Args:
        model, **keywords: as for `plan`; `gpu` and `memory` are not used.
        on_gpu: told before each GPU: its name, how many are done, how many there are.

    Raises:
        WorkloadError: as for `plan`.
    """
    instances = [i for i in all_instances() if i.provider == provider]
    gpus = {i.gpu: find_gpu(i.gpu) for i in instances}
    able = {name: gpu for name, gpu in gpus.items() if gpu.compute_capability >= OLDEST_CAPABILITY}
    given = {k: v for k, v in keywords.items() if k not in ("gpu", "memory")}
    found: dict[str, InstanceFit] = {}
    for done, (name, gpu) in enumerate(sorted(able.items(), key=lambda item: item[1].total_memory_bytes)):
        on_gpu(name, done, len(able))
        found[name] = _fit(model, gpu, given)
    made = [_of(instance, found[instance.gpu]) for instance in instances if instance.gpu in found]
    return sorted(made, key=lambda fit: (not fit.fits, fit.budget_bytes, fit.num_gpus))


def smallest_instance(
    model: Any, provider: str = "sagemaker", larger_than: str | None = None, **keywords: Any
) -> InstanceFit | None:
    """The instance with the smallest GPU on which the job fits; None where there is none.

    Args:
        model, **keywords: as for `plan`; `gpu` and `memory` are not used.
        larger_than: a GPU of the catalogue; only those with more memory are looked at.
    """
    instances = [i for i in all_instances() if i.provider == provider]
    least_bytes = find_gpu(larger_than).total_memory_bytes if larger_than is not None else 0
    gpus = {find_gpu(i.gpu) for i in instances}
    given = {k: v for k, v in keywords.items() if k not in ("gpu", "memory")}
    for gpu in sorted(gpus, key=lambda gpu: gpu.total_memory_bytes):
        if gpu.total_memory_bytes <= least_bytes or gpu.compute_capability < OLDEST_CAPABILITY:
            continue
        fit = _fit(model, gpu, given)
        if fit.fits:
            mine = [i for i in instances if i.gpu == gpu.name]
            return _of(min(mine, key=lambda i: (i.num_gpus, i.host_memory_bytes or 0)), fit)
    return None


def _of(instance: Instance, fit: InstanceFit) -> InstanceFit:
    return InstanceFit(
        instance=instance.name,
        gpu=fit.gpu,
        num_gpus=instance.num_gpus,
        budget_bytes=fit.budget_bytes,
        fits=fit.fits,
        settings=fit.settings,
        micro_batch=fit.micro_batch,
        accumulate=fit.accumulate,
        step_time_s=fit.step_time_s,
        safe_reserved_bytes=fit.safe_reserved_bytes,
    )


def _fit(model: Any, gpu: GPU, keywords: Mapping[str, Any]) -> InstanceFit:
    """The plan for one GPU, as far as an overview needs it."""
    budget_bytes = gpu.total_memory_bytes
    try:
        with collection_paused():
            bench = Bench(model, Request.of({**keywords, "gpu": gpu.name}))
            budget_bytes = bench.budget_bytes
            found = find(bench, None)
    except NoPlanFits:
        found = None
    except VramfitError as error:
        return InstanceFit(
            instance="", gpu=gpu.name, num_gpus=1, budget_bytes=budget_bytes, fits=False, settings=str(error)
        )
    if found is None:
        return InstanceFit(
            instance="", gpu=gpu.name, num_gpus=1, budget_bytes=budget_bytes, fits=False, settings="too little memory"
        )
    choice = found.choice
    return InstanceFit(
        instance="",
        gpu=gpu.name,
        num_gpus=1,
        budget_bytes=budget_bytes,
        fits=True,
        settings=words_of(bench, choice),
        micro_batch=choice.micro_batch,
        accumulate=bench.passes(choice.micro_batch),
        step_time_s=choice.step_time_s,
        safe_reserved_bytes=found.estimate.safe_reserved_bytes,
    )
