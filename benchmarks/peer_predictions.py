"""What others say that a workload takes: one function a peer, each asked as its documentation says; see `peers.py`."""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from case_comparison import model_of

from vramfit.workload import Workload

Figure = Literal["allocated", "reserved"]
BYTES = {"fp32": 4, "tf32": 4, "amp-fp16": 4, "amp-bf16": 4, "fp16": 2, "bf16": 2}
"""Of a weight."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload that was run on a GPU, and what it took."""

    name: str
    workload: Workload
    model: Any
    """A name, or a configuration object."""
    allocated_bytes: int
    reserved_bytes: int


def vramfit_allocated(case: Case) -> int | None:
    """`vramfit.estimate`, what blocks add up to."""
    return _estimate(case).peak_allocated_bytes  # type: ignore[no-any-return]


def vramfit_reserved(case: Case) -> int | None:
    """`vramfit.estimate`, the upper bound that `fits` is decided on."""
    return _estimate(case).safe_reserved_bytes  # type: ignore[no-any-return]


def _estimate(case: Case) -> Any:
    from dataclasses import fields

    from vramfit.estimator.predict import estimate

    keywords = {f.name: getattr(case.workload, f.name) for f in fields(Workload) if f.name != "model"}
    model = model_of(case.workload) if isinstance(case.model, str) else case.model
    return estimate(model, **keywords)


def accelerate_estimate(case: Case) -> int | None:
    """The arithmetic of `accelerate estimate-memory`: the model's size, or four times it for training with Adam."""
    estimate = import_module("accelerate.commands.estimate")
    modeling = import_module("accelerate.utils.modeling")
    total, _ = modeling.calculate_maximum_sizes(_meta_model(case))
    w = case.workload
    if w.mode == "forward":
        return None  # it knows of loading and of training
    if w.mode == "infer":
        return int(total * BYTES[w.precision] / 4)
    kind = "float32" if w.precision in ("fp32", "tf32") else "float16"
    return int(max(estimate.estimate_training_usage(total, kind).values()))


def rule_of_thumb(case: Case) -> int | None:
    """16 bytes a parameter for AdamW, and activations as Korthikanti et al. (2022) count them: s·b·h·(34 + 5·a·s/h)."""
    w, model = case.workload, _meta_model(case)
    config = model.config
    num_parameters = sum(p.numel() for p in model.parameters())
    if not w.trains:
        weights = num_parameters * BYTES[w.precision]
        return weights + (_activations(w, config) if w.mode == "forward" else 0)
    states = {"sgd": 0, "adafactor": 0}.get(w.optimizer, 2)
    return num_parameters * BYTES[w.precision] * (2 + states) + _activations(w, config)


def _activations(w: Workload, config: Any) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    token = (w.micro_batch or 1) * w.seq * hidden
    if w.checkpointing == "full":
        return 2 * token * config.num_hidden_layers
    scores = 5 * heads * w.seq / hidden if w.attention == "eager" else 0
    wide = 2 if w.precision in ("fp32", "tf32") else 1
    return int(token * (34 + scores) * config.num_hidden_layers * wide)


def torch_preflight_by_name(case: Case) -> int | None:
    """The same for models that it knows by name alone."""
    return torch_preflight(case, by_name=True)


def torch_preflight(case: Case, *, by_name: bool = False) -> int | None:
    """`torch-preflight`'s static estimate, less the CUDA context; it adds a share for fragmentation."""
    vram = import_module("torch_preflight.vram")
    static = import_module("torch_preflight.vram.providers.static")
    hub = import_module("torch_preflight.vram.providers.hub")
    w, model = case.workload, _meta_model(case)
    if w.mode == "forward":
        return None  # it knows of training and of inference
    profile = vram.archdb.resolve(w.model)
    if profile is None or profile.shape.layers != model.config.num_hidden_layers:
        shape = hub.shape_from_config({k: v for k, v in model.config.to_dict().items() if v is not None})
        if shape is None or by_name:
            return None
        profile = static.from_shape(shape)
    if w.task in ("masked-lm", "pretraining"):
        profile = replace(profile, shape=replace(profile.shape, has_lm_head=True))
    num_all = sum(p.numel() for p in model.parameters())
    frozen = 1 - sum(p.numel() for p in model.parameters() if p.requires_grad) / num_all
    precision = {"fp32": "fp32", "tf32": "fp32", "bf16": "pure-bf16", "fp16": "pure-fp16"}.get(w.precision, "amp")
    optimizer = {"sgd": "sgd", "adafactor": "adafactor"}.get(w.optimizer, "adamw")
    config = vram.RunConfig(
        batch_size=w.micro_batch, seq_len=w.seq, accumulation_steps=w.accumulate, frozen_fraction=frozen,
        precision=vram.PrecisionMode(precision), optimizer=vram.OptimizerKind(optimizer),
        gradient_checkpointing=w.checkpointing is not None, flash_attention=w.attention == "sdpa",
        inference_only=w.mode == "infer",
    )  # fmt: skip
    found = vram.estimate(profile, config).breakdown
    return int(found.total - found.cuda_context)


def _meta_model(case: Case) -> Any:
    from vramfit.models.build import build_meta
    from vramfit.models.resolve import resolve
    from vramfit.settings.freeze import apply

    w = case.workload
    model = build_meta(resolve(case.model, task=w.task, num_labels=w.num_labels), attention=w.attention)
    apply(model, w.freeze)
    return model


def mem_tracker(case: Case) -> int | None:
    """`MemTracker` of torch under FakeTensorMode, its quickest way without a GPU: two steps."""
    peak_bytes, _ = track(case.workload, case.model)
    return peak_bytes


def track(workload: Workload, model: Any) -> tuple[int, list[float]]:
    """What MemTracker counts at the peak of two steps, and the seconds after each, the model's building included."""
    import torch
    from torch._subclasses import FakeTensorMode

    from vramfit.models.configuration import default_attention
    from vramfit.models.resolve import resolve
    from vramfit.step.plain import forward_step, make_batch, train_step
    from vramfit.techniques import optimizers
    from vramfit.techniques.application import apply

    module = import_module("torch.distributed._tools.mem_tracker")
    w, dtype = workload, workload.autocast_dtype

    def autocast() -> AbstractContextManager[Any]:
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    began, seconds = time.perf_counter(), []
    with FakeTensorMode():
        resolved = resolve(model, task=w.task, num_labels=w.num_labels)
        resolved.config._attn_implementation = w.attention or default_attention(resolved.model_class)
        net = resolved.model_class(resolved.config)
        apply(net, w)
        optimizer = optimizers.make(w.optimizer.replace("-fused", ""), net.parameters()) if w.trains else None
        batch = make_batch(net, w.task, w.mode, w.mask, w.micro_batch or 1, w.seq, "cpu")
        tracker = module.MemTracker()
        tracker.track_external(net, *([optimizer] if optimizer else []), *batch.values())
        with tracker:
            for _ in range(2):
                if optimizer is None:
                    forward_step(net, batch, grad=w.mode == "forward", autocast=autocast)
                else:
                    train_step(net, optimizer, [batch] * (w.accumulate or 1), autocast=autocast)
                tracker.reset_mod_stats()
                seconds.append(time.perf_counter() - began)
    peaks = tracker.get_tracker_snapshot("peak")
    return sum(device["Total"] for device in peaks.values()), seconds


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to know beforehand."""

    name: str
    package: str
    figure: Figure
    """What it comes nearest to saying, and is held against."""
    predict: Callable[[Case], int | None]
    """None where it does not speak of such a case."""

    def version(self) -> str | None:
        """None where it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


PEERS = (
    Peer(name="vramfit, allocated", package="vramfit", figure="allocated", predict=vramfit_allocated),
    Peer(name="vramfit, safe bound", package="vramfit", figure="reserved", predict=vramfit_reserved),
    Peer(name="torch-preflight", package="torch-preflight", figure="reserved", predict=torch_preflight),
    Peer(
        name="torch-preflight, by name", package="torch-preflight", figure="reserved", predict=torch_preflight_by_name
    ),
    Peer(name="MemTracker", package="torch", figure="allocated", predict=mem_tracker),
    Peer(name="rule of thumb", package="vramfit", figure="allocated", predict=rule_of_thumb),
    Peer(name="accelerate estimate-memory", package="accelerate", figure="allocated", predict=accelerate_estimate),
)


def ask(peer: Peer, case: Case) -> dict[str, Any]:
    """What a peer says of a case, in how many seconds, beside the truth; or `error`."""
    true = case.allocated_bytes if peer.figure == "allocated" else case.reserved_bytes
    line = {"peer": peer.name, "case": case.name, "figure": peer.figure, "true_bytes": true}
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = peer.predict(case)
    except Exception as error:  # a peer's failure is a finding
        said = " ".join(str(error).split()).replace(f"{sys.prefix}/", "")
        return line | {"error": f"{type(error).__name__}: {said[:160]}"}
    return line | {"predicted_bytes": found, "seconds": time.perf_counter() - began}
