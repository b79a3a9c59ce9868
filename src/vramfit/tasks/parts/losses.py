"""What a module gives, read; and losses as sums with counts, so that any split of a batch gives one mean.

A head's own loss is a mean over what it sees. Summed over micro-batches and divided by the count of the whole
effective batch, it is the mean over the whole batch, however that was split.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.tasks import all_tasks, find_task
from vramfit.tasks.base import IGNORED, PER_TOKEN

if TYPE_CHECKING:
    from vramfit.tasks.parts.joint import JointLoss

Batch = dict[str, torch.Tensor]


def target_name(answer: str) -> str:
    """What a batch calls a teacher's answer that a model gives by this name."""
    return f"teacher_{answer}"


HIDDEN = target_name("hidden")
"""Hidden states of the teacher's layers, side by side."""
RELATIONS = target_name("relations")
"""Queries, keys and values of a layer of the teacher, side by side."""
OF_LAYERS = frozenset({HIDDEN, RELATIONS})
TARGETS = frozenset(target_name(answer) for task in all_tasks() for answer in task.answers) | OF_LAYERS
"""Inputs that are a teacher's answers."""
LABELS = frozenset(name for task in all_tasks() for name in task.labels) | TARGETS
"""Inputs that only a loss reads."""
PLACES = frozenset(name for task in all_tasks() for name in task.place_labels)
"""Those of them that are a token's place in its sequence."""

READ_PADDING = frozenset(["axk2", "convbert", "fnet", "nystromformer", "reformer", "xlnet", "yoso"])
"""Model types that mix, convolve, average or select over all columns, padding included: with less padding they compute
something else (`benchmarks/family_steps.py`)."""

CONTRACT = (
    "forward takes the tensors of a batch by name and gives a loss (a tensor with one number, a mapping or an object "
    "with `loss`, or a tuple that begins with it) or logits (a tensor, a mapping or an object with `logits`, or a "
    "tuple that begins with them)"
)
"""What a module of the user's must do; docs/stepper.md says the same at length."""

Sums = Callable[[Any, Batch], list[torch.Tensor]]
Counts = Callable[[Batch], list[int]]


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """The loss of a head: one or more terms, each a sum and a count."""

    sums: Sums
    """Model output and batch → the sum of each term."""
    counts: Counts
    """Batch → how many things each term adds up."""
    leaves_out: bool = False
    """Whether what is labelled as ignored adds nothing, so that there may be any number of it."""
    takes_labels: bool = False
    """Whether the model is given its labels, to compute the loss itself."""
    splits: bool = True
    """Whether the losses of parts of a batch add up to the loss of the whole."""
    joint: "JointLoss | None" = None
    """The loss of the vectors of all texts, where no part of a batch has a loss of its own."""
    keeps_width: bool = False
    """Whether the model looks at padding too, so that parts of a batch must be as wide as the whole."""
    asks: dict[str, Any] = dataclass_field(default_factory=dict)
    """What else the model is asked to give, by keywords of its forward."""
    completes: "Callable[[Batch], Batch] | None" = None
    """Adds to a micro-batch, on its device, what the loss reads besides: the answers of a teacher in memory."""

    @staticmethod
    def custom(
        loss_fn: Callable[[Any, Batch], torch.Tensor], count_fn: Callable[[Batch], int], *, takes_labels: bool = False
    ) -> "HeadLoss":
        """A head of the user's: `loss_fn` gives a sum, `count_fn` what to divide it by."""
        return HeadLoss(
            lambda output, batch: [loss_fn(output, batch)],
            lambda batch: [count_fn(batch)],
            takes_labels=takes_labels,
        )

    def inputs(self, batch: Batch) -> Batch:
        """What of a batch the model is given."""
        inputs = batch if self.takes_labels else model_inputs(batch)
        return inputs | self.asks if self.asks else inputs


def model_inputs(batch: Batch) -> Batch:
    """A batch without its labels: the head is asked for logits, and the loss is summed here."""
    return {name: value for name, value in batch.items() if name not in LABELS}


def needs_labels(model: torch.nn.Module) -> bool:
    """Whether forward cannot be called without labels."""
    parameters = parameters_of(model) or {}
    return any(parameters[name].default is parameters[name].empty for name in LABELS & set(parameters))


def mean_of(loss: HeadLoss, output: Any, batch: Batch) -> torch.Tensor:
    """The mean loss of a batch that is not split."""
    if loss.joint is not None:
        return loss.joint.of_vectors(loss.joint.vectors_of(output), loss.joint.labels)
    terms = [s / n for s, n in zip(loss.sums(output, batch), loss.counts(batch), strict=True) if n]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def loss_to_learn_from(model: torch.nn.Module, output: Any, batch: Batch) -> torch.Tensor:
    """The loss of a plain loop: the model's own, or what the labels call for; of an encoder alone, a mean.

    Raises:
        WorkloadError: there is none.
    """
    own = loss_of(output)
    if own is not None:
        return own
    features = None if LABELS & set(batch) else first_tensor(output)
    return mean_of(head_loss(model, batch), output, batch) if features is None else features.float().mean()


def head_loss(model: torch.nn.Module, batch: Batch, task: str | None = None) -> HeadLoss:
    """The loss that the labels of a batch call for, as the heads of transformers compute it.

    Args:
        task: is asked first; None goes through all tasks until one knows the labels.

    Raises:
        WorkloadError: no labels that a task knows.
    """
    asked = all_tasks() if task is None else (find_task(task), *all_tasks())
    labelled = {name: value for name, value in batch.items() if name not in TARGETS}
    found = next((loss for one in asked if (loss := one.loss(model, labelled)) is not None), None)
    if found is not None and (len(labelled) < len(batch) or hasattr(model, "_teaching")):
        from vramfit.tasks.parts.distilled import taught

        return taught(found, model, batch)
    if found is None:
        missing = [name for name in asked[0].labels[:1] if task is not None and name not in batch] or ["labels"]
        raise WorkloadError([f"the batch has no {missing[0]}, so there is nothing to learn"])
    family = getattr(getattr(model, "config", None), "model_type", None)
    return replace(found, keeps_width=True) if family in READ_PADDING else found


def problem_type(model: torch.nn.Module, labels: torch.Tensor) -> str:
    """What a classification head of transformers learns: as its configuration says, or guessed as it guesses."""
    config: Any = getattr(model, "config", None)
    named: str | None = getattr(config, "problem_type", None)
    if named:
        return named
    if getattr(config, "num_labels", 2) == 1 and (labels.dim() == 1 or labels.shape[1:] == (1,)):
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def only_labels(batch: Batch) -> torch.Tensor | None:
    """The labels of a batch that has no others than `labels`."""
    return batch["labels"] if LABELS & set(batch) == {"labels"} else None


def are_per_token(model: torch.nn.Module, labels: torch.Tensor) -> bool:
    """Whether labels are a class for each token."""
    return labels.dim() == PER_TOKEN and problem_type(model, labels) == "single_label_classification"


def judges_every_token(model: torch.nn.Module) -> bool:
    """Whether it is ELECTRA's discriminator: one logit a token, and every token counts."""
    return hasattr(model, "discriminator_predictions")


def num_labelled(labels: torch.Tensor) -> int:
    """By numpy: torch would wake all its threads for so little."""
    return labels.numel() if labels.device.type == "meta" else int(np.count_nonzero(labels.cpu().numpy() != IGNORED))


def attended(mask: torch.Tensor) -> Any:
    """An attention mask as an array of the host that says which tokens count."""
    return (mask.bool() if mask.is_floating_point() else mask).cpu().numpy() != 0


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """The sum over what is not ignored."""
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=ignored)


def token_labels_loss(model: torch.nn.Module, batch: Batch) -> HeadLoss | None:
    """A class for each token, where a batch has no other labels and no discriminator reads them; else None.

    Tokens that are not ignored count.
    """
    labels = only_labels(batch)
    if labels is None or not are_per_token(model, labels) or judges_every_token(model):
        return None
    return HeadLoss(token_sums, lambda batch: [num_labelled(batch["labels"])], leaves_out=True)


def token_sums(output: Any, batch: Batch) -> list[torch.Tensor]:
    """Of logits of classes, or of one logit a token: then labels are yes or no, and the mask says which count."""
    logits, labels = logits_of(output), batch["labels"]
    if logits.dim() == PER_TOKEN:
        weight = batch["attention_mask"].to(logits.dtype) if "attention_mask" in batch else None
        return [F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), weight, reduction="sum")]
    return [cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))]


def class_loss() -> HeadLoss:
    """A class for each sample."""
    return HeadLoss(
        lambda output, batch: [cross_entropy(logits_of(output), batch["labels"])],
        lambda batch: [num_labelled(batch["labels"])],
        leaves_out=True,
    )


def regression_loss() -> HeadLoss:
    """Numbers: the mean square of what they are off by, which are not rounded to a model's 16 bits."""

    def sums(output: Any, batch: Batch) -> list[torch.Tensor]:
        logits = _at_least_fp32(logits_of(output))
        return [F.mse_loss(logits.squeeze(), batch["labels"].squeeze().to(logits.dtype), reduction="sum")]

    return HeadLoss(sums, lambda batch: [batch["labels"].numel()])


def multi_label_loss() -> HeadLoss:
    """Any number of classes for each sample: a yes or no for each."""

    def sums(output: Any, batch: Batch) -> list[torch.Tensor]:
        logits = _at_least_fp32(logits_of(output))
        return [F.binary_cross_entropy_with_logits(logits, batch["labels"].to(logits.dtype), reduction="sum")]

    return HeadLoss(sums, lambda batch: [batch["labels"].numel()])


def _at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def smoothed_loss(smoothing: float) -> Callable[[Any, Batch], torch.Tensor]:
    """The loss of a classification head, of sequences or tokens, with a share of each label spread over all classes."""

    def loss(output: Any, batch: Batch) -> torch.Tensor:
        logits, labels = output.logits, batch["labels"]
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            reduction="sum",
            ignore_index=IGNORED,
            label_smoothing=smoothing,
        )

    return loss


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss that a model has computed itself; None where it gives none."""
    named = field(output, "loss")
    if isinstance(named, torch.Tensor) and named.numel() == 1:
        return named
    first = output[0] if isinstance(output, list | tuple) and output else output
    return first if isinstance(first, torch.Tensor) and first.dim() == 0 else None


def logits_of(output: Any, name: str = "logits") -> torch.Tensor:
    """The logits in what a model gives.

    Args:
        name: of a head with several, which are always named.

    Raises:
        WorkloadError: there are none.
    """
    named = field(output, name)
    if isinstance(named, torch.Tensor):
        return named
    found = None if name != "logits" else first_tensor(output)
    if found is None:
        raise WorkloadError([f"forward gives {described(output)}, in which there are no {name}"], hint=CONTRACT)
    return found


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first tensor of what a model gives that is more than one number."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    )
    return next((v for v in values if isinstance(v, torch.Tensor) and v.dim()), None)


def field(output: Any, name: str) -> Any:
    """What an object or a mapping has under a name; None for nothing."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def parameters_of(model: torch.nn.Module) -> Mapping[str, inspect.Parameter] | None:
    """What forward takes by name; None where it takes anything."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return {name: p for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL}


def taken_by(model: torch.nn.Module, batch: Batch) -> Batch:
    """The part of a batch that forward takes."""
    parameters = parameters_of(model)
    return batch if parameters is None else {name: value for name, value in batch.items() if name in parameters}


def described(output: Any) -> str:
    """What a model gives, in words."""
    kind = type(output).__name__
    if isinstance(output, Mapping):
        return f"a {kind} of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, list | tuple):
        return f"a {kind} of {', '.join(type(value).__name__ for value in output) or 'nothing'}"
    return f"a {kind}" if not isinstance(output, torch.Tensor) else f"a tensor of shape {list(output.shape)}"
