"""What runs, and how much of it: the model, its head, the batch and the lengths."""

from collections.abc import Iterator, Mapping
from typing import Any

from vramfit import tasks
from vramfit.settings.setting import Estimate, Setting, Technique, Workload
from vramfit.settings.values import Choice, Count, Counts, Number, Text


class Model(Setting):
    keyword, order, group = "model", 10, "job"
    value = Text(such="bert-base-uncased", optional=False, metavar="MODEL")
    help = "Catalogue name (see vramfit models), folder with config.json, or hub id."
    in_answers = True
    at_load = in_inference = True


class Task(Setting):
    keyword, order, group, is_basic = "task", 20, "job", True
    is_trainers_own = True
    value = Choice(names=tasks.task_names())
    labels = tuple((task.name, task.title) for task in tasks.all_tasks())
    default = tasks.DEFAULT
    in_run = True
    help = "Head on the encoder."
    in_answers = True
    at_load = in_inference = True


class Mode(Setting):
    keyword, order, group, is_basic = "mode", 30, "job", True
    value = Choice(names=("train", "forward", "infer"))
    default = "train"
    help = "What a step does. `forward` keeps activations for a backward pass, `infer` keeps none."
    in_answers = True
    in_inference = True


class Batch(Setting):
    keyword, order, group, is_basic = "batch", 40, "job", True
    is_trainers_own = True
    value = Count()
    default = 8
    in_run = True
    help = "Effective batch: samples per optimizer step."
    in_answers = True
    in_trace = ""


def num_passes(w: Workload) -> int:
    """Passes of a step: micro-batches whose gradients are summed."""
    return w.accumulate or 1


def fewest_samples(keywords: Mapping[str, Any]) -> int:
    """The smallest batch of a job with these keywords: a sample a pass."""
    passes = keywords.get("accumulate")
    return passes if isinstance(passes, int) and passes > 0 else 1


def split_of(micro_batch: int, num_passes: int) -> dict[str, Any]:
    """How a batch was split, as records say it."""
    return {"micro_batch": micro_batch, "accumulate": num_passes}


def passes_of(micro_batch: int | None, batch: int) -> dict[str, Any]:
    """Keywords of a job that splits a batch into passes of so many samples; None does not split it."""
    return {"batch": batch, "micro_batch": micro_batch, "accumulate": None}


class Accumulate(Setting):
    keyword, order, group = "accumulate", 50, "job"
    value = Count(optional=True)
    in_run = False
    label, modes, is_basic = "Passes a step", ("train",), True
    help = "Micro-batches per optimizer step; give this or --micro-batch, and the other follows."
    in_answers = True
    is_planned = is_worked_out = is_live = True
    in_trace = ""
    asked = (num_passes,)
    techniques = (
        Technique(
            values=("N",),
            kind="free",
            does="the batch goes through in micro-batches, whose gradients are summed",
            costs="none: other dropout masks, and smaller products",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.accumulate != 1 and not w.trains:
            yield f"accumulate is for mode train, not {w.mode}"

    def technique(self, value: Any) -> Technique | None:
        return super().technique(value) if (value or 1) > 1 else None

    is_said = False

    def trainer_arguments(self, w: Workload) -> dict[str, int]:
        return {"gradient_accumulation_steps": w.num_passes}

    def advised(self, now: Estimate) -> Iterator[dict[str, Any]]:
        w = now.workload
        if w.trains and w.batch % 2 == 0 and (w.micro_batch or 1) % 2 == 0:
            yield {self.keyword: 2 * w.num_passes, "micro_batch": None}


class MicroBatch(Setting):
    keyword, order, group = "micro_batch", 60, "job"
    value = Count(optional=True)
    label, modes = "Samples a pass", ("train",)
    about = "Where the batch should not be split evenly. The next change of batch or passes clears it."
    help = "Samples per pass; if the batch does not divide evenly, of the largest pass."
    in_answers = True
    is_planned = is_worked_out = is_live = True
    in_trace = ""
    must_match_on_resume = is_kept_on_resume = False

    is_said = False

    def trainer_arguments(self, w: Workload) -> dict[str, int]:
        return {"per_device_train_batch_size": w.micro_batch}


class Seq(Setting):
    keyword, order, group, is_basic = "seq", 70, "job", True
    value = Count()
    default = 128
    in_run = True
    help = "Tokens per sequence, padding included; longer texts are truncated."
    in_answers = True
    in_inference = True
    in_trace = "step"


class RealLengths(Setting):
    keyword, order, group = "lengths", 80, "job"
    value = Counts(metavar="FILE|N,…", of="tokens ")
    help = "Tokens of each sample of a batch, for packed attention: numbers, or a file with one number per line."
    is_measured = on_page = False
    in_trace = "step"

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not w.is_packed:
            yield "lengths need attention 'packed'"
        if len(w.lengths or ()) != w.batch:
            yield f"lengths names {len(w.lengths or ())} sequences but batch is {w.batch}"
        if w.num_passes > 1:
            yield "lengths are of one micro-batch: accumulate must be 1"

    is_said = False


class NumLabels(Setting):
    keyword, order, group = "num_labels", 90, "job"
    value = Count(optional=True, none=f"the encoder without a head is task {tasks.encoder_alone().name}")
    label = "Classes"
    help = "Size of the classification head. Default: the configuration's."
    at_load = in_inference = True

    is_said = False


class MaxGradNorm(Setting):
    keyword, order = "max_grad_norm", 170
    value = Number(optional=True)
    in_run = True
    in_trace = "step"
    label, modes = "Gradient clipping", ("train",)
    help = "Clip gradients to this norm before the optimizer step."

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not w.trains:
            yield f"max_grad_norm is for mode train, not {w.mode}"

    def trainer_arguments(self, w: Workload) -> dict[str, float]:
        return {"max_grad_norm": w.max_grad_norm or 0.0}

    def words(self, w: Workload) -> str | None:
        return None if w.max_grad_norm is None else f"clip {w.max_grad_norm}"
