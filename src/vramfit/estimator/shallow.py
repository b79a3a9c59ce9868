"""Workloads cut down to few of their layers: traced in a tenth of the time, they take part of what all layers take."""

import copy
from dataclasses import replace

from vramfit.errors import VramfitError
from vramfit.estimator.traced import TracedWorkload
from vramfit.estimator.weighing import peaks_of_parts
from vramfit.models.resolve import ResolvedModel
from vramfit.settings import SETTINGS

WORTHWHILE_LAYERS = 10
"""With fewer, a trace of the whole model is as quick."""
LEAST_LAYERS = 2
"""Layers that wait in host memory come to two slots: from two on, more of them take no more of the device."""


def num_layers_of(resolved: ResolvedModel) -> int:
    """Layers by the configuration; 0 where it does not say."""
    return getattr(resolved.config, "num_hidden_layers", None) or 0


def with_few_layers(traced: TracedWorkload, num_layers: int) -> TracedWorkload:
    """The same workload of a model with so many layers."""
    config = copy.deepcopy(traced.resolved.config)
    config.num_hidden_layers = num_layers
    return replace(traced, resolved=replace(traced.resolved, config=config))


def least_peaks(traced: TracedWorkload, micro_batch: int, traced_at: int) -> dict[str, int]:
    """Part of the run → what live requests add up to at least; empty where only a trace of all layers would say.

    Every layer adds weights, gradients, state and what is kept for backward, and none takes anything away: two layers
    ask for no more than all of them.

    Args:
        micro_batch: samples of a pass.
        traced_at: a micro-batch whose trace serves it.
    """
    workload, resolved = traced.workload, traced.resolved
    if resolved.module is not None or workload.num_gpus > 1 or num_layers_of(resolved) < WORTHWHILE_LAYERS:
        return {}
    try:
        workload = replace(workload, **{s.keyword: s.in_few_layers(workload) for s in SETTINGS.values()})
        few = with_few_layers(replace(traced, workload=workload), LEAST_LAYERS)
        template = few.trace(None if traced_at > 1 else 1)
    except (VramfitError, AttributeError, LookupError):
        return {}
    return peaks_of_parts(template.instantiate(micro_batch, few.order(1, micro_batch)))
