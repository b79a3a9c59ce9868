"""The settings of a plan put into a Trainer, and what that changed.

Outputs of an evaluation are kept as they come and put together once (`put_together_once`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vramfit.integrations.trainer.job import Job, is_free, weight_type
from vramfit.integrations.trainer.models import bare_model, step_model
from vramfit.models.anatomy import vocab_size
from vramfit.records.plan import Change, Plan
from vramfit.tasks import find_task
from vramfit.techniques import packing
from vramfit.techniques.adamw_8bit import AdamW8bit
from vramfit.techniques.application import apply_to_steps, prepare, undo_to_steps
from vramfit.workload import Workload

COPIES_OF_PILE = 3
"""Logits that wait on the GPU, and room for a Trainer that joins them there: both sides of a copy."""
MOST_STEPS = 128
LABEL_BYTES = 8
LOGIT_BYTES = 4


@dataclass(slots=True)
class Settings:
    """Sets arguments of a Trainer and remembers what they were."""

    trainer: Any
    changes: list[Change] = field(default_factory=list)

    def put(self, name: str, value: Any, why: str) -> None:
        """One argument; nothing is said where it is so already."""
        before = getattr(self.trainer.args, name)
        if before != value:
            setattr(self.trainer.args, name, value)
            self.say(name, before, value, why)

    def say(self, name: str, before: Any, after: Any, why: str) -> None:
        """A change of another kind."""
        self.changes.append(Change(name=name, before=_words(before), after=_words(after), why=why))


def _words(value: Any) -> str:
    return str(getattr(value, "value", value))


def put_plan(trainer: Any, job: Job, plan: Plan) -> tuple[Change, ...]:
    """Change a Trainer's arguments and its model as a plan says; what is so already is left."""
    made = Settings(trainer)
    _put_batches(made, job, plan)
    if job.texts is None:  # a loss that compares texts is another at another batch, and nothing piles up
        _put_evaluation(made, job, plan)
    put_precision(made, plan)
    _put_optimizer(made, plan)
    _put_model(made, job, plan)
    return tuple(made.changes)


def _put_batches(made: Settings, job: Job, plan: Plan) -> None:
    args, w = made.trainer.args, plan.workload
    how = (
        "in one pass"
        if plan.workload.num_passes == 1
        else f"{plan.workload.num_passes} passes of at most {plan.micro_batch}"
    )
    if w.is_packed:
        how = f"passes of up to {plan.micro_batch * w.sample_tokens:,} tokens"
    made.put("per_device_train_batch_size", w.batch, f"a batch is a whole step; inside it, {how}")
    summed = "losses are summed inside the step and divided by its own count"
    if job.texts is not None:
        summed = f"inside the step, {job.texts.compared} samples at a time are compared, and their losses averaged"
    made.put("gradient_accumulation_steps", 1, summed)
    made.put("auto_find_batch_size", False, "it would change the effective batch")
    made.trainer._train_batch_size = args.train_batch_size


def _put_evaluation(made: Settings, job: Job, plan: Plan) -> None:
    batch = plan.evaluation_batch
    if plan.evaluation.workload.is_packed:  # a plan of another's making; here, evaluations are padded
        batch = max(batch // 2, 1)
    made.put("per_device_eval_batch_size", batch, "the largest tried that fits next to the training state")
    if made.trainer.args.batch_eval_metrics:
        return
    steps = steps_until_moved(plan, sample_bytes(made.trainer, job.keywords["task"], plan.workload.seq))
    before = made.trainer.args.eval_accumulation_steps
    if before is None or before > steps:
        made.put("eval_accumulation_steps", steps, "logits go to the host before they pile up")


def sample_bytes(trainer: Any, task: str, seq: int) -> int:
    """Logits and labels of one sample, as an evaluation keeps them."""
    model = bare_model(trainer)
    classes = int(getattr(model.config, "num_labels", 2))
    logits, labels = find_task(task).numbers_per_sample(classes, seq, vocab_size(model) or 1)
    return logits * LOGIT_BYTES + labels * LABEL_BYTES


def steps_until_moved(plan: Plan, num_bytes: int) -> int:
    """Batches whose logits may wait on the GPU: they get half of what an evaluation leaves."""
    room = (plan.budget_bytes - plan.evaluation.safe_reserved_bytes) // 2
    return max(1, min(MOST_STEPS, room // (COPIES_OF_PILE * num_bytes * plan.evaluation_batch)))


def put_precision(made: Settings, plan: Plan) -> None:
    """Autocast for training and evaluation alike: accelerate learns of it by being made anew."""
    w, trainer = plan.workload, made.trainer
    if trainer.args.device.type == "cpu" and w.is_32_bit and not w.has_tf32:
        return
    before = trainer.args.mixed_precision
    why = "fewer bits: as precise as fine-tuning needs, and faster; exact=True keeps fp32"
    made.put("bf16", w.mixed_precision == "bf16", why)
    made.put("fp16", w.mixed_precision == "fp16", why)
    if w.has_tf32 and not trainer.args.tf32:
        made.put("tf32", True, "products in TF32; exact=True keeps fp32")
    trainer.args.mixed_precision = w.mixed_precision
    if trainer.args.mixed_precision != before:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
        trainer.create_accelerator_and_postprocess()


def _put_optimizer(made: Settings, plan: Plan) -> None:
    trainer, w = made.trainer, plan.workload
    if not is_free(trainer):
        return
    if w.is_adamw:
        name = _optimizer_name(w.name_in_trainer)
        made.put("optim", name, "the same AdamW in one kernel, without temporaries")
    elif w.has_8_bit_state:
        a = trainer.args
        keywords = {"lr": a.learning_rate, "betas": (a.adam_beta1, a.adam_beta2), "eps": a.adam_epsilon}
        trainer.optimizer_cls_and_kwargs = (AdamW8bit, keywords)
        made.say("optimizer", a.optim, "vramfit's AdamW8bit", "moments in 8 bits: a quarter of the optimizer's memory")


def _optimizer_name(value: str) -> Any:
    from transformers.training_args import OptimizerNames

    return OptimizerNames(value)


def _put_model(made: Settings, job: Job, plan: Plan) -> None:
    trainer, w = made.trainer, plan.workload
    full = w.is_fully_checkpointed
    by_hand = job.keywords.get("checkpointing") is not None
    if not by_hand:
        made.put("gradient_checkpointing", full, "layers are computed twice" if full else "there is room without")
    if full and not by_hand:
        made.put("gradient_checkpointing_kwargs", {"use_reentrant": False}, "the reentrant one skips frozen inputs")
    if w.num_checkpointed is not None:
        made.say("layers computed twice", "none", f"the first {w.num_checkpointed}", "less than full, and faster")
    if w.is_frozen and "freeze" not in job.keywords:
        made.say("frozen", "nothing", w.freeze, "allowed, and nothing milder fits")
    if w.has_bf16_weights and weight_type(trainer) != w.weight_dtype:
        made.say("weights", "fp32", "bf16", "allowed, and nothing milder fits")
    before = getattr(bare_model(trainer).config, "_attn_implementation", None)
    if w.is_packed:
        made.say("attention", before, "packed (no padding)", "sequences lie end to end, so that padding takes nothing")
    elif job.attn_implementation not in (None, before):
        made.say("attention", before, job.attn_implementation, "asked for")
    put_techniques(step_model(trainer), w, job.attn_implementation)


def put_techniques(model: Any, workload: Workload, attn_implementation: str | None) -> None:
    """What a plan changes in a model for good; what steps alone need is put on when training begins.

    Args:
        attn_implementation: the attention of transformers that was asked for; None leaves the model's.
    """
    if attn_implementation is not None:
        model.config._attn_implementation = attn_implementation
    prepare(model, workload, compiles=False)
    undo_to_steps(model)


def prepare_steps(model: Any, workload: Workload) -> None:
    """Before training: layers are fused, or cast their weights together; attention is packed inside steps only."""
    apply_to_steps(model, workload)
    if workload.is_packed:
        packing.set_aside(model)


@contextmanager
def put_together_once() -> Iterator[None]:
    """Evaluations inside keep their batches as they come, and give the arrays that they would have given."""
    from transformers import trainer
    from transformers.trainer_pt_utils import EvalLoopContainer

    class KeptOutputs(EvalLoopContainer):  # type: ignore[misc]
        """Batches as they came: on the GPU, then on the host."""

        tensors: Any
        arrays: Any

        def add(self, tensors: Any) -> None:
            self.tensors = self.tensors or []
            self.tensors.append(whole(tensors))

        def to_cpu_and_numpy(self) -> None:
            if self.tensors is not None:
                self.arrays = self.arrays or []
                self.arrays += [on_host(batch) for batch in self.tensors]
                self.tensors = None

        def get_arrays(self) -> Any:
            self.to_cpu_and_numpy()
            joins = self.arrays is not None and self.do_nested_concat
            return put_together(self.arrays, self.padding_index) if joins else self.arrays

    before = getattr(trainer, "EvalLoopContainer", None)
    if before is not EvalLoopContainer:  # another version of transformers, or somebody's own
        yield
        return
    trainer.EvalLoopContainer = KeptOutputs
    try:
        yield
    finally:
        trainer.EvalLoopContainer = before


def whole(value: Any) -> Any:
    """The same tensors, copied where they are a part of something larger: it need not be kept for them."""
    return _each(value, lambda x: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x)


def on_host(value: Any) -> Any:
    """The same tensors as arrays that keep none of their memory."""
    return _each(value, _array)


def _each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tensor changed, or the tensors of lists, tuples and mappings."""
    kind: Any = type(value)
    if isinstance(value, list | tuple):
        return kind(_each(part, change) for part in value)
    if isinstance(value, Mapping):
        return kind({name: _each(part, change) for name, part in value.items()})
    return change(value)


def _array(tensor: torch.Tensor) -> Any:
    moved = tensor.detach().cpu()
    array = (moved.float() if moved.dtype == torch.bfloat16 else moved).numpy()
    return array.copy() if tensor.device.type == "cpu" else array


def put_together(parts: Sequence[Any], filler: float) -> Any:
    """Arrays, or lists, tuples and mappings of them, one after another; rows of different widths are filled up."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, list | tuple):
        return type(first)(put_together(column, filler) for column in zip(*parts, strict=False))
    if isinstance(first, Mapping):
        kind: Any = type(first)
        return kind({name: put_together([part[name] for part in parts], filler) for name in first})
    arrays = [np.atleast_1d(part) for part in parts]
    if arrays[0].ndim == 1 or len({array.shape[1] for array in arrays}) == 1:
        return np.concatenate(arrays)
    shape = (sum(map(len, arrays)), max(array.shape[1] for array in arrays), *arrays[0].shape[2:])
    made = np.full(shape, filler, dtype=np.result_type(*arrays))
    begin = 0
    for array in arrays:
        made[begin : begin + len(array), : array.shape[1]] = array
        begin += len(array)
    return made
