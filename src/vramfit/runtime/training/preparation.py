"""From a request to what a run needs, in the order of cost: data first, then the plan, then the model."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.loader.budget import free_bytes
from vramfit.loader.load import load_request
from vramfit.loader.request import make_request
from vramfit.models.anatomy import max_positions
from vramfit.models.resolve import ResolvedModel, resolve
from vramfit.models.tasks import default_attention
from vramfit.models.tokenizers import load_tokenizer
from vramfit.records.finding import LoadReport
from vramfit.records.plan import Plan
from vramfit.runtime.budget import enforce, use_expandable_segments
from vramfit.runtime.data.examples import check_classes
from vramfit.runtime.data.samples import LONGEST, STRIDE, Samples, read_samples
from vramfit.runtime.training.place import Place
from vramfit.runtime.training.request import DEFAULT_BATCH, TrainRequest
from vramfit.settings import CHOSEN, SETTINGS
from vramfit.stages import tell
from vramfit.tasks import find_task
from vramfit.techniques.application import prepare
from vramfit.techniques.packed_attention import has_packed_kernel
from vramfit.units import parse_bytes
from vramfit.workload import Workload

WITHOUT_PLAN = 8
"""Samples of a forward pass on a CPU, where memory is not the question."""
KEPT = tuple(name for name in CHOSEN if SETTINGS[name].is_kept_on_resume)
"""Settings that a resumed run keeps whatever it is planned for: they make it the training that it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What there is to learn from and to evaluate on."""

    resolved: ResolvedModel
    tokenizer: Any
    train: Samples
    evaluation: Samples | None

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(self.train.lengths)


def read_data(request: TrainRequest, plan: Plan | None) -> Data:
    """The model's configuration and tokenizer, and both data sets, tokenized.

    Raises:
        UnknownModel, WorkloadError, VramfitError: whatever is wrong with the model's name or with a row.
    """
    resolved = resolve(request.model, task=request.task, trust_remote_code=request.trust_remote_code)
    tokenizer = load_tokenizer(request.model)
    limits = [max_positions(resolved.config) or LONGEST, request.seq]
    limits += [plan.workload.seq if plan is not None else None, getattr(tokenizer, "model_max_length", None)]
    max_length = int(min(n for n in limits if n))
    settings: dict[str, Any] = {"max_length": max_length, "seed": request.seed, "stride": min(STRIDE, max_length // 4)}
    tell(f"reading {request.data}")
    source = request.source(request.data)
    train = read_samples(source, tokenizer, **settings)
    check_classes(source, train.label_names)
    evaluation = None
    if request.eval_data is not None:
        names = train.label_names or None
        evaluation = read_samples(request.source(request.eval_data), tokenizer, label_names=names, **settings)
    return Data(resolved=resolved, tokenizer=tokenizer, train=train, evaluation=evaluation)


def make_plan(
    request: TrainRequest,
    data: Data,
    place: Place,
    former: Workload | None = None,
    num_gpus: int = 1,
    least: int | None = None,
) -> Plan | None:
    """A plan for the real lengths of the data; None on a CPU without a budget.

    Args:
        former: the settings of the run that is resumed.
        num_gpus: processes that share the run, each with a GPU.
        least: what is free on the GPU that has least; None asks this one.

    Raises:
        NoPlanFits: nothing that is allowed fits.
    """
    if not place.has_budget:
        return None
    from vramfit.planner.plan import plan

    keywords: dict[str, Any] = request.settings()
    keywords["graphs"] = False if request.label_smoothing else request.graphs
    if request.exact and former is None:
        keywords["exact"] = True
    if former is not None:
        keywords |= {name: getattr(former, name) for name in KEPT}
    if place.emulated is not None:
        keywords["rehearses"] = True
    keywords |= {**_batches(request, data, num_gpus), "seq": data.longest}
    keywords |= {"gpu": request.gpu or gpu_here(place), "memory": _memory(request, place, least)}
    if keywords["gpu"] is None and not has_packed_kernel(place.device, "amp-bf16"):  # the plan would count on it
        keywords.setdefault("attention", default_attention(data.resolved.model_class))
    if num_gpus > 1:
        keywords["num_gpus"] = num_gpus
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
    batch = _batches(request, data)["batch"]
    return request.max_steps or math.ceil(request.epochs * -(-len(data.train) // batch))


def gpu_here(place: Place) -> str | None:
    """The catalogue's name of the GPU that is there."""
    if place.device.type != "cuda":
        return None
    from vramfit.devices.catalogue import match_gpu

    properties = torch.cuda.get_device_properties(place.device)
    found = match_gpu(properties.name, properties.total_memory)
    return found.name if found is not None else None


def _memory(request: TrainRequest, place: Place, least: int | None = None) -> int | None:
    if request.memory is not None:
        return parse_bytes(request.memory, name="memory")
    return free_bytes(place.device) if least is None else least


def _batches(request: TrainRequest, data: Data, num_gpus: int = 1) -> dict[str, int]:
    """The batch, no larger than the data, and a micro-batch that was asked for, no larger than a process's part."""
    batch = min(request.batch or DEFAULT_BATCH, len(data.train))
    share = -(-batch // num_gpus)
    return {"batch": batch} | ({} if request.micro_batch is None else {"micro_batch": min(request.micro_batch, share)})


def _num_labels(request: TrainRequest, data: Data) -> int | None:
    return find_task(request.task).num_labels(data.train.label_names)


def settle(request: TrainRequest, data: Data, plan: Plan | None, num_gpus: int = 1) -> Workload:
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
        return replace(plan.workload, seq=max(longest, 1)) if plan.workload.seq > longest else plan.workload
    batches = _batches(request, data, num_gpus)
    keywords: dict[str, Any] = {
        "precision": "fp32",
        "optimizer": "adamw-fused",
        "micro_batch": min(-(-batches["batch"] // num_gpus), WITHOUT_PLAN),
        "num_gpus": num_gpus,
        **request.settings(),
        **batches,
        "seq": longest,
        "num_labels": _num_labels(request, data),
    }
    return Workload.from_keywords(model=request.model, loop="stepper", **keywords)


def load_model(
    request: TrainRequest,
    data: Data,
    workload: Workload,
    place: Place,
    budget_bytes: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Any, LoadReport]:
    """The model on its device, inside the budget, ready to learn.

    Weights that are to be quantized are loaded and quantized on the host, so that the device never has them in full;
    those of layers that are offloaded stay there.

    Raises:
        NoPlanFits, CheckpointError, WorkloadError: as `load` raises them.
    """
    if budget_bytes is not None:
        use_expandable_segments(place.device)
        enforce(budget_bytes, place.device)
    on_host = workload.quantize is not None or workload.offload == "weights"
    asked = make_request(
        request.model,
        task=request.task,
        precision=workload.precision,
        attention=workload.attention,
        num_labels=_num_labels(request, data),
        memory=None if on_host else budget_bytes,
        device="cpu" if on_host else str(place.device),
        trust_remote_code=request.trust_remote_code,
        seed=request.seed,
    )
    model, report = load_request(asked, progress=progress)
    name_labels(model, data.train.label_names)
    torch.manual_seed(request.seed)
    prepare(model, workload, place.device if on_host else None, compiles=False)  # the session does, and tells of it
    return model, report


def name_labels(model: Any, names: tuple[str, ...]) -> None:
    """Write the names of the labels into the model's configuration."""
    if not names:
        return
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: i for i, name in enumerate(names)}


def source_fingerprint(resolved: ResolvedModel) -> str:
    """What the frozen weights of a resumed run are recognised by: the sizes of the source's files."""
    folder = resolved.folder
    if folder is None:
        return resolved.name
    sizes = sorted((p.name, p.stat().st_size) for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    return ", ".join(f"{name} of {size} bytes" for name, size in sizes) or resolved.name
