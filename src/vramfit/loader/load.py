"""`load`: a checkpoint inspected, then streamed to its device in the precision asked for; all of it or nothing."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vramfit.errors import NoPlanFits, WorkloadError, nearest_names
from vramfit.loader.request import KEYWORDS, LoadRequest, find_device, make_request
from vramfit.records.finding import LoadReport
from vramfit.stages import tell
from vramfit.tasks import DEFAULT
from vramfit.units import shown

if TYPE_CHECKING:
    import torch

    from vramfit.loader.making import Gauge, Loaded
    from vramfit.loader.origin import Origin

Progress = Callable[[int, int], None]


def load(
    model: Any,
    task: str = DEFAULT,
    *,
    plan: Any = None,
    progress: Progress | None = None,
    **keywords: Any,
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
            quantize: int8, int8-dynamic or int4 for linear layers, through torchao; embeddings and norms stay.
            device: cuda (the default), cuda:1, cpu.
            random_weights: True for no checkpoint: every weight drawn, the same way for the same seed.
            num_labels: size of a classification head; None takes the configuration's.
            attention: sdpa or eager; None takes the model's default.
            memory: what the weights may take on the device; None takes what is free there, with `offload` three
                quarters of it. `estimate(...).breakdown["weights"]` is their share beside a batch of yours.
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
    problems = [
        f"unknown keyword {name!r} (nearest: {', '.join(nearest_names(name, KEYWORDS))})"
        for name in keywords
        if name not in KEYWORDS
    ]
    if problems:
        raise WorkloadError(problems)
    return load_request(make_request(model, plan=plan, task=task, **keywords), progress=progress)


def load_request(
    request: LoadRequest, *, progress: Progress | None = None, scan: bool = False
) -> "tuple[torch.nn.Module, LoadReport]":
    """`load` for a request that has been checked; `scan` also looks for NaN and infinite weights."""
    import torch

    from vramfit.checkpoints.files import ran_out
    from vramfit.loader.making import Gauge, make_model
    from vramfit.loader.origin import find_model, find_origin
    from vramfit.techniques import quantization

    device = find_device(request.device)
    quantization.check(request.workload.quantize, request.workload.precision, device)
    resolved = find_model(request)
    started = time.perf_counter()  # to import torch and the model's code takes longer than most checkpoints
    origin = find_origin(request, resolved, scan=scan)
    gauge = Gauge(device)
    tell("making the model")
    try:
        loaded = make_model(request, origin, device, progress=progress or _nobody, sample=gauge.sample)
    except torch.OutOfMemoryError as error:
        failure = NoPlanFits(
            f"{device} ran out of memory while {origin.resolved.name} was loaded: {str(error).splitlines()[0]}",
            hint="another process may hold it; offload weights, precision bf16 or quantize int8 need less",
        )
    except (MemoryError, RuntimeError, OSError) as error:
        if not ran_out(error):
            raise
        failure = NoPlanFits(
            f"the host ran out of memory while {origin.resolved.name} was loaded: "
            f"{next(iter(str(error).splitlines()), type(error).__name__)[:200]}",
            hint="end other programs; a checkpoint in the precision it was saved in stays mapped from its file",
        )
    else:
        return loaded.model, _report(request, origin, loaded, gauge, time.perf_counter() - started)
    # beyond the handler, the failed tensors are no longer held by a traceback
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise failure


def _nobody(num_bytes_done: int, num_bytes: int) -> None:
    """Progress that nobody follows."""


def _report(request: LoadRequest, origin: "Origin", loaded: "Loaded", gauge: "Gauge", time_s: float) -> LoadReport:
    inspection, w = origin.inspection, request.workload
    gauge.sample()
    return LoadReport(
        model=origin.resolved.name,
        model_class=type(loaded.model).__name__,
        task=origin.resolved.task,
        device=str(gauge.device),
        precision=w.precision,
        quantize=w.quantize,
        num_quantized=loaded.num_quantized,
        files=tuple(path.name for path in inspection.files.paths) if inspection is not None else (),
        num_tensors=loaded.num_tensors,
        num_bytes=loaded.num_bytes,
        time_s=time_s,
        final_device_bytes=gauge.device_bytes,
        peak_device_bytes=gauge.peak_device_bytes,
        largest_tensor_bytes=loaded.largest_tensor_bytes,
        host_anonymous_bytes=gauge.host_anonymous_bytes,
        num_layers=loaded.num_layers,
        num_resident_layers=loaded.num_resident_layers,
        fresh=tuple(inspection.fresh) if inspection is not None else loaded.names,
        dropped=tuple(inspection.unexpected) if inspection is not None else (),
        renamed=dict(inspection.renamed) if inspection is not None else {},
        findings=tuple(inspection.findings) if inspection is not None else (),
    )
