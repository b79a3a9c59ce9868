"""`measure`: a workload run for real on this machine's GPU, in a fresh process, with its peaks read phase by phase.

The process is this module run as a script: a `Workload` as JSON on its input, a `Measurement` as the last line
of its output. It runs the very techniques and the very step that a prediction traces.
"""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from vramfit.errors import VramfitError, WorkloadError
from vramfit.models.anatomy import max_positions, vocab_size
from vramfit.models.build import build_for
from vramfit.models.resolve import ResolvedModel, resolve
from vramfit.monitor.sources import present_gpu, process_bytes, read_counts, read_peaks, restart_peaks
from vramfit.records.codec import RecordError, from_json, to_json
from vramfit.records.measurement import Measurement, PhaseMeasurement
from vramfit.settings import conflicts
from vramfit.step.plain import Batch, forward_step, make_batch, train_step, write_tokens
from vramfit.step.recovery import is_out_of_memory
from vramfit.techniques.application import ALLOCATOR_VARIABLES, apply, make_optimizer
from vramfit.workload import Workload

INITIAL_SCALE = 1024.0
"""GradScaler's own 65536 overflows a random model: its first step is skipped and makes no optimizer state."""
DRAWING = ("kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_uniform_")
"""The functions of `torch.nn.init` that take long on a CPU."""


def check(resolved: ResolvedModel, workload: Workload) -> None:
    """Refuse what cannot be run, before anything is loaded.

    Raises:
        WorkloadError: a technique that the runtime does not have yet, or what the model has not.
    """
    w, longest = workload, max_positions(resolved.config) if resolved.config is not None else None
    asked = {
        "attention packed cannot be measured yet": w.is_packed,
        "offload cannot be measured yet": w.offloads,
        "compile cannot be measured yet": w.is_compiled,
        "num_gpus above 1 cannot be measured yet": w.num_gpus > 1,
        "loop stepper cannot be measured yet": w.loop != "plain",
        f"seq {w.seq} is beyond the {longest} positions of {resolved.name}: take {longest} or fewer": (
            longest is not None and w.seq > longest
        ),
    }
    problems = [problem for problem, is_asked in asked.items() if is_asked]
    if problems:
        raise WorkloadError(problems)
    build_for(resolved, w)  # cheap, and says what is wrong with the model


def prepare(resolved: ResolvedModel, workload: Workload) -> torch.nn.Module:
    """The model on the CPU with small random weights and its techniques, in the order a prediction applies them."""
    model = _build(resolved, workload)
    apply(model, workload)
    return model


def _build(resolved: ResolvedModel, workload: Workload) -> torch.nn.Module:
    """The model as a prediction builds it; weights are not drawn, which is slow: memory does not depend on values."""
    if resolved.module is not None:
        return copy.deepcopy(resolved.module)
    from transformers import PreTrainedModel

    undrawn: dict[str, Any] = dict.fromkeys(DRAWING, lambda tensor, *_, **__: tensor)
    skipped = patch.object(PreTrainedModel, "initialize_weights", lambda self: None, create=True)
    with patch.multiple(torch.nn.init, **undrawn), skipped:
        model = build_for(resolved, workload, on_meta=False)
    _write_weights(model)
    return model


@torch.no_grad()
def _write_weights(model: torch.nn.Module) -> None:
    """Matrices small and random, norms one, biases zero: losses and gradients stay finite."""
    pool = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        flat = parameter.view(-1)
        num_whole = flat.numel() // pool.numel() * pool.numel()
        flat[:num_whole].view(-1, pool.numel()).copy_(pool)
        flat[num_whole:].copy_(pool[: flat.numel() - num_whole])


def draw_tokens(batch: Batch, model: torch.nn.Module) -> None:
    """Ids as a tokenizer gives them, special ones left out; in place, so that nothing more is requested."""
    words = vocab_size(model) or 2
    ids = batch["input_ids"]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(min(1000, words // 2), words, ids.shape, generator=generator)
    mask = batch.get("attention_mask")
    write_tokens(drawn, None if mask is None else mask.cpu(), getattr(model, "config", None))
    ids.copy_(drawn)


def make_step(model: torch.nn.Module, workload: Workload, batch: Batch) -> Callable[[], None]:
    """The plain step of a workload, ready to be called again and again."""
    w, dtype = workload, workload.autocast_dtype

    def autocast() -> AbstractContextManager[Any]:
        return nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)

    if not w.trains:
        return lambda: forward_step(model, batch, grad=w.mode == "forward", autocast=autocast)
    optimizer = make_optimizer(model, w)
    scaler = torch.amp.GradScaler("cuda", INITIAL_SCALE) if w.scales_loss else None
    batches = [batch] * w.num_passes
    return lambda: train_step(
        model, optimizer, batches, autocast=autocast, scaler=scaler, max_grad_norm=w.max_grad_norm
    )


DEVICE = torch.device("cuda", 0)
DEFAULT_STEPS = 3
"""The second step is the first with optimizer state; the third shows that nothing grows any more."""
DROPPED_VARIABLES = (
    *ALLOCATOR_VARIABLES,
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""They change what is allocated, and a workload does not speak of them."""
EXPANDABLE = "expandable_segments:True"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class MeasurementError(VramfitError):
    """A workload that could not be run here; running out of memory is no error but a result."""


def measure(
    workload: Workload, *, num_steps: int = DEFAULT_STEPS, timeout_s: float = 600.0, run: Run = subprocess.run
) -> Measurement:
    """Run a workload for real on the first GPU, in a process of its own.

    Args:
        workload: what to run; `gpu` and `torch_version` are a prediction's, and do not matter here.
        num_steps: steps, or forward passes.
        timeout_s: the process is ended after this.
        run: what starts the process, as `subprocess.run` does.

    Raises:
        WorkloadError: what cannot be run, or the model has not.
        MeasurementError: no CUDA device, a crash, or no end in time.
    """
    command = [sys.executable, "-m", "vramfit.runtime.measurement", str(num_steps)]
    text = to_json(workload, indent=None)
    try:
        done = run(command, input=text, capture_output=True, text=True, env=_environment(workload), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            f"{workload.model} did not finish {num_steps} steps in {timeout_s:.0f} s",
            hint="take a smaller batch, or fewer steps",
        ) from None
    return _read(done)


def run_workload(workload: Workload, num_steps: int = DEFAULT_STEPS, model: Any = None) -> Measurement:
    """Run a workload on the first GPU in this process, which should have done nothing on the GPU before.

    Args:
        workload: what to run.
        num_steps: steps, or forward passes.
        model: a configuration or a module, where the workload only names it.

    Raises:
        WorkloadError: what the runtime cannot do, or the model has not.
        MeasurementError: no CUDA device, or an allocator that was not set up before torch started.
    """
    if num_steps < 1:
        raise WorkloadError([f"{num_steps} steps: at least one has to be run"])
    resolved = resolve(workload.model if model is None else model, task=workload.task, num_labels=workload.num_labels)
    check(resolved, workload)
    _check_cuda(workload)
    run, message = _Run(resolved, workload), None
    try:
        run.go(num_steps)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = " ".join(str(error).split())
    return run.measurement(message)


@dataclass
class _Run:
    """One run, and the peaks of what it has finished."""

    resolved: ResolvedModel
    workload: Workload
    phases: dict[str, PhaseMeasurement] = field(default_factory=dict)
    steps: list[PhaseMeasurement] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    most_reserved_bytes: int = 0

    def go(self, num_steps: int) -> None:
        """Load, bring the batch, and step; each phase is written down when it ends."""
        w = self.workload
        torch.set_float32_matmul_precision("high" if w.has_tf32 else "highest")
        restart_peaks(DEVICE)
        model = prepare(self.resolved, w)
        model.to(DEVICE)
        self.phases["load"] = self._peaks()
        assert w.micro_batch is not None
        batch = make_batch(model, w.task, w.mode, w.mask, w.micro_batch, w.seq, DEVICE)
        draw_tokens(batch, model)
        self.phases["inputs"] = self._peaks()
        step = make_step(model, w, batch)
        for index in range(num_steps):
            restart_peaks(DEVICE)
            began = time.perf_counter()
            step()
            self.steps.append(self._peaks())
            self.times_s.append(time.perf_counter() - began)
            self.phases["first_step" if index == 0 else "steady_step"] = _highest(self.steps[1:] or self.steps)

    def _peaks(self) -> PhaseMeasurement:
        peaks = read_peaks(DEVICE)
        self.most_reserved_bytes = max(self.most_reserved_bytes, peaks.peak_reserved_bytes)
        return replace(peaks, peak_reserved_bytes=self.most_reserved_bytes)

    def measurement(self, out_of_memory: str | None) -> Measurement:
        import transformers

        properties = torch.cuda.get_device_properties(DEVICE)
        counts, gpu = read_counts(DEVICE), present_gpu(DEVICE)
        return Measurement(
            workload=self.workload,
            gpu=properties.name,
            compute_capability=(properties.major, properties.minor),
            total_memory_bytes=properties.total_memory,
            torch_version=str(torch.__version__),
            transformers_version=transformers.__version__,
            driver_version=gpu.driver_version if gpu else None,
            phases=self.phases,
            steps=tuple(self.steps),
            step_times_s=tuple(self.times_s),
            num_retries=counts.num_retries,
            num_ooms=counts.num_ooms,
            reserved_bytes=counts.reserved_bytes,
            process_bytes=process_bytes(gpu),
            out_of_memory=out_of_memory,
        )


def _highest(steps: list[PhaseMeasurement]) -> PhaseMeasurement:
    """Each figure at its highest."""
    return PhaseMeasurement(
        peak_requested_bytes=max(step.peak_requested_bytes for step in steps),
        peak_allocated_bytes=max(step.peak_allocated_bytes for step in steps),
        peak_reserved_bytes=max(step.peak_reserved_bytes for step in steps),
    )


def _check_cuda(workload: Workload) -> None:
    """A GPU is there, it has what the workload asks for, and the allocator is as the workload wants it."""
    if not torch.cuda.is_available():
        built = (
            f"torch {torch.__version__} sees none" if torch.version.cuda else f"torch {torch.__version__} is for CPU"
        )
        raise MeasurementError(
            f"no CUDA device: {built}",
            hint="run it on a machine with an NVIDIA GPU; `vramfit estimate` predicts without one",
        )
    expandable = any(EXPANDABLE in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    if expandable != (workload.has_expandable_segments):
        raise MeasurementError(
            f"allocator {workload.allocator}: torch was started with another one",
            hint=f"start Python with{'out' if expandable else ''} PYTORCH_ALLOC_CONF={EXPANDABLE}",
        )
    properties = torch.cuda.get_device_properties(DEVICE)
    problems = conflicts(workload, (properties.major, properties.minor), properties.name)
    if problems:
        raise WorkloadError(problems)
    if workload.memory is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, workload.memory / properties.total_memory), DEVICE)


def _environment(workload: Workload) -> dict[str, str]:
    """This process's environment, less what changes memory, with the allocator that the workload asks for."""
    environment = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
    if workload.has_expandable_segments:
        environment |= dict.fromkeys(ALLOCATOR_VARIABLES, EXPANDABLE)
    return environment


def _read(done: "subprocess.CompletedProcess[str]") -> Measurement:
    """The measurement that the process left, or the error it ended with."""
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
        if isinstance(answer, dict) and "error" in answer:
            raise _told(answer)
        if done.returncode == 0 and lines:
            return from_json(Measurement, lines[-1])
    except (json.JSONDecodeError, RecordError):
        pass
    last = " | ".join(done.stderr.strip().splitlines()[-3:])[-400:] or "it said nothing"
    raise MeasurementError(
        f"the measuring process ended with code {done.returncode}: {last}",
        hint="code -9 is host memory running out; else report it: this is a bug in vramfit",
    )


def _told(answer: dict[str, Any]) -> VramfitError:
    """The error that the process wrote, as the kind it was."""
    if answer.get("exit_code") == WorkloadError.exit_code:
        return WorkloadError([answer["error"]], hint=answer.get("hint"))
    return MeasurementError(answer["error"], hint=answer.get("hint"))


def main() -> int:
    """The process that measures: a workload on stdin → a measurement on stdout, or the error as JSON."""
    try:
        workload = from_json(Workload, sys.stdin.read())
        line, code = to_json(run_workload(workload, int(sys.argv[1])), indent=None), 0
    except VramfitError as error:
        code = error.exit_code
        line = json.dumps({"error": str(error), "hint": error.hint, "exit_code": code})
    sys.stdout.write(f"\n{line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
