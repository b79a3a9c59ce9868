"""`trace`: a model and a workload → the template of its request stream."""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.cuda.dialect import Autocast, Dialect, autocast_context, stand_ins
from vramfit.cuda.kernels.script import CudaProfile
from vramfit.errors import TraceError, VramfitError
from vramfit.models.anatomy import num_layer_applications
from vramfit.models.resolve import ResolvedModel
from vramfit.settings import seen_in_trace
from vramfit.stages import tell
from vramfit.step.own_loss import check_inputs, is_own, needs_its_labels, own_loss
from vramfit.step.plain import Batch, each_tensor, forward_step, make_batch, make_packed_batch, train_step
from vramfit.step.splitting import Alone
from vramfit.step.step import Step
from vramfit.tasks.parts.losses import CONTRACT, LABELS, HeadLoss, head_loss, parameters_of
from vramfit.techniques import offloading, optimizers, quantization
from vramfit.techniques.application import build_prepared
from vramfit.techniques.offloading.host_step import HostStep
from vramfit.techniques.offloading.layer_inputs import layer_inputs_of
from vramfit.trace.comparison import loss_of_step
from vramfit.trace.compiled import compiled_layers, hold_for_graphs
from vramfit.trace.ledger import Places
from vramfit.trace.replica import ReplicaOnPaper
from vramfit.trace.shard import ShardOnPaper
from vramfit.trace.template import FEWEST_SAMPLES, STEPS, StreamTemplate, num_traced
from vramfit.trace.tracer import Tracer
from vramfit.trace.unrolling import Unlike, Unrolling, unrolling_of
from vramfit.trace.values import give_inputs
from vramfit.trace.work import PROBE_BATCH
from vramfit.units import counted
from vramfit.workload import Workload

TEACHER = "teacher"
"""What the paths of a held teacher's modules begin with."""
TOKENS_HINT = (
    "what is predicted takes token ids, as input_ids, and may take attention_mask and labels; what any other module "
    "takes, `vramfit watch` shows while it runs"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a trace depends on besides a model, a workload and a GPU."""

    num_resident: int = 0
    """Layers that stay on the device where weights are offloaded."""
    num_sequences: int | None = None
    """Most sequences in a packed row; None: as many as a step has, since short ones may all go into one."""
    headrooms: tuple[int, int] = (0, 0)
    """Bytes that the optimizer can use in the first step and in later ones without raising the peak."""
    passes_only: bool = False
    """Trace the passes of a step alone, for the work they do."""


USUAL = Conditions()


@torch.inference_mode(False)  # gradients on, whatever the caller has switched off
def trace(
    resolved: ResolvedModel,
    workload: Workload,
    profile: CudaProfile,
    *,
    batch: int | None = None,
    conditions: Conditions = USUAL,
) -> StreamTemplate:
    """The template of a workload's stream.

    Args:
        batch: trace at this real micro-batch only; None traces once for every micro-batch from 2 on.

    Raises:
        TraceError: the model's forward depends on data.
        WorkloadError: a technique that the model does not have.
    """
    if workload.lengths is not None:
        batch = len(workload.lengths) // workload.texts_per_sample
    job = _Job(resolved, workload, profile, batch, conditions)
    try:
        return _trace(job, unrolls=True)
    except (Unlike, TraceError):  # what few layers do not show, or cannot run, a trace of all of them decides
        return _trace(job, unrolls=False)


class _Job(NamedTuple):
    resolved: ResolvedModel
    workload: Workload
    profile: CudaProfile
    batch: int | None
    conditions: Conditions


def _trace(job: _Job, *, unrolls: bool) -> StreamTemplate:
    resolved, workload, profile, batch, conditions = job
    tell("building the model without weights")
    model = prepare(resolved, workload, conditions.num_resident)
    num_layers = num_layer_applications(model)
    tell(f"tracing {counted(num_layers, 'layer')}" if num_layers else "tracing the model")
    with _worded(resolved.name):
        has_own_loss = not resolved.is_of_transformers and is_own(model)
        loss, with_labels = _own_loss(model, workload, profile) if has_own_loss else (None, workload.trains)
    with (
        _worded(resolved.name),
        tracing(
            model,
            workload,
            profile,
            unrolling=unrolling_of(model, resolved, workload) if unrolls else None,
            probe=PROBE_BATCH if batch is None else None,
            likeness=_likeness(resolved, workload, profile, conditions.num_resident),
            shares_calls=resolved.module is None and not workload.is_quantized,
        ) as session,
    ):
        session.tracer.begin("inputs", "inputs")
        with _disable_current_modes() if workload.num_gpus > 1 else nullcontext():  # a batch of all waits on the host
            inputs = _inputs(model, workload, batch or PROBE_BATCH, conditions.num_sequences, with_labels)
        give_inputs(session.tracer.values, model, workload, inputs)
        if not workload.trains:
            _forward_steps(session, model, workload, inputs)
        elif workload.loop == "plain":
            _train_steps(session, model, workload, inputs)
        else:
            if workload.is_joint:
                loss = loss or loss_of_step(model, workload, inputs, on_paper=conditions.passes_only)
            loss = loss or head_loss(model, inputs, workload.task)
            if conditions.passes_only:
                _stepper_passes(session, model, workload, inputs, loss)
            else:
                _stepper_steps(session, model, workload, inputs, conditions.headrooms, loss)
    if workload.offloads_inputs and (waiting := layer_inputs_of(model)) is not None:
        session.tracer.template.host_inputs = waiting.sizes
    return session.tracer.template


def _likeness(resolved: ResolvedModel, workload: Workload, profile: CudaProfile, num_resident: int) -> Hashable:
    """Models with the same one have the same layers, however many; None for a module, which may be unlike any other."""
    if resolved.module is not None or not workload.is_compiled:
        return None
    sizes = {k: v for k, v in resolved.config.to_dict().items() if k != "num_hidden_layers"}
    job = (seen_in_trace(workload, "layers"), profile, num_resident)
    return (json.dumps(sizes, sort_keys=True, default=str), resolved.model_class, *job)


def _own_loss(model: torch.nn.Module, workload: Workload, profile: CudaProfile) -> tuple[HeadLoss | None, bool]:
    """How the loss of a module of the user's is made, if it learns from labels; and whether it is given any.

    In a session of its own, whose stream nobody asks for: only there does all run that runs in a trace.
    """
    with tracing(model, replace(workload, compile=False), profile, probe=None) as session:
        session.tracer.begin("inputs", "inputs")
        inputs = _inputs(model, workload, FEWEST_SAMPLES, None, with_labels=True)
        check_inputs(model, inputs, "the batch of a prediction", TOKENS_HINT)
        if not LABELS & set(inputs):
            return None, False
        if not workload.trains:
            return None, needs_its_labels(model, inputs)
        return own_loss(model, inputs, autocast=session.autocast), True


def _inputs(model: torch.nn.Module, w: Workload, batch: int, num_sequences: int | None, with_labels: bool) -> Batch:
    mode = "train" if with_labels else w.mode
    if not w.is_packed:
        takes_mask = "attention_mask" in (parameters_of(model) or ("attention_mask",))
        rows = batch * w.texts_per_sample
        return make_batch(model, w.task, mode, w.mask if takes_mask else "none", rows, w.seq, "meta")
    if w.lengths is not None:
        return make_packed_batch(model, w.task, mode, sum(w.lengths), len(w.lengths), max(w.lengths), "meta")
    each = w.row_texts if w.runs_twice else w.num_passes * w.texts_per_sample
    most = num_sequences or batch * each
    return make_packed_batch(model, w.task, mode, batch * w.sample_tokens, most, w.seq, "meta")


@contextmanager
def _worded(name: str) -> Iterator[None]:
    """Whatever a model's own code raises on meta tensors, as one line."""
    try:
        yield
    except (VramfitError, Unlike):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise TraceError(
            f"{name} does not run on tensors without data: {type(error).__name__}: {text}",
            hint=f"it must not look at values; {CONTRACT}",
        ) from error


def prepare(resolved: ResolvedModel, workload: Workload, num_resident: int = 0) -> torch.nn.Module:
    """The model with its techniques applied, on the meta device."""
    model = build_prepared(resolved, workload)
    if workload.offloads_layers:
        offloading.apply(model, num_resident, "meta", trains=workload.trains)
    return model


@dataclass(frozen=True, slots=True)
class Session:
    """A trace in progress: what happens on meta tensors while it is open is written down."""

    tracer: Tracer
    autocast: Callable[[], AbstractContextManager[Any]]


@contextmanager
def tracing(
    model: torch.nn.Module,
    workload: Workload,
    profile: CudaProfile,
    *,
    probe: int | None,
    likeness: Hashable = None,
    shares_calls: bool = False,
    unrolling: Unrolling | None = None,
) -> Iterator[Session]:
    """Load a model and open a session on it; any loop may run inside.

    Args:
        likeness: see `compiled_layers`.
        shares_calls: see `Calls`.
    """
    teacher = _held_beside(model) if workload.holds_teacher else None
    places = Places(model) if teacher is None else Places(model, **{TEACHER: teacher})
    template = StreamTemplate(profile=profile, probe=probe)
    tracer = Tracer(template, places, shares_calls=shares_calls, unrolling=unrolling)
    autocast = Autocast(workload.autocast_dtype, keeps_copies=workload.keeps_casts)
    context = autocast_context(autocast)
    with ExitStack() as stack:
        stack.enter_context(stand_ins(model, autocast, *filter(None, [teacher])))
        stack.enter_context(places)
        _load(tracer, model, offloading.slots_of(model) if workload.offloads_layers else ())
        if teacher is not None:
            _load(tracer, teacher, (), TEACHER)
        stack.enter_context(tracer)
        stack.enter_context(Dialect(profile, autocast))
        if workload.is_compiled:
            stack.enter_context(compiled_layers(model, lambda: Dialect(profile, autocast), tracer, likeness))
        if unrolling is not None:
            stack.enter_context(unrolling.shortened(model))
        yield Session(tracer, lambda: context("cuda"))


def _held_beside(model: torch.nn.Module) -> torch.nn.Module | None:
    from vramfit.techniques.teachers import held_by

    return held_by(model)


def _load(tracer: Tracer, model: torch.nn.Module, slots: Iterable[torch.Tensor], root: str = "") -> None:
    """Weights come to the device as `Module.to` brings them: children first, then own parameters and buffers."""
    tracer.begin("load", "load")  # again for a teacher: its entries follow

    def bring(module: torch.nn.Module, path: str) -> None:
        for name, child in module.named_children():
            bring(child, f"{path}.{name}" if path else name)
        for tensor in (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None):
            is_quantized = hasattr(tensor, "__tensor_flatten__")
            for part in dict(quantization.inner_tensors(tensor)).values() if is_quantized else (tensor,):
                if part.device.type == "meta":  # offloaded weights wait on the host
                    tracer.hold(part, "parameter", path)

    bring(model, root)
    for slot in slots:
        tracer.hold(slot, "offload_slot")
    tracer.notice("model_loaded")


def _train_steps(session: Session, model: torch.nn.Module, workload: Workload, inputs: Batch) -> None:
    optimizer = optimizers.make(workload, model.parameters())
    scaler = torch.amp.GradScaler("meta") if workload.scales_loss else None
    for step, num_micro in _traced_steps(workload):
        train_step(
            model,
            optimizer,
            [inputs] * num_micro,
            autocast=session.autocast,
            scaler=scaler,
            max_grad_norm=workload.max_grad_norm,
            on_part=partial(_begin_part, session.tracer, step),
        )
        session.tracer.places.clear()
    session.tracer.begin("end", "end")  # before the optimizer goes
    session.tracer.template.repeat_second_pass()


def _stepper_steps(
    session: Session,
    model: torch.nn.Module,
    workload: Workload,
    inputs: Batch,
    headrooms: tuple[int, int],
    loss: HeadLoss,
) -> None:
    """The step of the `Stepper`, on the meta device."""
    tracer, several = session.tracer, workload.num_gpus > 1
    step = _make_step(session, model, workload)
    totals = loss.counts(inputs)
    held: list[torch.Tensor] = []
    for (name, num_micro), headroom_bytes in zip(_traced_steps(workload), headrooms, strict=True):
        step.on_part = partial(_begin_part, tracer, name)
        if several:
            step.on_part("forward", 0)
        mean = step.passes([inputs] * num_micro, loss, totals)
        tracer.begin(f"{name}.optimizer", "optimizer")
        step.finish()
        if several:
            tracer.begin(f"{name}.optimizer", "optimizer")  # again: from here on there is headroom
        step.commit(partial(int, headroom_bytes))
        of_all = step.ranks.total(mean)
        del mean, of_all  # asked for only now: the host runs ahead until here
        tracer.places.clear()
        if workload.captures_graphs and not step.keeps_gradients:
            held = hold_for_graphs(tracer, step)
    tracer.begin("end", "end")  # before the optimizer goes
    del held
    if not workload.shards and not workload.runs_twice:
        tracer.template.repeat_second_pass()


def passes_are_alike(workload: Workload) -> bool:
    """Whether the passes of a first step do what those of any other do, so that they can be traced alone."""
    return workload.loop == "stepper" and workload.num_gpus == 1 and not workload.offloads


def _stepper_passes(
    session: Session, model: torch.nn.Module, workload: Workload, inputs: Batch, loss: HeadLoss
) -> None:
    """The passes of a step: one that makes gradients, and one that adds to them."""
    step = _make_step(session, model, workload)
    if step.scaler is not None:  # made in a first pass, and found there by any other
        step.scaler._lazy_init_scale_growth_tracker(torch.device("meta"))
    step.on_part = partial(_begin_part, session.tracer, STEPS[1])
    step.passes([inputs] * num_traced(workload), loss, loss.counts(inputs))
    session.tracer.begin("end", "end")


def _make_step(session: Session, model: torch.nn.Module, workload: Workload) -> Step:
    """The step of one rank, with what DDP or FSDP2 hold around it, and its optimizer, on the device or the host."""
    tracer, template = session.tracer, session.tracer.template
    ranks: Alone | ReplicaOnPaper | ShardOnPaper = Alone()
    learned = [p for p in model.parameters() if p.requires_grad]
    if workload.num_gpus > 1:
        tracer.begin("inputs", "load")
        on_paper = ShardOnPaper if workload.shards else ReplicaOnPaper
        ranks = on_paper(tracer, model, workload.num_gpus)
        learned = ranks.learned
    optimizer = optimizers.make(workload, learned)
    host = None
    if workload.steps_on_host:  # of it, the device sees the slots that gradients leave by
        tracer.begin("inputs", "optimizer")
        host = HostStep(model, optimizer)
        template.host_bytes, template.num_host_weights = host.host_bytes, host.num_weights
        template.streams_step = host.streams
    scaler = torch.amp.GradScaler("meta" if host is None else "cpu") if workload.scales_loss else None
    step = Step(
        model,
        optimizer,
        ranks=ranks,
        host=host,
        scaler=scaler,
        autocast=session.autocast,
        max_grad_norm=workload.max_grad_norm,
    )
    step.bring, step.place = lambda batch: each_tensor(batch, torch.Tensor.clone), torch.Tensor.clone
    return step


def _begin_part(tracer: Tracer, step: str, part: str, index: int | str) -> None:
    name = f"micro{index}" if isinstance(index, int) else index
    tracer.begin(f"{step}.optimizer" if part == "optimizer" else f"{step}.{name}", part)


def _traced_steps(workload: Workload) -> list[tuple[str, int]]:
    """The steps that are traced, and their micro-batches.

    The second of them is traced in the first step only; with shards, what the first one of a step leaves behind ends in
    the last one, so that all are traced; and where passes run twice, a step of one pass would not.
    """
    num = num_traced(workload)
    return [(STEPS[0], num), (STEPS[1], num if workload.shards or workload.runs_twice else 1)]


def _forward_steps(session: Session, model: torch.nn.Module, workload: Workload, inputs: Batch) -> None:
    for step in STEPS:
        on_part = partial(_begin_part, session.tracer, step)
        forward_step(model, inputs, grad=workload.mode == "forward", autocast=session.autocast, on_part=on_part)
        session.tracer.places.clear()
    session.tracer.begin("end", "end")
