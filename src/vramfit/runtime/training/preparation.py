"""From a request and its data to what a run needs: the plan first, then the model."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vramfit.errors import NoPlanFits, VramfitError, WorkloadError
from vramfit.loader.budget import free_bytes
from vramfit.loader.load import load_request, make_request
from vramfit.models.build import build_meta
from vramfit.models.configuration import SIZE_LIMITS, default_attention
from vramfit.models.resolve import resolve
from vramfit.records.finding import LoadReport
from vramfit.records.plan import Plan
from vramfit.runtime.device import RunDevice, enforce
from vramfit.runtime.distributed.processes import Processes
from vramfit.runtime.trained import TrainedModel
from vramfit.runtime.training import events
from vramfit.runtime.training.checkpoints import CheckpointStore
from vramfit.runtime.training.reading import Data
from vramfit.runtime.training.request import DEFAULT_BATCH, TrainRequest
from vramfit.runtime.training.saving import describe_head
from vramfit.settings import CHOSEN, LIVE, PLANNED, SETTINGS
from vramfit.settings.distillation import AUTO, DISK, MEMORY
from vramfit.settings.embedding import loss_of
from vramfit.settings.fused import Fused
from vramfit.tasks import find_task
from vramfit.techniques.application import prepare
from vramfit.techniques.packing.attention import has_packed_kernel
from vramfit.techniques.teachers import hold, teacher_workload
from vramfit.units import parse_bytes
from vramfit.workload import Workload

SIZES = ("model_type", *(name for name in SIZE_LIMITS if name != "num_labels"))
"""What makes a model take what it takes; the labels are the data's."""
NUM_NAMED = 3
"""Sizes that are named where models differ."""


def saved_plan(request: TrainRequest, on_event: events.OnEvent) -> Plan | None:
    """The plan that was given.

    Raises:
        VramfitError: the file is no plan.
        WorkloadError: a plan for another job, or for a model of other sizes.
    """
    if request.plan is None:
        return None
    try:
        plan = Plan.load(request.plan)
    except VramfitError as error:
        raise VramfitError(f"the plan {request.plan}: {error}", hint="vramfit plan --save FILE writes one") from None
    w = plan.workload
    problems = []
    if w.task != request.task:
        problems.append(f"the plan is for task {w.task}, not {request.task}")
    if request.batch is not None and w.batch != request.batch:
        problems.append(f"the plan is for batch {w.batch}, not {request.batch}")
    if w.distill != request.distill:
        says, asked = (f"distill {how}" if how else "no teacher" for how in (w.distill, request.distill))
        problems.append(f"the plan is for {says}, not {asked}")
    if w.held_teacher not in (None, request.teacher):
        problems.append(f"the plan holds the teacher {w.held_teacher} in memory, not {request.teacher}")
    if request.teacher_answers not in (AUTO, MEMORY if w.holds_teacher else DISK):
        problems.append(f"the plan is not for teacher_answers {request.teacher_answers}")
    problems += _other_settings(request, w)
    other = _other_model(request, plan, on_event)
    if problems or other:
        anew = f"plan for it: vramfit plan {request.model} --save FILE, with the budget and the batch"
        hint = anew if other else "plan anew, or leave out what the plan says already"
        raise WorkloadError([*problems, *other], hint=hint)
    return plan


def _other_settings(request: TrainRequest, planned: Workload) -> list[str]:
    """Settings that were given beside the plan, and that it has otherwise."""
    given = request.settings() | ({} if request.graphs is None else {"graphs": request.graphs})
    pairs = [(name, _words(getattr(planned, name)), _words(given[name])) for name in PLANNED if name in given]
    return [f"the plan says {name} {says}, not {asked}" for name, says, asked in pairs if says != asked]


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _other_model(request: TrainRequest, plan: Plan, on_event: events.OnEvent) -> list[str]:
    """How the plan's model differs from the one that is to be trained; what cannot be compared is said."""
    planned = plan.workload.model
    if planned == request.model:
        return []
    own = resolve(request.model, task=request.task, trust_remote_code=request.trust_remote_code)
    try:
        other = resolve(planned, task=request.task, trust_remote_code=request.trust_remote_code)
    except VramfitError:
        text = f"The plan is for {planned}, which is not here: is it as large as {request.model}?"
        on_event(events.Note(text=text, warns=True))
        return []
    different = [name for name in SIZES if _size(own.config, name) != _size(other.config, name)][:NUM_NAMED]
    if not different:
        return []
    sizes = (", ".join(f"{name} {_size(r.config, name)}" for name in different) for r in (other, own))
    return [f"the plan is for {planned} ({next(sizes)}), not {request.model} ({next(sizes)})"]


def _size(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def adapted_plan(plan: Plan, run_device: RunDevice, gpu: str | None, on_event: events.OnEvent) -> Plan:
    """A plan as it can be run at a place; what was meant for another one is said.

    Args:
        gpu: the catalogue's name of the GPU that is there.
    """
    w = plan.workload
    half = not w.is_32_bit
    if run_device.name == "cpu" and half:
        text = f"The plan says {w.precision}, which is slow on a CPU: fp32 is taken."
        on_event(events.Note(text=text, warns=True))
        return replace(plan, workload=replace(w, precision="fp32", graphs=False, fused=False))
    if run_device.emulated is not None and half:
        text = f"The plan says {w.precision}, which is slow here: the emulated GPU computes on the CPU."
        on_event(events.Note(text=text, warns=True))
    if gpu is not None and w.gpu is not None and gpu != w.gpu:
        text = f"The plan is for {w.gpu}, and this is {gpu}: memory and times may differ."
        on_event(events.Note(text=text, warns=True))
    return plan


WITHOUT_PLAN = 8
"""Samples of a forward pass on a CPU, where memory is not the question."""
COMPARED_WITHOUT_PLAN = 64
"""The same where passes would run twice: a batch that one pass holds runs once."""
KEPT = tuple(name for name in CHOSEN if SETTINGS[name].is_kept_on_resume)
"""Settings that a resumed run keeps whatever it is planned for: they make it the training that it is."""


def make_plan(
    request: TrainRequest,
    data: Data,
    run_device: RunDevice,
    former: Workload | None = None,
    num_gpus: int = 1,
    *,
    holds_teacher: bool = False,
) -> Plan | None:
    """A plan for the real lengths of the data; None on a CPU without a budget.

    Args:
        former: the settings of the run that is resumed.
        num_gpus: processes that share the run, each with a GPU.
        holds_teacher: whether the teacher is in memory beside its student.

    Raises:
        NoPlanFits: nothing that is allowed fits.
    """
    if not run_device.has_budget:
        return None
    keywords = _asked_of_plan(request, data, run_device)
    if request.exact and former is None:
        keywords["exact"] = True
    if former is not None:
        keywords |= {name: getattr(former, name) for name in KEPT}
    if keywords["gpu"] is None and not has_packed_kernel(run_device.device, "amp-bf16"):  # the plan would count on it
        keywords.setdefault("attention", default_attention(data.resolved.model_class))
    if run_device.device.type == "cuda":
        from vramfit.techniques import fusing

        dtype = torch.float16 if request.precision == "amp-fp16" else torch.bfloat16
        asked = keywords.get(Fused.keyword)
        keywords |= fusing.for_plan(build_meta(data.resolved), run_device.device, dtype=dtype, asked=asked)
    if num_gpus > 1:
        keywords["num_gpus"] = num_gpus
    if holds_teacher:
        keywords["held_teacher"] = request.teacher
    return _plan(request, data, keywords | batches_of(request, data, num_gpus))


def plan_again(run: "Run", memory_bytes: int) -> Plan:
    """A plan for other memory that a run can go on with: of its settings, only what `is_live` may differ.

    Raises:
        NoPlanFits: nothing fits without changing more.
    """
    former = run.workload
    request = replace(run.request, memory=memory_bytes, batch=former.batch, allow=())
    kept = {name: SETTINGS[name].kept(former) for name in CHOSEN if name not in LIVE}
    kept = {name: value for name, value in kept.items() if value is not None}
    if former.holds_teacher:
        kept["held_teacher"] = former.held_teacher
    keywords = _asked_of_plan(request, run.data, run.run_device) | kept
    keywords.setdefault("attention", default_attention(run.data.resolved.model_class))
    made = _plan(request, run.data, keywords | batches_of(request, run.data))
    different = [name for name, value in kept.items() if SETTINGS[name].kept(made.workload) != value]
    if different:
        raise NoPlanFits(f"what would fit differs in {', '.join(different)}", shortfall_bytes=0)
    return made


def _asked_of_plan(request: TrainRequest, data: Data, run_device: RunDevice) -> dict[str, Any]:
    """Keywords of a plan for this run, but for its batch."""
    keywords: dict[str, Any] = request.settings()
    keywords["graphs"] = False if request.label_smoothing else request.graphs
    if run_device.emulated is not None:
        keywords["rehearses"] = True
    keywords |= {**_of_data(request, data), "seq": data.longest}
    return keywords | {"gpu": request.gpu or run_device.gpu, "memory": _memory(request, run_device)}


def _plan(request: TrainRequest, data: Data, keywords: dict[str, Any]) -> Plan:
    from vramfit.planner.plan import plan

    return plan(
        request.model,
        steps=num_steps(request, data),
        lengths=list(data.train.lengths),
        group_by_length=True,
        num_labels=_num_labels(request, data),
        allow=request.allow,
        trust_remote_code=request.trust_remote_code,
        **keywords,
    )


def num_steps(request: TrainRequest, data: Data) -> int:
    """Batches to learn from in all."""
    batch: int = batches_of(request, data)["batch"]
    max_steps: int | None = request.max_steps
    return max_steps or math.ceil(request.epochs * -(-data.train.num_samples // batch))


def _memory(request: TrainRequest, run_device: RunDevice) -> int | None:
    if request.memory is not None:
        return parse_bytes(request.memory, name="memory")
    return free_bytes(run_device.device) if run_device.least_free_bytes is None else run_device.least_free_bytes


def batches_of(request: TrainRequest, data: Data, num_gpus: int = 1) -> dict[str, int]:
    """The batch, no larger than the data, and a micro-batch that was asked for, no larger than a process's part."""
    batch = min(request.batch or DEFAULT_BATCH, data.train.num_samples)
    share = -(-batch // num_gpus)
    return {"batch": batch} | ({} if request.micro_batch is None else {"micro_batch": min(request.micro_batch, share)})


def _of_data(request: TrainRequest, data: Data, planned: Workload | None = None) -> dict[str, Any]:
    """Settings that follow from the data.

    Raises:
        WorkloadError: others were asked for, or planned.
    """
    found = find_task(request.task).data_settings(data.train.references, request.loss)
    if data.teacher_width is not None:
        found["distill_width"] = data.teacher_width
    said: list[tuple[str, Any]] = [("asked for", request)]
    if planned is not None:  # what it does not say it was made for all the same
        usual = {"texts": planned.texts_per_sample, "loss": loss_of(planned)}
        said.append(("planned", replace(planned, **{name: usual[name] for name in found if name in usual})))
    problems = [
        f"{name} {getattr(source, name)} was {how}, and the data asks for {value}"
        for how, source in said
        for name, value in found.items()
        if getattr(source, name) not in (None, value)
    ]
    if problems:
        raise WorkloadError(problems, hint="leave it out: it follows from the data; or plan anew for the data")
    return found


def _num_labels(request: TrainRequest, data: Data) -> int | None:
    return find_task(request.task).num_labels(data.train.label_names)


def chosen_workload(
    request: TrainRequest, data: Data, plan: Plan | None, num_gpus: int = 1, *, holds_teacher: bool = False
) -> Workload:
    """The workload as it runs: the plan's, or what was asked for with the plainest of everything else.

    Raises:
        WorkloadError: a plan for another number of processes, or more of them than samples in a batch.
    """
    longest = data.longest
    if plan is not None and plan.workload.num_gpus != num_gpus:
        raise WorkloadError(
            [f"the plan is for {plan.workload.num_gpus} GPUs, and {num_gpus} processes were started"],
            hint=f"plan anew with --num-gpus {num_gpus}, or start as many with torchrun --nproc-per-node",
        )
    if plan is not None:
        taught = {name: getattr(request, name) for name in ("distill_temperature", "distill_alpha")}
        planned = replace(plan.workload, **_of_data(request, data, plan.workload), **taught)
        return replace(planned, seq=max(longest, 1)) if planned.seq > longest else planned
    batches, of_data = batches_of(request, data, num_gpus), _of_data(request, data)
    is_joint = of_data.get("loss") in find_task(request.task).joint_losses
    keywords: dict[str, Any] = {
        "precision": "fp32",
        "optimizer": "adamw-fused",
        "micro_batch": min(-(-batches["batch"] // num_gpus), COMPARED_WITHOUT_PLAN if is_joint else WITHOUT_PLAN),
        "num_gpus": num_gpus,
        **request.settings(),
        **batches,
        **of_data,
        "seq": longest,
        "num_labels": _num_labels(request, data),
        "held_teacher": request.teacher if holds_teacher else None,
    }
    return Workload.from_keywords(model=request.model, loop="stepper", **keywords)


@dataclass(kw_only=True, slots=True)
class Run:
    """What a run is made of before its model is loaded; filled in the order of cost."""

    request: TrainRequest
    data: Data
    run_device: RunDevice
    processes: Processes
    store: CheckpointStore
    on_event: events.OnEvent
    teacher: TrainedModel | None = None
    """None where nothing is distilled."""
    plan: Plan | None = None
    """None on a CPU without a budget."""
    holds_teacher: bool = False
    """Whether the teacher is in memory beside its student."""
    workload: Workload = field(init=False)
    """The workload as it runs."""

    @property
    def limit_bytes(self) -> int | None:
        """What PyTorch may reserve: the plan's limit, and what this process held on the device before."""
        if self.plan is not None:
            return min(self.plan.budget_bytes, self.plan.limit_bytes + self.run_device.held_bytes)
        if self.run_device.has_budget and self.request.memory is not None:
            return parse_bytes(self.request.memory, name="memory")
        return None


def load_model(run: Run) -> tuple[Any, LoadReport]:
    """The model on its device, inside the budget, ready to learn.

    Weights that are to be quantized are loaded and quantized on the host, so that the device never has them in full;
    those of layers that are offloaded stay there.

    Raises:
        NoPlanFits, CheckpointError, WorkloadError: as `load` raises them.
    """
    request, workload, device, budget_bytes = run.request, run.workload, run.run_device.device, run.limit_bytes
    if budget_bytes is not None:
        enforce(budget_bytes, device)
    on_host = workload.is_quantized or workload.offloads_layers
    model, report = _load(
        run,
        lambda done, total: run.on_event(events.Loading(done_bytes=done, total_bytes=total)),
        attention=workload.attention,
        num_labels=_num_labels(request, run.data),
        memory=None if on_host else budget_bytes,
        device="cpu" if on_host else str(device),
    )
    torch.manual_seed(request.seed)
    prepare(model, workload, device if on_host else None, compiles=False)  # the session does
    if workload.holds_teacher:
        assert run.teacher is not None
        teacher = run.teacher.load_weights(teacher_workload(workload), run.run_device, budget_bytes)
        hold(model, teacher, workload)
    return model, report


def load_source(run: Run) -> Any:
    """The model as it was before training, on the host, for a trained one that cannot be saved as it is."""
    return _load(run, None, num_labels=run.workload.num_labels, device="cpu", pooling=run.workload.pooling)[0]


def _load(run: Run, progress: Callable[[int, int], None] | None, **keywords: Any) -> tuple[Any, LoadReport]:
    request = run.request
    asked = make_request(
        request.model,
        task=request.task,
        precision=run.workload.precision,
        trust_remote_code=request.trust_remote_code,
        seed=request.seed,
        **keywords,
    )
    model: Any
    model, report = load_request(asked, progress=progress)
    describe_head(model.config, run.data.train)
    return model, report
