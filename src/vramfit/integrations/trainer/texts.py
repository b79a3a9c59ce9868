"""`TextSteps`: steps of a trainer of sentence-transformers, whose loss compares the texts of a batch.

A batch of the trainer has a tensor of tokens for each column. It becomes one row for each text, a sample's texts one
after the other, and a loss of all vectors: passes of any size give the gradient of the undivided batch.

A loss of sentence-transformers is a function of these vectors. Those that vramfit computes as well, to the same values
and gradients, become a `Contrast`. A cached loss is the same function as the plain one of its name: caching is what a
step does here for all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.integrations.trainer.models import (
    PACKAGE,
    encoder_in,
    giving_vectors,
    is_sentence_model,
    read_head,
    sentence_losses,
)
from vramfit.integrations.trainer.rows import collated, rows_of_texts
from vramfit.step.plain import Batch
from vramfit.tasks.parts.contrastive import check_contrast, num_scores
from vramfit.tasks.parts.joint import loss_of_texts, width_of
from vramfit.tasks.parts.losses import HeadLoss
from vramfit.tasks.parts.pooling import Contrast, EmbeddingHead


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLoss:
    """A loss of sentence-transformers as vramfit computes it."""

    name: str
    """Of its class."""
    contrast: Contrast
    """How texts are compared, and what is planned for."""
    own: Callable[[list[torch.Tensor], torch.Tensor | None], torch.Tensor] | None = None
    """The loss's own function of vectors, a tensor for each text of a sample; None where `contrast` says all."""

    @property
    def is_scored(self) -> bool:
        """Whether it reads the labels of a batch."""
        return num_scores(self.contrast) > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSteps:
    """How the steps of a trainer compare texts."""

    loss: TextLoss
    compared: int
    """Samples that are compared with each other: a batch of the script's. A step is the mean over its batches."""

    def read(self, trainer: Any, inputs: Any, head: EmbeddingHead) -> tuple[Batch, HeadLoss]:
        """The rows of a batch of the trainer, and their loss."""
        features, labels = trainer.collect_features(dict(inputs))
        encoder = encoder_in(trainer.model)
        batch = rows_of_texts(features, encoder)
        scores = {} if labels is None or not self.loss.is_scored else {"labels": self._scores(labels)}
        return batch, self._loss(loss_of_texts(head, encoder, batch | scores))

    def _scores(self, labels: torch.Tensor) -> torch.Tensor:
        """A row for each text, which repeats that of its sample."""
        how, scores = self.loss.contrast, labels.float()
        if how.loss == "margin-mse" and scores.dim() > 1 and scores.shape[1] == how.num_texts - 1:
            scores = scores[:, :1] - scores[:, 1:]  # of the positive and of each negative, not the margins
        if scores.dim() > 1 and scores.shape[1] == 1:
            scores = scores[:, 0]
        return scores.repeat_interleave(how.num_texts, 0)

    def _loss(self, whole: HeadLoss) -> HeadLoss:
        """The loss of a step: of all texts, or the mean over batches that the script compares each by itself."""
        joint = whole.joint
        assert joint is not None
        of_vectors = joint.of_vectors if self.loss.own is None else self._own
        num_rows = self.compared * self.loss.contrast.num_texts
        if joint.num_texts <= num_rows:
            return replace(whole, joint=replace(joint, of_vectors=of_vectors))

        def by_batch(vectors: torch.Tensor, labels: Batch) -> torch.Tensor:
            parts = [slice(begin, begin + num_rows) for begin in range(0, len(vectors), num_rows)]
            losses = [of_vectors(vectors[part], {name: v[part] for name, v in labels.items()}) for part in parts]
            return torch.stack(losses).mean()

        return replace(whole, joint=replace(joint, of_vectors=by_batch))

    def _own(self, vectors: torch.Tensor, labels: Batch) -> torch.Tensor:
        """By the loss's own function."""
        how, own = self.loss.contrast, self.loss.own
        assert own is not None
        texts = vectors.reshape(-1, how.num_texts, vectors.shape[-1])
        scores = labels["labels"][:: how.num_texts] if labels else None
        cut = [F.normalize(texts[..., :dim], dim=-1) for dim in how.dims] or [texts]
        return torch.stack([own(list(one.unbind(1)), scores) for one in cut]).sum()


def read_texts(trainer: Any) -> tuple[TextSteps | None, list[str]]:
    """How a trainer compares texts; or why its steps cannot be kept right, everything by name.

    Args:
        trainer: of sentence-transformers.
    """
    problems = list(_obstacles(trainer))
    head = read_head(trainer.model) if is_sentence_model(trainer.model) else None
    if isinstance(head, str):
        problems.append(f"{type(trainer.model).__name__}: {head}")
    losses = sentence_losses(trainer)
    if len(losses) > 1 or "" not in losses:
        names = ", ".join(type(loss).__name__ for loss in losses.values())
        return None, [*problems, f"a loss for each dataset ({names}): one loss is fitted at a time"]
    if problems or not isinstance(head, EmbeddingHead):
        return None, problems
    features, labels = collated(trainer, trainer.train_dataset, range(min(2, len(trainer.train_dataset))))
    name = type(losses[""]).__name__
    try:
        loss = read_loss(losses[""], num_texts=len(features), normalizes=head.normalizes)
    except Refused as reason:
        return None, [f"{name} {reason}"]
    steps = TextSteps(loss=loss, compared=trainer.args.train_batch_size)
    width = width_of(head, encoder_in(trainer.model))
    given = 0 if labels is None else steps._scores(labels).shape[1:].numel()
    problems += [f"{name}: {problem}" for problem in check_contrast(loss.contrast, num_given=given, width=width)]
    if loss.contrast.loss == "triplet" and len(features) != 3:
        problems.append(f"{name} takes an anchor, a positive and a negative, and a sample has {len(features)} texts")
    return steps, problems


def _obstacles(trainer: Any) -> Iterator[str]:
    """What stands in the way whatever the loss is."""
    model, args, dataset = trainer.model, trainer.args, trainer.train_dataset
    if not is_sentence_model(model):
        yield f"{type(model).__name__} of sentence-transformers: its memory is not predicted"
        return
    if "compute_loss" in vars(trainer) or not type(trainer).compute_loss.__module__.startswith(PACKAGE):
        yield f"{type(trainer).__name__} has a compute_loss of its own, which would not be asked"
    if isinstance(dataset, dict):
        yield f"several datasets ({', '.join(map(str, dataset))}): give one, whose samples all have the same columns"
    elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        yield "the train_dataset has no length, so that nobody can tell how long its texts are: give a Dataset"
    if getattr(model.tokenizer, "padding_side", "right") != "right":
        yield "texts are padded on the left, and a step reads them from the left: set padding_side to right"
    skips_prompts = any(not getattr(part, "include_prompt", True) for part in model.children())
    if skips_prompts and getattr(args, "prompts", None):
        yield "pooling leaves prompts out (include_prompt=False), which a step does not"
    own = trainer.accelerator.unwrap_model(model)
    for loss in sentence_losses(trainer).values():
        if any(is_sentence_model(one) and one is not own for one in loss.modules()):
            yield f"{type(loss).__name__} has another model than the trainer's in it, whose memory is not predicted"
    sampler = str(getattr(args, "batch_sampler", "batch_sampler")).rpartition(".")[2].lower()
    if args.gradient_accumulation_steps > 1 and sampler != "batch_sampler":
        yield (
            f"gradient_accumulation_steps {args.gradient_accumulation_steps} with batch_sampler {sampler}: it would "
            f"draw other batches for a step as a whole; set per_device_train_batch_size to "
            f"{args.train_batch_size * args.gradient_accumulation_steps} and gradient_accumulation_steps to 1, which "
            "compares the whole step and takes no more memory once it is fitted"
        )


@contextmanager
def comparing(trainer: Any, head: EmbeddingHead | None) -> Iterator[None]:
    """Inside, the encoder of a trainer gives vectors of texts; nothing is changed without a head."""
    if head is None:
        yield
        return
    with giving_vectors(encoder_in(trainer.model), head):
        yield


def make_head(trainer: Any, steps: TextSteps) -> EmbeddingHead:
    """What makes vectors of the encoder's outputs; its modules are those of the trainer's model."""
    head = read_head(trainer.model)
    assert isinstance(head, EmbeddingHead)
    head.contrast = steps.loss.contrast
    return head


CACHED = "CachedMultipleNegatives", "CachedGIST"
NEGATIVES = "MultipleNegatives", "GIST"
ACROSS_SAMPLES = (
    *CACHED,
    *NEGATIVES,
    "CoSENT",
    "AnglE",
    "OnlineContrastive",
    "BatchHard",
    "BatchSemiHard",
    "BatchAll",
    "MegaBatch",
    "ContrastiveTensionLossInBatch",
)
"""How the names of losses begin that look at all samples of a batch together."""
BOTH_WAYS = {"query_to_doc", "doc_to_query"}
REASONS = {
    "GIST": "asks a guide model, whose memory is not predicted",
    "CachedGIST": "asks a guide model, whose memory is not predicted",
    "OnlineContrastive": "picks the hard pairs of a batch by their distances",
    "Batch": "compares texts by their labels",
    "Softmax": "has a classifier of its own",
    "AdaptiveLayer": "reads the outputs of all layers",
    "Matryoshka2d": "reads the outputs of all layers",
}
"""How the name of a loss begins → why it is refused."""


class Refused(Exception):
    """Why a loss is not known for any split, in words that follow its name."""


def is_across(loss: Any) -> bool:
    """Whether a loss, or one that it wraps, is known to compare the samples of a batch with each other."""
    return any(type(module).__name__.startswith(ACROSS_SAMPLES) for module in loss.modules())


def cached_in(loss: Any) -> Any:
    """The loss that splits its batches by itself; None where there is none."""
    return next((module for module in loss.modules() if type(module).__name__.startswith(CACHED)), None)


def is_known(loss: Any) -> bool:
    """Whether a loss is one of those that vramfit computes, as far as its name says."""
    inner = getattr(loss, "loss", loss) if type(loss).__name__ == "MatryoshkaLoss" else loss
    return type(inner).__name__ in KNOWN and _is_of_losses(inner)


def has_negatives(loss: Any) -> bool:
    """Whether the texts of other samples are taken for negatives."""
    return any(type(module).__name__.startswith((*CACHED, *NEGATIVES)) for module in loss.modules())


def read_loss(loss: Any, *, num_texts: int, normalizes: bool) -> TextLoss:
    """A loss as vramfit computes it.

    Args:
        num_texts: of a sample.
        normalizes: whether the vectors of the model have unit length, so that dot products are cosines.

    Raises:
        Refused: it is another function, or nobody knows.
    """
    name = type(loss).__name__
    if name == "MatryoshkaLoss" and _is_of_losses(loss):
        inner = read_loss(loss.loss, num_texts=num_texts, normalizes=True)  # vectors that are cut have unit length
        if set(loss.matryoshka_weights) != {1} or loss.n_dims_per_step > 0:
            raise Refused("weighs its dimensions, or draws some of them in each step: take all, with weights of 1")
        dims = tuple(int(dim) for dim in loss.matryoshka_dims)
        return replace(inner, name=f"{name} of {inner.name}", contrast=replace(inner.contrast, dims=dims))
    read = KNOWN.get(name) if _is_of_losses(loss) else None
    if read is None:
        start = next((begin for begin in REASONS if name.startswith(begin)), None)
        raise Refused(REASONS[start] if start and _is_of_losses(loss) else "is no loss that vramfit computes")
    contrast = replace(read(loss, normalizes), num_texts=num_texts)
    return TextLoss(name=name, contrast=contrast, own=loss.compute_loss_from_embeddings if read is _cosine else None)


def _is_of_losses(loss: Any) -> bool:
    """Whether it is of the package itself, for vectors of texts: a class derived from one may compute anything."""
    package, _, rest = type(loss).__module__.partition(".")
    return package == PACKAGE and rest.partition(".")[0] in ("sentence_transformer", "losses")


def _compares_by(loss: Any, *names: str) -> bool:
    """Whether its similarity is one of these functions of the package."""
    functions = import_module(f"{PACKAGE}.util")
    return any(loss.similarity_fct is getattr(functions, name) for name in names)


def _in_batch(loss: Any, normalizes: bool) -> Contrast:
    if not _compares_by(loss, "cos_sim", *(["dot_score"] if normalizes else [])):
        raise Refused(
            "compares by another function than cos_sim, or than dot_score on vectors of unit length (add Normalize)"
        )
    if getattr(loss, "hardness_mode", None) is not None and loss.hardness_strength > 0:
        raise Refused(f"weighs negatives by hardness_mode {loss.hardness_mode}: leave it out")
    ways = set(getattr(loss, "directions", ("query_to_doc",)))
    is_both = ways == BOTH_WAYS and loss.partition_mode == "per_direction"
    if ways != {"query_to_doc"} and not is_both:
        raise Refused(
            f"compares {', '.join(sorted(ways))} with partition_mode {loss.partition_mode}: take query_to_doc alone, "
            "or query_to_doc and doc_to_query with partition_mode='per_direction'"
        )
    kind = "in-batch-symmetric" if is_both or "Symmetric" in type(loss).__name__ else "in-batch"
    return Contrast(loss=kind, temperature=1 / loss.scale)


def _metric(loss: Any, wanted: str) -> None:
    found = loss.get_config_dict()["distance_metric"]
    if found != wanted:
        raise Refused(f"measures distances by {found}: only {wanted} is known for any split")


def _triplet(loss: Any, normalizes: bool) -> Contrast:
    _metric(loss, "TripletDistanceMetric.EUCLIDEAN")
    return Contrast(loss="triplet", margin=float(loss.triplet_margin))


def _contrastive(loss: Any, normalizes: bool) -> Contrast:
    _metric(loss, "SiameseDistanceMetric.COSINE_DISTANCE")
    if not loss.size_average:
        raise Refused("adds its samples up: take size_average=True")
    return Contrast(loss="contrastive", margin=float(loss.margin))


def _in_order(loss: Any, normalizes: bool) -> Contrast:
    kind, similarity = IN_ORDER[type(loss).__name__]
    if not _compares_by(loss, similarity):
        raise Refused(f"compares by another function than {similarity}")
    return Contrast(loss=kind, temperature=1 / loss.scale)


def _margin_mse(loss: Any, normalizes: bool) -> Contrast:
    if not _compares_by(loss, "pairwise_dot_score", *(["pairwise_cos_sim"] if normalizes else [])):
        raise Refused("compares by another function than pairwise_dot_score")
    return Contrast(loss="margin-mse")


def _cosine(loss: Any, normalizes: bool) -> Contrast:
    """Planned as `contrastive`, which compares the same cosines with the same scores."""
    is_usual = type(loss.loss_fct) is torch.nn.MSELoss and loss.loss_fct.reduction == "mean"
    if not is_usual or type(loss.cos_score_transformation) is not torch.nn.Identity:
        raise Refused("has a loss_fct or a cos_score_transformation of its own: MSELoss and Identity are known")
    if not hasattr(loss, "compute_loss_from_embeddings"):
        raise Refused("of this version of sentence-transformers is no function of vectors: take 6.1 or later")
    return Contrast(loss="contrastive")


IN_ORDER = {"CoSENTLoss": ("cosent", "pairwise_cos_sim"), "AnglELoss": ("angle", "pairwise_angle_sim")}
KNOWN: dict[str, Callable[[Any, bool], Contrast]] = {
    "MultipleNegativesRankingLoss": _in_batch,
    "MultipleNegativesSymmetricRankingLoss": _in_batch,
    "CachedMultipleNegativesRankingLoss": _in_batch,
    "CachedMultipleNegativesSymmetricRankingLoss": _in_batch,
    "TripletLoss": _triplet,
    "ContrastiveLoss": _contrastive,
    **dict.fromkeys(IN_ORDER, _in_order),
    "MarginMSELoss": _margin_mse,
    "CosineSimilarityLoss": _cosine,
}
"""Class → what it computes, or why not."""


def settings_of(contrast: Contrast) -> dict[str, Any]:
    """What a plan is to know of a loss, as keywords of a workload."""
    asked = {"loss_margin": contrast.margin, "matryoshka": contrast.dims or None}
    known = {"texts": contrast.num_texts, "loss": contrast.loss}
    return known | {name: value for name, value in asked.items() if value is not None}
