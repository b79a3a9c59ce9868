"""A model loaded to serve: its weights in any precision, and as many tokens a batch as its share of memory holds."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.estimator.resolve import target_of
from vramfit.estimator.search import max_batch
from vramfit.loader.budget import free_bytes
from vramfit.planner.choose import margin_of
from vramfit.runtime.device import RunDevice, enforce
from vramfit.runtime.inference import Inference
from vramfit.runtime.trained import FINE_TUNE_OR_VECTORS, TrainedModel, open_model
from vramfit.serve.settings import (
    CONTEXT_BYTES,
    CPU_TOKENS,
    MAX_SAMPLES_A_BATCH,
    OFFLOADED_BATCHES,
    Need,
    ServeSettings,
)
from vramfit.settings import having
from vramfit.tasks.parts import pooling
from vramfit.tasks.parts.results import wrong_top_k
from vramfit.techniques.application import use_expandable_segments
from vramfit.units import format_bytes
from vramfit.workload import Workload

PREDICTED = tuple(name for name in having(in_inference=True) if name != "model")
"""Settings of a workload that decide how much a batch may hold."""

SEVERAL_TEXTS = 9
"""A batch of so many full texts, beside one of one, says what another text takes."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much a batch may hold."""

    max_tokens: int
    weights_bytes: int | None
    """What weights may take, where layers wait in host memory."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to answer."""

    trained: TrainedModel
    inference: Inference
    run_device: RunDevice
    budget_bytes: int | None
    top_k: int | None = None
    """Scores that are given where a request does not say."""


def load_model(settings: ServeSettings, worker: int = 0) -> Loaded:
    """The model of one worker, on its device.

    Raises:
        NoPlanFits: its share of the memory does not hold the weights and one text of full length.
        CheckpointError: weights that are damaged, or that lack the head.
        UnknownModel, WorkloadError: no such model, or none that could answer.
    """
    trained = _open(settings)
    wrong = None if settings.top_k is None else wrong_top_k(settings.top_k, trained.task)
    if wrong is not None:
        raise WorkloadError([wrong])
    share_bytes = settings.share_bytes(worker)
    run_device = RunDevice(settings.device_of(worker), memory=share_bytes)
    budget_bytes = share_bytes if share_bytes is not None else _free_share(run_device, settings, worker)
    workload = _workload(trained, settings, run_device)
    most = MAX_SAMPLES_A_BATCH * trained.max_length if run_device.has_budget else CPU_TOKENS
    room = Room(min(most, settings.max_tokens or most), None)
    if budget_bytes is not None:
        room = _room(trained, workload, budget_bytes, room.max_tokens, settings.sharers(worker))
    use_expandable_segments(run_device.device)
    if share_bytes is not None:
        enforce(share_bytes, run_device.device)
    if not workload.offloads:  # packed where torch has a kernel for it
        workload = replace(workload, **trained.suited(run_device, **settings.of_weights, **settings.of_layers))
    memory = room.weights_bytes if room.weights_bytes is not None else budget_bytes
    model = trained.load_weights(workload, run_device, memory, hint=FINE_TUNE_OR_VECTORS)
    if trained.kind.gives_vectors and not trained.kind.pools_itself:
        pooling.attach(model, pooling.EmbeddingHead(settings.pools_by or "mean", normalizes=False))
    trained.cut_vectors(model)
    if settings.fail_every is not None:
        _rehearse(model, settings.fail_every)
    inference = Inference(model, run_device, max_tokens=room.max_tokens, workload=workload)
    return Loaded(trained, inference, run_device, budget_bytes, settings.top_k)


def need_of(settings: ServeSettings) -> Need:
    """What a worker takes at least, and for each further token.

    Raises:
        CheckpointError, UnknownModel, WorkloadError: no such model, none that could answer, or layers in host memory.
    """
    trained = _open(settings)
    run_device = RunDevice(settings.device_of(0), memory=settings.share_bytes(0))
    workload = _workload(trained, settings, run_device)
    if workload.offloads:
        raise WorkloadError(["offload is for one model: how much of each would stay on the device is not planned"])
    one, several = (estimate(trained.model, batch=n, **_job(trained, workload)) for n in (1, SEVERAL_TEXTS))
    least = one.safe_reserved_bytes
    least += margin_of(2 * least, target_of(workload).basis, workload, varied=False).num_bytes
    more = max(several.safe_reserved_bytes - one.safe_reserved_bytes, 1)
    return Need(least, more / ((SEVERAL_TEXTS - 1) * trained.max_length))


def _open(settings: ServeSettings) -> TrainedModel:
    return open_model(
        settings.model,
        task=settings.task,
        seq=settings.seq,
        trust_remote_code=settings.trust_remote_code,
        or_vectors=True,
    )


def _workload(trained: TrainedModel, settings: ServeSettings, run_device: RunDevice) -> Workload:
    return trained.workload(
        **settings.of_weights,
        allocator="expandable",
        gpu=settings.gpu or run_device.gpu,
        pooling=settings.pools_by if trained.kind.pools_itself else None,
    )


def _job(trained: TrainedModel, workload: Workload) -> dict[str, Any]:
    """Keywords of a prediction, without its batch."""
    return {name: getattr(workload, name) for name in PREDICTED} | {"trust_remote_code": trained.trust_remote_code}


def _free_share(run_device: RunDevice, settings: ServeSettings, worker: int) -> int | None:
    """A worker's part of what is free, with room for the contexts of the others."""
    free, num_sharers = free_bytes(run_device.device), settings.sharers(worker)
    return None if free is None else max(free - (num_sharers - 1) * CONTEXT_BYTES, 1) // num_sharers


def _rehearse(model: torch.nn.Module, fail_every: int) -> None:
    num_batches = 0

    def fail(module: Any, args: Any) -> None:
        nonlocal num_batches
        num_batches += 1
        if num_batches % fail_every == 0:
            raise torch.OutOfMemoryError(f"CUDA out of memory: rehearsed, at batch {num_batches}")

    model.register_forward_pre_hook(fail)


def _room(trained: TrainedModel, workload: Workload, budget_bytes: int, most: int, num_sharers: int) -> Room:
    """Tokens of a batch, `most` at most, so that any batch of so many fits beside the weights."""
    basis = target_of(workload).basis
    job = _job(trained, workload)
    for varied in (True, False):  # where nothing fits with room for fragmentation, at least what predictions may be off
        margin = margin_of(budget_bytes, basis, workload, varied=varied, whole=True)
        job["memory"] = max(budget_bytes - margin.num_bytes, 1)
        room = _offloaded(trained, job) if workload.offloads else _resident(trained, job)
        if room is not None:
            return Room(min(room.max_tokens, most), room.weights_bytes)
    raise _too_small(trained, job, budget_bytes, num_sharers)


def _resident(trained: TrainedModel, job: dict[str, Any]) -> Room | None:
    batch = max_batch(trained.model, **job).batch
    return Room(batch * trained.max_length, None) if batch else None


def _offloaded(trained: TrainedModel, job: dict[str, Any]) -> Room | None:
    for batch in OFFLOADED_BATCHES:
        found = estimate(trained.model, batch=batch, **job)
        if found.fits:
            return Room(batch * trained.max_length, found.breakdown["weights"])
    return None


def _too_small(trained: TrainedModel, job: dict[str, Any], budget_bytes: int, num_sharers: int) -> NoPlanFits:
    needed = estimate(trained.model, batch=1, **job)
    share = f" (one of {num_sharers} workers' shares)" if num_sharers > 1 else ""
    fewer = "take fewer --workers, " if num_sharers > 1 else ""
    return NoPlanFits(
        f"one text of {trained.max_length} tokens takes {format_bytes(needed.safe_reserved_bytes)} with the weights of "
        f"{trained.model} in {needed.workload.weights_in_words}, and {format_bytes(job['memory'])} of "
        f"{format_bytes(budget_bytes)} may be planned with{share}",
        best=needed,
        budget_bytes=budget_bytes,
        shortfall_bytes=max(needed.safe_reserved_bytes - int(job["memory"]), 0),
        hint=f"{fewer}give more --memory, cut the texts (--seq), or take --precision bf16, --quantize int8 or "
        "--offload weights",
    )
