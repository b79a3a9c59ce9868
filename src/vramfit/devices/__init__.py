"""GPUs: a catalogue of those that exist, the cloud instances that hold them, a probe of those present."""

from vramfit.devices.catalogue import (
    DEFAULT_ARCHITECTURE,
    GPU,
    Instance,
    all_gpus,
    all_instances,
    find_gpu,
    find_instance,
    match_gpu,
)
from vramfit.devices.probe import GPUProcess, PresentGPU, probe

__all__ = [
    "DEFAULT_ARCHITECTURE",
    "GPU",
    "GPUProcess",
    "Instance",
    "PresentGPU",
    "all_gpus",
    "all_instances",
    "find_gpu",
    "find_instance",
    "match_gpu",
    "probe",
]
