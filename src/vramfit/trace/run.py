"""`trace`: a model and a workload → the template of its request stream."""

from contextlib import AbstractContextManager, ExitStack
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


def trace(
    resolved: ResolvedModel, workload: Workload, profile: CudaProfile, *, batch: int | None = None
) -> StreamTemplate:
    """The template of a workload's stream.

    Args:
        batch: trace at this real micro-batch only; None traces once for every micro-batch from 2 on.
    """
    model = prepare(resolved, workload)
    template = StreamTemplate(profile=profile, probe=PROBE_BATCH if batch is None else None)
    places = Places(model)
    tracer = Tracer(template, places, mask_has_padding=workload.mask == "padded")
    autocast = Autocast(precision.autocast_dtype(workload.precision))
    with ExitStack() as stack:
        stack.enter_context(stand_ins(autocast))
        stack.enter_context(places)
        _load(tracer, model)
        stack.enter_context(tracer)
        stack.enter_context(Dialect(profile, autocast))
        _Run(tracer, model, workload, autocast, batch or PROBE_BATCH).steps()
    return template


def prepare(resolved: ResolvedModel, workload: Workload) -> torch.nn.Module:
    """The model with its techniques applied, on the meta device."""
    model = build_meta(resolved, attention=workload.attention)
    precision.apply(model, workload.precision)
    model.train(workload.mode != "infer" and workload.dropout)
    if workload.mode != "infer":
        checkpointing.apply(model, workload.checkpointing)
    freezing.apply(model, workload.freeze)
    return model


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


class _Run:
    """The steps of a run, each written to its own segment."""

    def __init__(
        self, tracer: Tracer, model: torch.nn.Module, workload: Workload, autocast: Autocast, batch: int
    ) -> None:
        self._tracer = tracer
        self._model = model
        self._workload = workload
        self._batch = batch
        self._step = ""
        self._context = autocast_context(autocast)

    def steps(self) -> None:
        """First step and steady step, with the inputs before them."""
        w, tracer = self._workload, self._tracer
        tracer.begin("inputs", "inputs")
        inputs = make_batch(w.task, w.mode, w.mask, self._batch, w.seq, "meta")
        if w.trains:
            self._train(inputs)
            return
        for name in ("first", "steady"):
            self._step = name
            forward_step(self._model, inputs, grad=w.mode == "forward", autocast=self._autocast, on_part=self._on_part)
            tracer.places.clear()
        tracer.begin("end", "end")

    def _train(self, inputs: Batch) -> None:
        w, tracer = self._workload, self._tracer
        optimizer = optimizers.make(w.optimizer, self._model.parameters())
        scaler = torch.amp.GradScaler("meta") if precision.needs_scaler(w.precision) else None
        assert w.accumulate is not None
        batches = [inputs] * min(w.accumulate, TRACED_MICRO_BATCHES)
        for name in ("first", "steady"):
            self._step = name
            train_step(
                self._model,
                optimizer,
                batches,
                autocast=self._autocast,
                scaler=scaler,
                max_grad_norm=w.max_grad_norm,
                on_part=self._on_part,
            )
            tracer.places.clear()
        tracer.begin("end", "end")

    def _autocast(self) -> AbstractContextManager[Any]:
        return self._context("cuda")  # type: ignore[no-any-return]

    def _on_part(self, part: str, index: int) -> None:
        segment = f"{self._step}.optimizer" if part == "optimizer" else f"{self._step}.micro{index}"
        self._tracer.begin(segment, part)


def order_of(workload: Workload, num_steady: int = 1) -> list[tuple[str, str | None]]:
    """The segments of a run in order, with the phases they begin."""
    order: list[tuple[str, str | None]] = [("load", "load"), ("inputs", None)]
    for index in range(1 + num_steady):
        step = "first" if index == 0 else "steady"
        phase = "first_step" if index == 0 else "steady_step" if index == 1 else f"steady_step_{index}"
        order.append((f"{step}.micro0", phase))
        if workload.trains:
            order += [(f"{step}.micro1", None)] * ((workload.accumulate or 1) - 1)
            order.append((f"{step}.optimizer", None))
    return order
