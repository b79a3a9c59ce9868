"""`load`: a checkpoint inspected, then streamed to its device in the precision asked for; all of it or nothing.

What is asked for is checked as a workload is, before anything heavy is imported.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vramfit.errors import NoPlanFits, WorkloadError, nearest_names
from vramfit.records.finding import LoadReport
from vramfit.settings import having
from vramfit.stages import tell
from vramfit.tasks import DEFAULT
from vramfit.units import plain, shown
from vramfit.workload import Workload, switched

if TYPE_CHECKING:
    import torch

    from vramfit.models.resolve import ResolvedModel

Progress = Callable[[int, int], None]
FROM_PLAN = tuple(name for name in having(at_load=True) if name not in ("model", "offload"))
OPTIONS = {"device": "cuda", "random_weights": False, "trust_remote_code": False, "seed": 0}
"""Options of a load that are no settings of a workload, with their defaults."""
KEYWORDS = (*FROM_PLAN, "offload", *OPTIONS)
"""All that `load` takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """One load: the model, how its weights are to lie, and where."""

    model: Any
    """A folder, a hub id, a catalogue name; a configuration where weights are to be random."""
    workload: Workload
    """Task, precision, quantize, attention, num_labels and memory (of the weights), checked; its batch means
    nothing here."""
    device: str
    random_weights: bool
    trust_remote_code: bool
    seed: int = 0
    """Of weights that no checkpoint holds."""

    @property
    def offloads(self) -> bool:
        """Whether layers that do not fit may stay on the host."""
        return self.workload.offloads_layers

    def resolve(self, folder: str | None = None) -> "ResolvedModel":
        """The model asked for, or the same from a folder; imports the code of its class.

        Raises:
            CheckpointError, UnknownModel, WorkloadError: as `models.resolve` raises them.
        """
        from vramfit.models.resolve import resolve

        w = self.workload
        model = self.model if folder is None else folder
        return resolve(model, task=w.task, num_labels=w.num_labels, trust_remote_code=self.trust_remote_code)


def make_request(model: Any, *, plan: Any = None, **keywords: Any) -> LoadRequest:
    """A request from the keywords of `load` and of `Workload`; a plan's workload decides what it speaks of.

    Raises:
        WorkloadError: an unknown keyword or a bad value, with the nearest; an offload that is no load's.
    """
    problems = [
        f"unknown keyword {name!r} (nearest: {', '.join(nearest_names(name, KEYWORDS))})"
        for name in keywords
        if name not in KEYWORDS
    ]
    if problems:
        raise WorkloadError(problems)
    options = {name: keywords.pop(name, default) for name, default in OPTIONS.items()}
    problems = [
        problem for name in ("random_weights", "trust_remote_code") for problem in switched(name, options[name])
    ]
    if plan is not None and not isinstance(getattr(plan, "workload", None), Workload):
        problems.append(f"plan {shown(plan)} is not a Plan, as vramfit.plan gives it")
    if problems:
        raise WorkloadError(problems)
    if plan is not None:
        keywords |= {name: getattr(plan.workload, name) for name in FROM_PLAN}
        keywords["offload"] = None
        if plan.workload.offloads_layers and plan.workload.trains:  # `offloading.apply` takes it from there
            options["device"], keywords["memory"] = "cpu", None
        elif plan.workload.offloads_layers:  # the plan's memory is for activations too
            keywords["offload"], keywords["memory"] = "weights", plan.estimate.breakdown["weights"]
    if isinstance(asked := keywords.get("offload"), str) and asked in ("optimizer", "activations"):
        raise WorkloadError([f"offload {asked} is for training; a load offers offload weights"])
    name = model if isinstance(model, str) else str(model)[:200]
    workload = Workload.from_keywords(model=name, mode="infer", **keywords)
    seed = plain(options["seed"])
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise WorkloadError([f"seed {shown(seed)} is not a whole number from 0"])
    return LoadRequest(model=model, workload=workload, **options | {"seed": seed, "device": str(options["device"])})


def load(
    model: Any, task: str = DEFAULT, *, plan: Any = None, progress: Progress | None = None, **keywords: Any
) -> "tuple[torch.nn.Module, LoadReport]":
    """Load a checkpoint inside a budget, or say precisely why not.

    The checkpoint is inspected first, from its headers. Then its tensors go one at a time from the mapped file to the
    device, in their final type when they arrive: the device never holds more than the model and one tensor. A head
    that the checkpoint lacks is initialised, the same way for the same seed, and named in the report.

    Args:
        model: a folder, a hub id, or a catalogue name; with `random_weights` also a configuration.
        task: the head; see `Workload`.
        plan: a `Plan`; what its workload says of task, precision, quantize, attention, labels, memory and offload
            counts.
        progress: called with bytes read and bytes to read.
        **keywords:
            precision: of the weights: bf16 and fp16 halve them; tf32 and amp-* keep fp32.
            quantize: int8, int8-dynamic, int4 or nf4 for linear layers, through torchao; embeddings and norms stay.
            device: cuda (the default), cuda:1, cpu.
            random_weights: True for no checkpoint: every weight drawn, the same way for the same seed.
            num_labels: size of a classification head; None takes the configuration's.
            attention: sdpa or eager; None takes the model's default.
            memory: what the weights may take on the device; None takes what is free there, with `offload` three
                quarters of it. `estimate(...).breakdown["weights"]` is their share next to a batch of yours.
            trust_remote_code: True to run Python code that the model's repository brings.
            offload: weights: layers beyond `memory` wait in host memory and come for their turn; for inference.
            seed: of what is drawn: a new head, or all weights with `random_weights`.

    Returns:
        The model, in evaluation mode, and what loading it took.

    Raises:
        CheckpointError: damaged, unsafe, or not this model's; carries everything fatal that was found.
        NoPlanFits: the weights do not fit the budget, or the host's memory; carries the shortfall.
        WorkloadError: keywords that no model could follow.
        UnknownModel: nothing goes by that name.
        MissingExtra: quantize without torchao.

    >>> model, report = load("bert-tiny", random_weights=True, device="cpu")
    >>> report.model_class, model.training
    ('BertForSequenceClassification', False)
    """
    if not (progress is None or callable(progress)):
        raise WorkloadError([f"progress {shown(progress)} cannot be called with bytes read and bytes to read"])
    return load_request(make_request(model, plan=plan, task=task, **keywords), progress=progress)


def load_request(
    request: LoadRequest, *, progress: Progress | None = None, scan: bool = False
) -> "tuple[torch.nn.Module, LoadReport]":
    """`load` for a request that has been checked; `scan` also looks for NaN and infinite weights."""
    import torch

    from vramfit.checkpoints.files import ran_out
    from vramfit.loader.model import find_origin, make_model
    from vramfit.techniques import quantization

    device = find_device(request.device)
    quantization.check(request.workload, device)
    resolved = request.resolve()
    started = time.perf_counter()  # to import torch and the model's code takes longer than most checkpoints
    origin = find_origin(request, resolved, scan=scan)
    tell("making the model")
    try:
        model, report = make_model(request, origin, device, progress=progress)
        return model, replace(report, time_s=time.perf_counter() - started)
    except (MemoryError, RuntimeError, OSError) as error:
        on_device = isinstance(error, torch.OutOfMemoryError)
        if not on_device and not ran_out(error):
            raise
        said = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        failure = NoPlanFits(
            f"{device if on_device else 'the host'} ran out of memory while {origin.resolved.name} was loaded: {said}",
            hint="another process may hold it; offload weights, precision bf16 or quantize int8 need less"
            if on_device
            else "end other programs; a checkpoint in the precision it was saved in stays mapped from its file",
        )
    # beyond the handler, the failed tensors are no longer held by a traceback
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise failure


def find_device(name: str, *others: str) -> "torch.device":
    """The device of torch that `cuda`, `cuda:N` or `cpu` names, a GPU by its number.

    Args:
        others: further names that the caller takes, for the error.

    Raises:
        WorkloadError: no such device, or none here.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise WorkloadError([f"device {name!r} is not one of {', '.join(('cuda', 'cuda:N', 'cpu', *others))}"])
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        emulated = ", or emulated with a memory" if "emulated" in others else ""
        raise WorkloadError(
            [f"device {name}: this machine has {count} CUDA devices"], hint=f"take device cpu{emulated}"
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
