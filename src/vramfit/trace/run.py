"""`trace`: a model and a workload → the template of its request stream."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.cuda.autocast import Autocast
from vramfit.cuda.dialect import Dialect
from vramfit.cuda.profile import CudaProfile
from vramfit.models.build import build_meta
from vramfit.models.resolve import ResolvedModel
from vramfit.step.inputs import Batch, make_batch
from vramfit.step.plain import forward_step, train_step
from vramfit.techniques import checkpointing, freezing, optimizers, precision
from vramfit.trace.affine import PROBE_BATCH
from vramfit.trace.places import Places
from vramfit.trace.stand_ins import autocast_context, stand_ins
from vramfit.trace.template import StreamTemplate
from vramfit.trace.tracer import Tracer
from vramfit.workload import Workload

TRACED_MICRO_BATCHES = 2
"""The first makes the gradients, the second adds to them; any further one repeats the second."""
STEPS = ("first", "steady")


def trace(
    resolved: ResolvedModel, workload: Workload, profile: CudaProfile, *, batch: int | None = None
) -> StreamTemplate:
    """The template of a workload's stream.

    Args:
        batch: trace at this real micro-batch only; None traces once for every micro-batch from 2 on.

    Raises:
        TraceError: the model's forward depends on data.
        WorkloadError: a technique that the model does not have.
    """
    model = prepare(resolved, workload)
    with tracing(model, workload, profile, probe=PROBE_BATCH if batch is None else None) as session:
        session.tracer.begin("inputs", "inputs")
        inputs = make_batch(
            model, workload.task, workload.mode, workload.mask, batch or PROBE_BATCH, workload.seq, "meta"
        )
        steps = _train_steps if workload.trains else _forward_steps
        steps(session, model, workload, inputs)
    return session.tracer.template


def prepare(resolved: ResolvedModel, workload: Workload) -> torch.nn.Module:
    """The model with its techniques applied, on the meta device."""
    model = build_meta(resolved, attention=workload.attention)
    precision.apply(model, workload.precision)
    model.train(workload.mode != "infer" and workload.dropout)
    if workload.mode != "infer":
        checkpointing.apply(model, workload.checkpointing)
    freezing.apply(model, workload.freeze)
    return model


@dataclass(frozen=True, slots=True)
class Session:
    """A trace in progress: what happens on meta tensors while it is open is written down."""

    tracer: Tracer
    autocast: Callable[[], AbstractContextManager[Any]]


@contextmanager
def tracing(
    model: torch.nn.Module, workload: Workload, profile: CudaProfile, *, probe: int | None
) -> Iterator[Session]:
    """Load a model and open a session on it; any loop may run inside."""
    places = Places(model)
    template = StreamTemplate(profile=profile, probe=probe)
    tracer = Tracer(template, places, mask_has_padding=workload.mask == "padded")
    autocast = Autocast(precision.autocast_dtype(workload.precision))
    context = autocast_context(autocast)
    with ExitStack() as stack:
        stack.enter_context(stand_ins(model, autocast))
        stack.enter_context(places)
        _load(tracer, model)
        stack.enter_context(tracer)
        stack.enter_context(Dialect(profile, autocast))
        yield Session(tracer, lambda: context("cuda"))


def _load(tracer: Tracer, model: torch.nn.Module) -> None:
    """Weights come to the device as `Module.to` brings them: children first, then own parameters and buffers."""
    tracer.begin("load", "load")

    def bring(module: torch.nn.Module, path: str) -> None:
        for name, child in module.named_children():
            bring(child, f"{path}.{name}" if path else name)
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                tracer.hold(tensor, "parameter", path)

    bring(model, "")
    tracer.notice("model_loaded")


def _train_steps(session: Session, model: torch.nn.Module, workload: Workload, inputs: Batch) -> None:
    optimizer = optimizers.make(workload.optimizer, model.parameters())
    scaler = torch.amp.GradScaler("meta") if precision.needs_scaler(workload.precision) else None
    assert workload.accumulate is not None
    batches = [inputs] * min(workload.accumulate, TRACED_MICRO_BATCHES)
    for step in STEPS:

        def on_part(part: str, index: int, step: str = step) -> None:
            session.tracer.begin(f"{step}.optimizer" if part == "optimizer" else f"{step}.micro{index}", part)

        train_step(
            model,
            optimizer,
            batches,
            autocast=session.autocast,
            scaler=scaler,
            max_grad_norm=workload.max_grad_norm,
            on_part=on_part,
        )
        session.tracer.places.clear()
    session.tracer.begin("end", "end")  # before the optimizer goes


def _forward_steps(session: Session, model: torch.nn.Module, workload: Workload, inputs: Batch) -> None:
    for step in STEPS:

        def on_part(part: str, index: int, step: str = step) -> None:
            session.tracer.begin(f"{step}.micro{index}", part)

        forward_step(model, inputs, grad=workload.mode == "forward", autocast=session.autocast, on_part=on_part)
        session.tracer.places.clear()
    session.tracer.begin("end", "end")


def order_of(workload: Workload, num_steady: int = 1) -> list[tuple[str, str | None]]:
    """The segments of a run in order, with the phases they begin."""
    order: list[tuple[str, str | None]] = [("load", "load"), ("inputs", None)]
    for index in range(1 + num_steady):
        step = STEPS[min(index, 1)]
        phase = "first_step" if index == 0 else "steady_step" if index == 1 else f"steady_step_{index}"
        order.append((f"{step}.micro0", phase))
        if workload.trains:
            order += [(f"{step}.micro1", None)] * ((workload.accumulate or 1) - 1)
            order.append((f"{step}.optimizer", None))
    return order
