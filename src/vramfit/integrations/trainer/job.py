"""`Job`: what a Trainer was set up to do, in the planner's words, and what stands in the way."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypedDict

import torch

from vramfit.errors import WorkloadError
from vramfit.integrations.trainer.models import (
    Origin,
    bare_model,
    is_overridden,
    origin_of,
    sentence_losses,
    step_model,
    task_of,
)
from vramfit.integrations.trainer.rows import Rows, is_changed, rows_of, rows_of_dataset, why_not
from vramfit.integrations.trainer.texts import TextSteps, make_head, read_texts, settings_of
from vramfit.models.anatomy import backbone, embeddings, encoder_layers, max_positions
from vramfit.models.configuration import class_for_task, supported_attention
from vramfit.planner.request import Lengths
from vramfit.runtime.step_settings import across_samples
from vramfit.techniques.packing.attention import has_packed_kernel
from vramfit.workload import CHOICES

LONGEST = 512
"""Tokens of a sequence where neither the data nor the model says."""
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw-fused", "sgd": "sgd"}
"""`optim` → the optimizer as it is predicted; AdamW may become another implementation of itself."""
SMALLER_PASSES = (
    "smaller per_device_train_batch_size and more gradient_accumulation_steps keep the step, where check(trainer) "
    "calls the loss a mean over samples; else bf16 and checkpointing make room; MonitorCallback shows the memory"
)
LOOK = "vramfit.integrations.trainer.check(trainer) looks without changing anything"
TEXTS = "embedding"
"""The task of a trainer that compares texts."""
ALLOWED = ("freeze", "bf16")
"""What fit_trainer may be allowed to change in what is learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a Trainer was set up to do."""

    model: Any
    """For the planner: a configuration where that says all, else the module."""
    origin: Origin
    """Of the loss."""
    keywords: dict[str, Any]
    """What the user has settled, as keywords of `plan`."""
    lengths: Lengths | None
    """Real lengths, where samples are padded to the longest of their batch."""
    rows: Rows
    why_padded: str | None
    """Why steps cannot be packed; None where they can."""
    attn_implementation: str | None
    """The attention of transformers that the caller asked for; None leaves the model's."""
    texts: TextSteps | None = None
    """How texts are compared, by a trainer of sentence-transformers."""

    @property
    def batch(self) -> int:
        """The effective batch."""
        return int(self.keywords["batch"])


class Wishes(TypedDict, total=False):
    """What a plan for a Trainer is made for and may use; `fit_trainer` says what each means."""

    memory: str | int | None
    gpu: str | None
    allow: str | Iterable[str]
    exact: bool
    margin: float | str | None
    seq: int | None
    micro_batch: int | None
    attention: str | None


def job_of(trainer: Any, wishes: Wishes, *, has_loss: bool) -> Job:
    """Read a Trainer.

    Args:
        has_loss: whether the caller gives the loss as a sum and a count.

    Raises:
        WorkloadError: what cannot be kept right or cannot be predicted, everything by name.
    """
    seq, micro_batch, attention = wishes.get("seq"), wishes.get("micro_batch"), wishes.get("attention")
    problems = obstacles(trainer)
    task = task_of(trainer)
    origin: Origin = "function" if has_loss else origin_of(trainer)
    texts: TextSteps | None = None
    losses = sentence_losses(trainer)
    if losses:
        texts, refused = read_texts(trainer)
        problems += refused
        task, origin = TEXTS, "texts"
        if has_loss:
            problems.append("loss_fn: losses of sentence-transformers are functions of all vectors, not sums")
    elif task is None:
        problems.append(f"{type(bare_model(trainer)).__name__} is no head of transformers that vramfit knows")
    if origin == "own" and task is not None and micro_batch is not None and micro_batch < effective_batch(trainer):
        problems.append(
            f"micro_batch {micro_batch}: {type(trainer).__name__} computes a loss of its own, which cannot be split "
            "without loss_fn and count_fn"
        )
    if problems:
        raise WorkloadError(problems, hint=SMALLER_PASSES if losses else LOOK)
    assert task is not None
    look = rows_of if texts is None else rows_of_dataset
    rows, evaluation = look(trainer, trainer.train_dataset), look(trainer, trainer.eval_dataset)
    widest = max(rows.width or 0, evaluation.width or 0)
    if seq is not None and widest > seq:
        raise WorkloadError(
            [f"seq {seq}: samples of the Trainer are up to {widest} tokens wide"],
            hint="leave seq out, which is read from the datasets, or truncate their samples",
        )
    limits = [n for n in (max_positions(bare_model(trainer)), seq) if n]
    lengths, longest = _lengths(trainer, rows, evaluation, limits)
    planned = _planned(trainer, task, texts)
    keywords = {"task": task, "batch": effective_batch(trainer), "seq": longest, **_settings(trainer)}
    if texts is not None:
        keywords |= settings_of(texts.loss.contrast) | {"pooling": make_head(trainer, texts).pooling}
    if isinstance(planned, torch.nn.Module):
        keywords.pop("freeze", None)  # it knows by itself what learns
    if origin == "own":
        keywords["micro_batch"] = keywords["batch"]
    elif micro_batch is not None:
        keywords["micro_batch"] = min(micro_batch, keywords["batch"])
    why = why_not(trainer, task, origin, planned, rows.batch)
    keywords |= _attention(trainer, attention, why)
    if "attention" not in keywords and trainer.args.device.type == "cuda":
        from vramfit.techniques import fusing

        dtype = torch.float16 if trainer.args.fp16 else torch.bfloat16
        keywords |= fusing.for_plan(bare_model(trainer), trainer.args.device, dtype=dtype)
    given = attention if attention in ("sdpa", "eager") else None
    return Job(
        model=planned,
        origin=origin,
        keywords=keywords,
        lengths=lengths,
        rows=rows,
        why_padded=why,
        attn_implementation=given,
        texts=texts,
    )


def _attention(trainer: Any, asked: str | None, why_padded: str | None) -> dict[str, str]:
    """What is settled of attention: what was asked for, or chosen for the model; nothing where packing may be better.

    sdpa is what transformers takes by itself, so it is nobody's choice.

    Raises:
        WorkloadError: packed, where that would change the gradient.
    """
    if asked == "packed" and why_padded is not None:
        raise WorkloadError(
            [f"attention packed: {why_padded}"],
            hint="leave attention out: passes without padding are taken where they can",
        )
    if asked is not None:
        return {"attention": asked}
    if why_padded is None and has_packed_kernel(trainer.args.device, "amp-bf16"):
        return {}
    own = getattr(bare_model(trainer).config, "_attn_implementation", None)
    if own in CHOICES["attention"] and own != "packed":
        return {"attention": own}
    known = supported_attention(type(bare_model(trainer)))
    return {"attention": "sdpa" if "sdpa" in known else "eager"}  # the nearest to flex, flash_attention_2 and the like


def effective_batch(trainer: Any) -> int:
    """Samples of a step."""
    return int(trainer.get_total_train_batch_size(trainer.args))


def obstacles(trainer: Any) -> list[str]:
    """What fit_trainer refuses, in words; empty where nothing stands in the way."""
    args = trainer.args
    rules = [
        (trainer.train_dataset is None, "the Trainer has no train_dataset"),
        (_is_empty(trainer.train_dataset), "the train_dataset is empty"),
        (args.world_size > 1, f"{args.world_size} processes: one GPU is fitted at a time, not several"),
        (args.n_gpu > 1, f"DataParallel over {args.n_gpu} GPUs: show the script one, CUDA_VISIBLE_DEVICES=0"),
        (trainer.is_deepspeed_enabled, "DeepSpeed owns the step, so that it can be neither split nor done again"),
        (trainer.is_fsdp_enabled, "FSDP shards the model, which is not predicted"),
        (trainer.is_model_parallel, "the model is spread over several devices"),
        (bool(args.torch_compile), "torch_compile is not predicted: set torch_compile=False"),
        (is_overridden(trainer, "training_step"), f"{type(trainer).__name__} has a training_step of its own"),
        (
            weight_type(trainer) == torch.float16,
            "weights in fp16 cannot learn: load the model in fp32 and set fp16=True",
        ),
        (_optimizer(trainer) is None, f"the optimizer {_optimizer_name(trainer)} is not predicted"),
    ]
    return [text for holds, text in rules if holds] + across_samples(trainer.model)


def _is_empty(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and len(dataset) == 0


def weight_type(trainer: Any) -> torch.dtype:
    """The type of the weights that a Trainer has."""
    dtypes: list[torch.dtype] = [p.dtype for p in trainer.model.parameters() if p.is_floating_point()]
    return dtypes[0] if dtypes else torch.float32


def _optimizer_name(trainer: Any) -> str:
    if trainer.optimizer is not None:
        return type(trainer.optimizer).__name__
    if trainer.optimizer_cls_and_kwargs is not None:
        return str(trainer.optimizer_cls_and_kwargs[0].__name__)
    return str(getattr(trainer.args.optim, "value", trainer.args.optim))


def _optimizer(trainer: Any) -> str | None:
    """The optimizer as the planner calls it; None for one that it does not know."""
    made = trainer.optimizer
    if made is None and trainer.optimizer_cls_and_kwargs is None and not is_overridden(trainer, "create_optimizer"):
        return OPTIMIZERS.get(_optimizer_name(trainer))
    if isinstance(made, torch.optim.AdamW):
        group = made.param_groups[0]
        return "adamw-fused" if group.get("fused") else "adamw-single" if group.get("foreach") is False else "adamw"
    return "sgd" if isinstance(made, torch.optim.SGD) and not made.defaults.get("momentum") else None


def as_set(trainer: Any, job: Job) -> dict[str, Any]:
    """A step as the script has it, before anything is chosen: keywords of `estimate`."""
    made: dict[str, Any] = {}
    made["optimizer"] = _optimizer(trainer)
    return made | job.keywords


def is_free(trainer: Any) -> bool:
    """Whether the optimizer is still to be made, and AdamW, so that another implementation may take its place."""
    named = trainer.optimizer is None and (_optimizer(trainer) or "").startswith("adamw")
    has_rates = bool(getattr(trainer.args, "learning_rate_mapping", None))  # of sentence-transformers, by parameter
    return named and not has_rates and not is_overridden(trainer, "create_optimizer")


def _settings(trainer: Any) -> dict[str, Any]:
    """What changes the maths and is therefore the user's: precision, optimizer, what is frozen, clipping."""
    args = trainer.args
    made: dict[str, Any] = {}
    if weight_type(trainer) == torch.bfloat16:
        made["precision"] = "bf16"
    elif args.bf16:
        made["precision"] = "amp-bf16"
    elif args.fp16 and args.device.type != "cpu":
        made["precision"] = "amp-fp16"
    elif args.device.type == "cpu":
        made["precision"] = "fp32"  # half precision is slow there
    if not is_free(trainer):
        made["optimizer"] = _optimizer(trainer)
    elif args.device.type == "cuda" and find_spec("triton") is None:
        made["optimizer"] = "adamw-fused"  # the 8-bit one compiles its step
    if args.max_grad_norm:
        made["max_grad_norm"] = args.max_grad_norm
    frozen = frozen_part(bare_model(trainer))
    if frozen is not None:
        made["freeze"] = frozen
    if getattr(step_model(trainer), "is_gradient_checkpointing", False) and not args.gradient_checkpointing:
        made["checkpointing"] = "full"  # turned on by hand: left on
    return made


def frozen_part(model: Any) -> str | int | tuple[str, ...] | None:
    """What does not learn, in the shortest words of `freeze`."""
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    if not frozen:
        return None
    part = embeddings(model)
    lower = {id(p) for p in part.parameters()} if part is not None else set()
    if frozen == {id(p) for p in backbone(model).parameters()}:
        return "backbone"
    if frozen == lower:
        return "embeddings"
    for number, layer in enumerate(encoder_layers(model), 1):
        lower |= {id(p) for p in layer.parameters()}
        if frozen == lower:
            return number
    return tuple(name for name, p in model.named_parameters() if not p.requires_grad)


def _planned(trainer: Any, task: str, texts: TextSteps | None) -> Any:
    """What is traced: the configuration, where a model made of it is the model at hand; it is traced once then."""
    model = bare_model(trainer)
    config, kind = copy.deepcopy(model.config), type(model)
    if model is not trainer.accelerator.unwrap_model(step_model(trainer)) or kind is not class_for_task(config, task):
        return model
    if texts is not None and (len(make_head(trainer, texts).layers) or is_changed(model)):
        return model
    config.problem_type = None  # labels are traced as classes; what the loss takes is a few numbers a sample either way
    return config


def _lengths(trainer: Any, rows: Rows, evaluation: Rows, limits: list[int]) -> tuple[Lengths | None, int]:
    """Lengths where padding follows them, and the longest sequence there can be."""
    own = (*rows.lengths, *evaluation.lengths)
    widths = [r.width for r in (rows, evaluation) if r.width is not None]
    asked = getattr(trainer.processing_class, "model_max_length", None)
    told = [asked] if isinstance(asked, int) and asked < 10**6 else []  # by a tokenizer; rows may be longer
    if not rows.lengths:  # whatever evaluation has, training may have longer ones
        return None, min([*limits, *told], default=max([*own, *widths], default=LONGEST))
    wide = max(widths, default=0) > max(own)  # padded to a length of its own
    longest = max([*own, *widths])
    complete = all(r.complete for r in (rows, evaluation) if r.lengths)
    seen = min([longest, *limits])
    expected = seen if complete else max(min([*limits, *told], default=longest), seen)
    if wide and "attention_mask" not in rows.batch:  # nobody can tell what is padding
        return None, expected
    values = (*rows.lengths, *(n for n in evaluation.lengths if n > max(rows.lengths)), *([longest] if wide else []))
    return Lengths(values=values, source="the datasets of the Trainer", complete=complete), expected
