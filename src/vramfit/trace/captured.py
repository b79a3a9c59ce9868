"""What a run holds so that its passes can be captured as CUDA graphs."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.cuda.profile import CudaProfile
from vramfit.step.step import Step
from vramfit.trace.template import STEPS, Notice
from vramfit.trace.tracer import Tracer

RECORDING_STREAM = 8
"""Passes are captured on a stream of their own."""
NUM_THREADS = 2
"""Of a pass: forward runs in one, backward in another, each with workspaces of its own."""


def hold_for_graphs(tracer: Tracer, step: Step) -> list[torch.Tensor]:
    """Before passes are recorded, what the first step left in the cache is given back.

    Gradients stay in their places from now on, and the stream that passes are recorded on has workspaces.
    """
    tracer.begin("graphs", "backward")
    tracer.template.recorded = f"{STEPS[1]}.micro"
    tracer.template.segments["graphs"].append(Notice("empty_cache", ""))
    made = []
    for size in recording_workspaces(tracer.template.profile):
        with _disable_current_modes():
            made.append(torch.empty(size, dtype=torch.uint8, device="meta"))
        tracer.hold(made[-1], "cublas_workspace", cuda_stream=RECORDING_STREAM)
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    step.keeps_gradients = True
    return made


def recording_workspaces(profile: CudaProfile) -> tuple[int, ...]:
    """What cuBLAS keeps for the stream that passes are recorded on, whether or not any is recorded at the moment."""
    return (profile.cublas_workspace_bytes, profile.cublaslt_workspace_bytes) * NUM_THREADS
