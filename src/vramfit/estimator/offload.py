"""How many layers stay on the device, so that weights and activations together fit."""

from dataclasses import replace

from vramfit.errors import WorkloadError
from vramfit.estimator.peak import peak_requested
from vramfit.estimator.target import Target
from vramfit.estimator.traced import TracedWorkload
from vramfit.models.anatomy import encoder_layers
from vramfit.models.build import build_meta
from vramfit.techniques import offloading, precision, quantization

SPARE = 50
"""One part in fifty of the capacity is left to rounding and fragmentation."""


def settle_offload(traced: TracedWorkload, target: Target) -> TracedWorkload:
    """The workload with as many resident layers as its capacity allows; none without a capacity.

    Raises:
        WorkloadError: offload in a mode that keeps weights for later.
        NoPlanFits: not even without any resident layer.
    """
    if traced.workload.mode != "infer":
        raise WorkloadError(["offload weights is for mode infer: offloaded weights do not learn"])
    if target.capacity_bytes is None or traced.workload.micro_batch is None:
        return traced
    model = build_meta(traced.resolved, attention=traced.workload.attention)
    precision.apply(model, traced.workload.precision)
    quantization.apply(model, traced.workload.quantize)
    layers = [offloading.device_bytes([*layer.parameters()]) for layer in encoder_layers(model)]
    total = offloading.model_bytes(model)
    least = total - sum(layers) + min(offloading.NUM_SLOTS, len(layers)) * max(layers, default=0)
    besides = peak_requested(traced.stream(traced.workload.micro_batch)) - least
    budget = target.capacity_bytes - max(besides, 0) - target.capacity_bytes // SPARE
    return replace(traced, num_resident=offloading.choose_resident(total, layers, max(budget, 0)))
