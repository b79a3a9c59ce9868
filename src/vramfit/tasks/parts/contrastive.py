"""Losses of the vectors of a batch's texts; each is a function of all of them at once.

`vectors` has a row for each sample, its texts in order, and their numbers: samples × texts × width, in fp32. The first
text of a sample is its anchor, the second its positive, later ones are its negatives.

Values and gradients are those of the losses of sentence-transformers 6.2. What differs is memory: similarities exist
for `BLOCK_NUMBERS` pairs at a time, and backward computes them again. Shapes alone decide what is called, so that a
trace without data sees what a run does; sums are written in operators whose temporaries a trace sees.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from vramfit.tasks.embedding import LOSSES, SCORED, TASK
from vramfit.tasks.parts.pooling import Contrast
from vramfit.units import counted

Labels = Mapping[str, torch.Tensor]
IN_BATCH = LOSSES[:2]
BLOCK_NUMBERS = 2**24
"""Most numbers of a block of similarities: 64 MiB."""
MOST_BLOCKS = 1024
"""Of more than 131,072 samples, blocks are larger: still less than their vectors, up to millions of them."""
SHORTEST = 1e-12
"""Vectors shorter than this count as this long, as in `torch.nn.functional.normalize`."""
MARGINS = {"triplet": 5.0, "contrastive": 0.5}


def contrast_loss(vectors: torch.Tensor, labels: Labels, how: Contrast) -> torch.Tensor:
    """The mean loss over the samples; with `how.dims`, the sum of those of vectors cut to each of these lengths.

    Args:
        labels: `text_ids`, a number for each text that equal texts share (samples × texts); where samples are scored,
            `labels`: a row for each sample, which each of its texts may repeat: the score of a pair, or a margin for
            each negative.
    """
    losses = [_loss(vectors, labels, how, width) for width in how.dims or (None,)]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def check_contrast(how: Contrast, *, num_given: int, width: int) -> list[str]:
    """What is wrong with a loss for a model and its data, in sentences.

    Args:
        num_given: scores of a sample; 0 where there are none.
        width: numbers of a vector.
    """
    problems = list(TASK.texts_problems(how.loss, how.num_texts))
    wanted = num_scores(how)
    if wanted and num_given != wanted:
        found = counted(num_given, "score") if num_given else "none"
        problems.append(f"loss {how.loss} needs {counted(wanted, 'score')} for each sample, which has {found}")
    too_long = [dim for dim in how.dims if dim > width]
    if too_long:
        problems.append(f"matryoshka {','.join(map(str, too_long))}: vectors of this model have {width} numbers")
    return problems


def num_scores(how: Contrast) -> int:
    """Scores that a loss reads of each sample."""
    if how.loss not in SCORED:
        return 0
    return max(how.num_texts - 2, 1)


def _loss(vectors: torch.Tensor, labels: Labels, how: Contrast, width: int | None) -> torch.Tensor:
    if how.loss in IN_BATCH:
        return _apply(_InBatch, vectors, labels.get("text_ids"), how, width)
    compare, weigh = PER_SAMPLE[how.loss]
    values = _apply(_ByAnchor, vectors, compare if width is None else partial(_cut, compare, width))
    return weigh(values, _scores(labels["labels"], how) if how.loss in SCORED else values, how)


def _scores(given: torch.Tensor, how: Contrast) -> torch.Tensor:
    """A row for each sample."""
    by_sample, wanted = given.reshape(len(given), -1), num_scores(how)
    assert by_sample.shape[1] in (wanted, wanted * how.num_texts), f"{how.loss}: scores of shape {given.shape}"
    return by_sample[:, :wanted]


def _apply(function: Any, *args: Any) -> torch.Tensor:
    made: torch.Tensor = function.apply(*args)
    return made


def _blocks(num_rows: int, row_numbers: int) -> Iterator[slice]:
    """Rows in turn, so many at a time as make a block; of very many rows more, so that blocks are not too many."""
    step = max(BLOCK_NUMBERS // row_numbers, -(-num_rows // MOST_BLOCKS), 1)
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def _logsumexp_(x: torch.Tensor) -> torch.Tensor:
    """Of each row; `x` is overwritten. A row of minus infinities gives the same."""
    top = x.amax(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
    return x.sub_(top).exp_().sum(1).log_().add_(top[:, 0])


@dataclass(frozen=True, slots=True)
class _Side:
    """A text of each sample that is to find another one of its own sample among those of all samples."""

    query: int
    own: int
    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Similarities:
    """Cosines of texts by the temperature, a block at a time, in place of matrices of all of them."""

    vectors: torch.Tensor
    """Cut to their width."""
    scales: torch.Tensor
    """What makes each vector one of unit length: no copy of all of them is."""
    ids: torch.Tensor | None
    how: Contrast

    def queries(self, side: _Side, rows: slice) -> torch.Tensor:
        """Vectors of unit length."""
        return self.vectors[rows, side.query] * self.scales[rows, side.query, None]

    def block(self, queries: torch.Tensor, side: _Side, text: int, rows: slice) -> torch.Tensor:
        """Rows of queries, and a column for each sample's `text`; minus infinity where it is left out."""
        made = torch.mm(queries, self.vectors[:, text].T).mul_(self.scales[:, text])
        left_out = self._left_out(made, side, text, rows)
        if left_out is not None:
            if text == side.own:
                left_out.diagonal(rows.start).fill_(False)
            made.masked_fill_(left_out, -torch.inf)
        return made.div_(self.how.divisor)

    def _left_out(self, cosines: torch.Tensor, side: _Side, text: int, rows: slice) -> torch.Tensor | None:
        """Candidates that are no negatives: too similar, or equal to the query or to what it is to find.

        A text that another sample's equal query is to find is one that this query may find as well.
        """
        above, ids = self.how.mask_above, self.ids
        found = None if above is None else cosines > above
        if ids is None:
            return found
        pairs = [(text, side.own), (text, side.query)]
        if text == side.own:
            pairs.append((side.query, side.query))
        for of_candidate, of_query in pairs:
            equal = ids[rows, of_query, None] == ids[:, of_candidate]
            found = equal if found is None else found.logical_or_(equal)
        return found


class _InBatch(torch.autograd.Function):
    """Cross-entropy of each query over the texts of all samples; mean over samples and over sides."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, ids: torch.Tensor | None, how: Contrast, width: int | None) -> Any:
        similarities = _similarities(vectors, ids, how, width)
        sides, num_samples = _sides(how), len(vectors)
        logsums = vectors.new_empty(len(sides), num_samples)
        own = torch.empty_like(logsums)
        for place, side in enumerate(sides):
            for rows in _blocks(num_samples, _row_numbers(similarities)):
                own[place, rows], logsums[place, rows] = _own_and_logsum(similarities, side, rows)
        ctx.save_for_backward(vectors, ids, logsums)
        ctx.how, ctx.width = how, width
        return torch.sub(logsums, own).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        vectors, ids, logsums = ctx.saved_tensors
        similarities = _similarities(vectors, ids, ctx.how, ctx.width)
        gradient = torch.zeros_like(vectors)
        cut = gradient[..., : ctx.width]
        for side, of_side in zip(_sides(ctx.how), logsums, strict=True):
            for rows in _blocks(len(vectors), _row_numbers(similarities)):
                _add_gradients(cut, similarities, side, rows, of_side[rows, None])
        _through_lengths(cut, similarities)
        gradient.mul_(grads[0] / (logsums.numel() * ctx.how.divisor))
        return gradient, None, None, None


def _sides(how: Contrast) -> tuple[_Side, ...]:
    forward = _Side(query=0, own=1, candidates=tuple(range(1, how.num_texts)))
    return (forward, _Side(query=1, own=0, candidates=(0,))) if how.loss == "in-batch-symmetric" else (forward,)


def _similarities(vectors: torch.Tensor, ids: torch.Tensor | None, how: Contrast, width: int | None) -> _Similarities:
    cut = vectors[..., :width]
    scales = torch.linalg.vector_norm(cut, dim=-1).clamp_(min=SHORTEST).reciprocal_()
    return _Similarities(cut, scales, ids, how)


def _row_numbers(similarities: _Similarities) -> int:
    num_samples, _, width = similarities.vectors.shape
    return max(num_samples, width)


def _own_and_logsum(similarities: _Similarities, side: _Side, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The similarity of each query to its own text, and the logarithm of its sum over all candidates."""
    queries = similarities.queries(side, rows)
    own, logsums = queries[:, 0], []
    for text in side.candidates:
        block = similarities.block(queries, side, text, rows)
        if text == side.own:
            own = block.diagonal(rows.start).clone()
        logsums.append(_logsumexp_(block))
        del block  # before the next is made
    return own, logsums[0] if len(logsums) == 1 else _logsumexp_(torch.stack(logsums, 1))


def _add_gradients(
    gradient: torch.Tensor, similarities: _Similarities, side: _Side, rows: slice, logsums: torch.Tensor
) -> None:
    """Add what a block has for all vectors; each is divided by the vector's length already."""
    queries = similarities.queries(side, rows)
    vectors, scales = similarities.vectors, similarities.scales
    for text in side.candidates:
        block = similarities.block(queries, side, text, rows).sub_(logsums).exp_()
        if text == side.own:
            block.diagonal(rows.start).sub_(1)
        block.mul_(scales[:, text])
        of_queries = torch.mm(block, vectors[:, text]).mul_(scales[rows, side.query, None])
        gradient[rows, side.query].add_(of_queries)
        gradient[:, text].addmm_(block.T, queries)
        del block, of_queries


def _through_lengths(gradient: torch.Tensor, similarities: _Similarities) -> None:
    """Take from gradients what points along their vectors: lengths change no cosine."""
    vectors, scales = similarities.vectors, similarities.scales
    _, num_texts, width = vectors.shape
    for rows in _blocks(len(vectors), num_texts * width):
        along = (vectors[rows] * gradient[rows]).sum(-1).mul_(scales[rows]).mul_(scales[rows])
        gradient[rows].addcmul_(vectors[rows], along[..., None], value=-1)


Compare = Callable[[torch.Tensor], torch.Tensor]
"""Some samples' vectors → how each later text of a sample compares with its anchor."""


class _ByAnchor(torch.autograd.Function):
    """A comparison of all samples, a block of them at a time, which keeps nothing of it."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, compare: Compare) -> Any:
        num_samples, num_texts, width = vectors.shape
        made = vectors.new_empty(num_samples, num_texts - 1)
        for rows in _blocks(num_samples, num_texts * width):
            made[rows] = compare(vectors[rows])
        ctx.save_for_backward(vectors)
        ctx.compare = compare
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (vectors,) = ctx.saved_tensors
        _, num_texts, width = vectors.shape
        gradient = torch.empty_like(vectors)
        for rows in _blocks(len(vectors), num_texts * width):
            part = vectors[rows].detach().requires_grad_()
            with torch.enable_grad():
                made = ctx.compare(part)
            (gradient[rows],) = torch.autograd.grad(made, part, grads[0][rows])
            del made
        return gradient, None


def _cut(compare: Compare, width: int, x: torch.Tensor) -> torch.Tensor:
    """Vectors are cut and have unit length again, whatever compares them."""
    return compare(F.normalize(x[..., :width], dim=-1))


def _products(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :1] * x[:, 1:]).sum(-1)


def _cosines(x: torch.Tensor) -> torch.Tensor:
    return _products(F.normalize(x, dim=-1))


def _angles(x: torch.Tensor) -> torch.Tensor:
    """Absolute sums of cosines and sines, where the numbers of a vector's two halves are taken for complex numbers."""
    even = F.pad(x, (0, 1)) if x.shape[-1] % 2 else x
    units = F.normalize(even, dim=-1)
    first, last = units[:, :1].chunk(2, -1)
    turned = torch.cat([last, -first], -1)
    return ((units[:, :1] + turned) * units[:, 1:]).sum(-1).abs()


def _distances(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.linalg.vector_norm(x[:, :1] - x[:, 1:], dim=-1)
    return made


def _margin(how: Contrast) -> float:
    return MARGINS[how.loss] if how.margin is None else how.margin


def _triplet(distances: torch.Tensor, scores: torch.Tensor, how: Contrast) -> torch.Tensor:
    return F.relu(distances[:, :1] - distances[:, 1:] + _margin(how)).mean()


def _contrastive(cosines: torch.Tensor, scores: torch.Tensor, how: Contrast) -> torch.Tensor:
    distances, scores = 1 - cosines, scores.to(cosines.dtype)
    apart = F.relu(_margin(how) - distances).square()
    return (scores * distances.square() + (1 - scores) * apart).mean() / 2


def _margin_mse(products: torch.Tensor, scores: torch.Tensor, how: Contrast) -> torch.Tensor:
    return F.mse_loss(products[:, :1] - products[:, 1:], scores.to(products.dtype))


def _in_order(similarities: torch.Tensor, scores: torch.Tensor, how: Contrast) -> torch.Tensor:
    return _apply(_InOrder, similarities[:, 0] / how.divisor, scores[:, 0])


class _InOrder(torch.autograd.Function):
    """log(1 + Σ exp(x - y)) over all pairs of similarities of which x has the lower score."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scores: torch.Tensor) -> Any:
        logsums = x.new_zeros(1, len(x) + 1)  # the last one is for the 1
        for rows in _blocks(len(x), len(x)):
            logsums[0, rows] = _logsumexp_(_wrong_by(x, scores, rows))
        total = _logsumexp_(logsums)[0]
        ctx.save_for_backward(x, scores, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, scores, total = ctx.saved_tensors
        gradient = torch.zeros_like(x)
        for rows in _blocks(len(x), len(x)):
            shares = _wrong_by(x, scores, rows).sub_(total).exp_()
            gradient[rows].add_(shares.sum(1))
            gradient.sub_(shares.sum(0))
            del shares
        return gradient.mul_(grads[0]), None


def _wrong_by(x: torch.Tensor, scores: torch.Tensor, rows: slice) -> torch.Tensor:
    """By how much rows are above each other one; minus infinity where their score is not lower."""
    return (x[rows, None] - x).masked_fill_(scores[rows, None] >= scores, -torch.inf)


PER_SAMPLE: dict[str, tuple[Compare, Callable[[torch.Tensor, torch.Tensor, Contrast], torch.Tensor]]] = {
    "triplet": (_distances, _triplet),
    "contrastive": (_cosines, _contrastive),
    "cosent": (_cosines, _in_order),
    "angle": (_angles, _in_order),
    "margin-mse": (_products, _margin_mse),
}
"""Loss → how texts are compared with their anchor, and what becomes of that."""
