"""Losses of a student that learns from a teacher's answers, as sums with counts beside those of the labels.

The teacher's answers come with each batch, as tensors whose names begin with `teacher_`: logits, vectors, scores and
hidden states that were computed before; or a teacher that is held adds them to every micro-batch. Every term is a sum
over samples or tokens, divided by the count of the whole batch, so that any split of a batch has the gradient of the
whole. Losses that compare all texts of a step take the teacher's term where they take their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.tasks import Task, find_task
from vramfit.tasks.base import IGNORED, PER_TOKEN
from vramfit.tasks.parts.joint import PLACES, JointLoss, comparison_of, width_of
from vramfit.tasks.parts.losses import (
    HIDDEN,
    OF_LAYERS,
    RELATIONS,
    TARGETS,
    Batch,
    HeadLoss,
    attended,
    logits_of,
    num_labelled,
    problem_type,
    target_name,
)
from vramfit.tasks.parts.pooling import head_of

LOGITS = target_name("logits")
VECTORS = target_name("embedding")
PROJECTION = "teacher_projection"
"""The module that maps hidden states of a student to those of a wider or narrower teacher."""
Term = tuple[Callable[[Any, Batch], torch.Tensor], Callable[[Batch], int]]
"""A sum over samples or tokens, and how many these are."""


class Held(Protocol):
    """A teacher in memory: see `techniques.teachers`."""

    model: torch.nn.Module
    names: frozenset[str]
    answers_tokens: bool

    def complete(self, batch: Batch) -> Batch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Teaching:
    """How a student learns from its teacher."""

    temperature: float
    alpha: float
    """Share of the teacher's terms; the labels have the rest."""
    hidden_width: int | None = None
    """Numbers of the teacher's hidden states; None where those are not compared."""
    relation_heads: int | None = None
    """Heads that queries, keys and values are divided into to be compared; None where they are not."""
    held: Held | None = None
    """The teacher, where every pass asks it; None where its answers come with the batch."""


def teach(model: Any, how: Teaching) -> None:
    """Keep with a model how it learns from its teacher."""
    model._teaching = how


def teaching_of(model: Any) -> Teaching | None:
    """How a model learns from its teacher; None where it has none."""
    found: Teaching | None = getattr(model, "_teaching", None)
    return found


def meta_targets(model: Any, task: str, sizes: tuple[int, int], device: Any, *, num_packed: int = 0) -> Batch:
    """A teacher's answers for a batch without data; none for a model without a teacher.

    Args:
        sizes: sequences, and tokens of the longest.
        num_packed: tokens of the row in which all sequences lie end to end; 0 where each has its own.
    """
    how = teaching_of(model)
    if how is None or how.held is not None:
        return {}
    kind, by_token = find_task(task), (1, num_packed) if num_packed else sizes
    shape: tuple[int, ...] = (sizes[0], answer_width(model, kind))
    if kind.answers_tokens:
        shape = sizes if kind.reads_windows else (*by_token, answer_width(model, kind))
    made = {target_name(name): torch.zeros(shape, device=device) for name in kind.answers}
    if how.hidden_width is not None:
        width = int(model.config.num_hidden_layers) * how.hidden_width
        with _disable_current_modes():  # read from the disk, they wait on the host: a trace sees what a pass brings
            made[HIDDEN] = torch.zeros(*by_token, width, dtype=torch.float16, device=device)
    return made


def answer_width(model: Any, kind: Task) -> int:
    """Numbers of an answer, of a sample or of a token."""
    if kind.gives_vectors:
        head = head_of(model)
        assert head is not None
        return width_of(head, model)
    return 1 if kind.reads_windows or kind.ranks_candidates else int(model.config.num_labels)


def add_projection(model: Any, width: int) -> None:
    """Have a model learn a map from its hidden states to those of a teacher with another width; it is not saved."""
    if hasattr(model, PROJECTION):
        return
    like = next(model.parameters())
    setattr(model, PROJECTION, torch.nn.Linear(int(model.config.hidden_size), width, bias=False, device=like.device))


def taught(own: HeadLoss, model: Any, batch: Batch) -> HeadLoss:
    """The loss of a student: that of its labels, and the teacher's beside it, where there is a teacher to answer.

    Args:
        own: of the labels.
        batch: with the answers, unless the teacher is held.
    """
    how = teaching_of(model)
    names = (TARGETS & set(batch)) | (frozenset() if how is None or how.held is None else how.held.names)
    if not names:
        return own
    assert how is not None, "a batch has a teacher's answers, and its model no teacher"
    if own.joint is not None:
        return replace(own, joint=_joint(own.joint, model, how, batch))
    terms = _terms(model, batch, how, names)
    reads_labels = how.alpha < 1

    def sums(output: Any, part: Batch) -> list[torch.Tensor]:
        hard = [value * (1 - how.alpha) for value in own.sums(output, part)] if reads_labels else []
        return hard + [total(output, part) * how.alpha for total, _ in terms]

    def counts(part: Batch) -> list[int]:
        return (own.counts(part) if reads_labels else []) + [count(part) for _, count in terms]

    asks = {} if how.hidden_width is None else {"output_hidden_states": True}
    completes = None if how.held is None else how.held.complete
    return replace(own, sums=sums, counts=counts, leaves_out=False, asks=asks, completes=completes)


def _terms(model: Any, batch: Batch, how: Teaching, names: frozenset[str]) -> list[Term]:
    """The teacher's terms.

    Args:
        names: of its answers, those of a micro-batch too.
    """
    of_places = sorted(names - {LOGITS, VECTORS} - OF_LAYERS)
    hidden: list[Term] = [] if how.hidden_width is None else [(partial(_hidden, model), _num_tokens)]
    if how.relation_heads is not None:
        hidden.append((partial(_relations, how.relation_heads), _num_tokens))
    if of_places:
        return [*((partial(_places, how.temperature, name), _num_rows) for name in of_places), *hidden]
    if batch[LOGITS].dim() > PER_TOKEN if how.held is None else how.held.answers_tokens:
        return [(partial(_tokens, how.temperature), lambda part: num_labelled(part["labels"])), *hidden]
    problem = "multi_label_classification" if PLACES in batch else problem_type(model, batch["labels"])
    width = 1 if PLACES in batch else int(model.config.num_labels)
    if problem == "multi_label_classification":
        return [(partial(_yes_or_no, how.temperature), lambda part: _num_rows(part) * width), *hidden]
    if problem == "regression":
        return [(_numbers, lambda part: _num_rows(part) * width), *hidden]
    return [(partial(_classes, how.temperature), _num_rows), *hidden]


def _num_rows(part: Batch) -> int:
    return int(part["input_ids"].shape[0])


def _num_tokens(part: Batch) -> int:
    mask = part.get("attention_mask")
    if mask is None or mask.device.type == "meta":
        return part["input_ids"].numel()
    return int(attended(mask).sum())


def divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """By how much a student's probabilities differ from its teacher's (Kullback-Leibler), of each row.

    Times the square of the temperature: gradients are then as large as those of labels, whatever it is.
    """
    own, given = (F.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
    return (given.exp() * (given - own)).sum(-1) * temperature**2


def _classes(temperature: float, output: Any, part: Batch) -> torch.Tensor:
    return divergence(logits_of(output), part[LOGITS], temperature).sum()


def _tokens(temperature: float, output: Any, part: Batch) -> torch.Tensor:
    """Of tokens that have a label."""
    each = divergence(logits_of(output), part[LOGITS], temperature)
    return (each * (part["labels"] != IGNORED)).sum()


def _places(temperature: float, name: str, output: Any, part: Batch) -> torch.Tensor:
    """Half of what the start counts, or the end; places outside of a text have minus infinity and count nothing."""
    own, given = logits_of(output, name.removeprefix(target_name(""))), part[name]
    width = min(own.shape[1], given.shape[1])
    own, given = own[:, :width].float(), given[:, :width]
    outside = given.isinf()
    least = torch.finfo(torch.float32).min / 2
    return divergence(own.masked_fill(outside, least), given.masked_fill(outside, least), temperature).sum() / 2


def _yes_or_no(temperature: float, output: Any, part: Batch) -> torch.Tensor:
    """Each label or score by itself: by how much the probability of a yes differs."""
    own, given = logits_of(output).float() / temperature, part[LOGITS] / temperature
    certain = F.binary_cross_entropy_with_logits(given, given.sigmoid(), reduction="sum")
    return (F.binary_cross_entropy_with_logits(own, given.sigmoid(), reduction="sum") - certain) * temperature**2


def _numbers(output: Any, part: Batch) -> torch.Tensor:
    return F.mse_loss(logits_of(output).float(), part[LOGITS], reduction="sum")


def _hidden(model: Any, output: Any, part: Batch) -> torch.Tensor:
    """The mean square of what hidden states are off by, layer by layer, summed over tokens and layers."""
    states, given = output.hidden_states[1:], part[HIDDEN]
    assert len(states) == model.config.num_hidden_layers, "a student's layers are not all there"
    mask, project = part.get("attention_mask"), getattr(model, PROJECTION, torch.nn.Identity())
    total = given.new_zeros((), dtype=torch.float32)
    for own, wanted in zip(states, given.chunk(len(states), -1), strict=True):
        each = (project(own).float() - wanted.float()).square().mean(-1)
        total = total + (each if mask is None else each * mask).sum()
    return total


def _relations(num_heads: int, output: Any, part: Batch) -> torch.Tensor:
    """By how much tokens differ in what they are related to (MiniLMv2), by queries, keys and values in turn.

    The mean over heads, summed over the three and over tokens.
    """
    total = part[RELATIONS].new_zeros((), dtype=torch.float32)
    for own, wanted in zip(output.relations, part[RELATIONS].chunk(3, -1), strict=True):
        (own, mask), (wanted, _) = in_rows(own, part), in_rows(wanted, part)
        student, teacher = (related(each, mask, num_heads) for each in (own, wanted))
        each = (teacher.exp() * (teacher - student)).sum(-1).mean(1)
        total = total + (each if mask is None else each * mask).sum()
    return total


def in_rows(values: torch.Tensor, part: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values of tokens with a row for each sequence, and which of them are of tokens; None: all of them."""
    if part.get("cu_seq_lens_q") is None or part.get("max_length_q") is None:
        return values, part.get("attention_mask")
    ends, longest = part["cu_seq_lens_q"], int(part["max_length_q"])
    inside = torch.arange(longest, device=ends.device) < ends.long().diff()[:, None]
    rows = values.new_zeros((len(ends) - 1, longest, values.shape[-1]))
    return rows.masked_scatter(inside[..., None], values[0]), inside


def related(values: torch.Tensor, mask: torch.Tensor | None, num_heads: int) -> torch.Tensor:
    """Logarithms of how much each token is related to each other one, a head after the other."""
    num, length, width = values.shape
    heads = values.view(num, length, num_heads, width // num_heads).transpose(1, 2)
    scores = (heads @ heads.transpose(2, 3)).float() * (width // num_heads) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None, :] == 0, torch.finfo(torch.float32).min)
    return F.log_softmax(scores, -1)


def _joint(joint: JointLoss, model: Any, how: Teaching, batch: Batch) -> JointLoss:
    """A loss of all vectors or scores of a step, with the teacher's beside it."""
    name = LOGITS if LOGITS in batch else VECTORS

    def of_vectors(vectors: torch.Tensor, here: Batch) -> torch.Tensor:
        given = here[name]
        if name == VECTORS:
            soft = (F.normalize(vectors, dim=-1) - F.normalize(given, dim=-1)).square().sum(-1).mean()
        else:
            num_texts = comparison_of(model).num_texts
            own, wanted = vectors.reshape(-1, num_texts), given.reshape(-1, num_texts)
            soft = divergence(own, wanted, how.temperature).mean()
        if how.alpha == 1:
            return soft
        labels = {other: value for other, value in here.items() if other not in TARGETS}
        return how.alpha * soft + (1 - how.alpha) * joint.of_vectors(vectors, labels)

    return replace(joint, labels={**joint.labels, name: batch[name]}, of_vectors=of_vectors)
