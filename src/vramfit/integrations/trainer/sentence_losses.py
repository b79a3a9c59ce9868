"""Models and losses of sentence-transformers: the encoder inside, its head as an `EmbeddingHead`, and which losses
are exact for any split and which are refused.

A loss of this package is a function of the vectors of a batch's texts. Those that vramfit computes as well, to the same
values and gradients, become a `Contrast`. A cached loss is the same function as the plain one of its name: caching is
what a step does here for all of them.

The head that follows the encoder has the modules of the SentenceTransformer in it, so what learns is theirs. The
encoder gives vectors of texts inside steps only; an evaluation and a save see the model as sentence-transformers made
it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from vramfit.tasks.parts.contrastive import num_scores
from vramfit.tasks.parts.pooling import NAME, Contrast, EmbeddingHead, attach
from vramfit.tasks.parts.sentence_head import MODES

PACKAGE = "sentence_transformers"
LAYERS = ("Dense", "LayerNorm", "Normalize")
VECTOR = "sentence_embedding"
"""What its modules call the vector of a text."""
NAMES_OF_VECTOR = ("module_input_name", "module_output_name")
HIDDEN = ("last_hidden_state", ["last_hidden_state"], ("last_hidden_state",))


class Shared(torch.nn.Module):
    """A module of sentence-transformers that takes a vector of each text and gives another."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.module({VECTOR: vectors})[VECTOR]
        return made


def is_of_package(value: Any) -> bool:
    """Whether an object is of a class of sentence-transformers, or of one derived from such a class."""
    return any(kind.__module__.partition(".")[0] == PACKAGE for kind in type(value).__mro__)


def is_sentence_model(model: Any, kind: str = "SentenceTransformer") -> bool:
    """Whether it is a SentenceTransformer, or a model of another kind; a sparse encoder is none."""
    names = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.partition(".")[0] == PACKAGE]
    return names[:1] == [kind]


def encoder_in(model: Any) -> Any:
    """The encoder of transformers inside a SentenceTransformer; any other model is given back."""
    if not is_sentence_model(model):
        return model
    from transformers import PreTrainedModel

    first = next(iter(model.children()), None)
    found = getattr(first, "model", None) or getattr(first, "auto_model", None)
    return found if isinstance(found, PreTrainedModel) else model


def read_head(model: Any) -> EmbeddingHead | str:
    """What makes vectors of texts out of the encoder's outputs; or why that is not known, in words."""
    if encoder_in(model) is model:
        return f"{type(model).__name__} has no encoder of transformers as its first module"
    first, *others = model.children()
    text = getattr(first, "modality_config", {}).get("text", {})
    if text.get("method", "forward") != "forward" or text.get("method_output_name", HIDDEN[0]) not in HIDDEN:
        return f"{type(first).__name__} pools something else than the encoder's last hidden states"
    if not others or type(others[0]).__name__ != "Pooling":
        return "no Pooling follows the encoder"
    mode = others[0].pooling_mode if hasattr(others[0], "pooling_mode") else others[0].get_pooling_mode_str()
    if mode not in MODES:
        return f"pooling {mode} is none of {', '.join(MODES)}"
    odd = [part for part in others[1:] if not _is_layer(part)]
    if odd:
        return f"the module {type(odd[0]).__name__} after pooling is none of {', '.join(LAYERS)}"
    layers = others[1:]
    normalizes = bool(layers) and type(layers[-1]).__name__ == "Normalize"
    inner = layers[:-1] if normalizes else layers
    return EmbeddingHead(MODES[mode], normalizes=normalizes, layers=[Shared(part) for part in inner])


def _is_layer(part: Any) -> bool:
    """Whether a module takes nothing but the vector of a text, and changes nothing else."""
    names = {getattr(part, name, VECTOR) for name in NAMES_OF_VECTOR}
    return is_of_package(part) and type(part).__name__ in LAYERS and names == {VECTOR}


@contextmanager
def giving_vectors(encoder: Any, head: EmbeddingHead) -> Iterator[None]:
    """Inside, an encoder gives vectors of texts."""
    hook = attach(encoder, head)
    try:
        yield
    finally:
        hook.remove()
        delattr(encoder, NAME)


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


class Refused(Exception):
    """Why a loss is not known for any split, in words that follow its name."""


def sentence_losses(trainer: Any) -> dict[str, Any]:
    """Losses by dataset, of a trainer of sentence-transformers with one for all under ""; empty for other trainers."""
    if not is_of_package(trainer):
        return {}
    loss = getattr(trainer, "loss", None)
    losses = loss if isinstance(loss, dict) else {"": loss}
    return {name: one for name, one in losses.items() if isinstance(one, torch.nn.Module)}


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
    return read(loss, num_texts, normalizes)


def _is_of_losses(loss: Any) -> bool:
    """Whether it is of the package itself, for vectors of texts: a class derived from one may compute anything."""
    package, _, rest = type(loss).__module__.partition(".")
    return package == PACKAGE and rest.partition(".")[0] in ("sentence_transformer", "losses")


def _function(name: str) -> Any:
    return getattr(import_module(f"{PACKAGE}.util"), name)


def _in_batch(loss: Any, num_texts: int, normalizes: bool) -> TextLoss:
    if loss.similarity_fct is not _function("cos_sim") and not (
        normalizes and loss.similarity_fct is _function("dot_score")
    ):
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
    contrast = Contrast(loss=kind, num_texts=num_texts, temperature=1 / loss.scale)
    return TextLoss(name=type(loss).__name__, contrast=contrast)


def _metric(loss: Any, wanted: str) -> None:
    found = loss.get_config_dict()["distance_metric"]
    if found != wanted:
        raise Refused(f"measures distances by {found}: only {wanted} is known for any split")


def _triplet(loss: Any, num_texts: int, normalizes: bool) -> TextLoss:
    _metric(loss, "TripletDistanceMetric.EUCLIDEAN")
    contrast = Contrast(loss="triplet", num_texts=num_texts, margin=float(loss.triplet_margin))
    return TextLoss(name=type(loss).__name__, contrast=contrast)


def _contrastive(loss: Any, num_texts: int, normalizes: bool) -> TextLoss:
    _metric(loss, "SiameseDistanceMetric.COSINE_DISTANCE")
    if not loss.size_average:
        raise Refused("adds its samples up: take size_average=True")
    contrast = Contrast(loss="contrastive", num_texts=num_texts, margin=float(loss.margin))
    return TextLoss(name=type(loss).__name__, contrast=contrast)


def _in_order(kind: str, similarity: str) -> Callable[[Any, int, bool], TextLoss]:
    def read(loss: Any, num_texts: int, normalizes: bool) -> TextLoss:
        if loss.similarity_fct is not _function(similarity):
            raise Refused(f"compares by another function than {similarity}")
        contrast = Contrast(loss=kind, num_texts=num_texts, temperature=1 / loss.scale)
        return TextLoss(name=type(loss).__name__, contrast=contrast)

    return read


def _margin_mse(loss: Any, num_texts: int, normalizes: bool) -> TextLoss:
    if loss.similarity_fct is not _function("pairwise_dot_score") and not (
        normalizes and loss.similarity_fct is _function("pairwise_cos_sim")
    ):
        raise Refused("compares by another function than pairwise_dot_score")
    return TextLoss(name=type(loss).__name__, contrast=Contrast(loss="margin-mse", num_texts=num_texts))


def _cosine(loss: Any, num_texts: int, normalizes: bool) -> TextLoss:
    """Planned as `contrastive`, which compares the same cosines with the same scores."""
    is_usual = type(loss.loss_fct) is torch.nn.MSELoss and loss.loss_fct.reduction == "mean"
    if not is_usual or type(loss.cos_score_transformation) is not torch.nn.Identity:
        raise Refused("has a loss_fct or a cos_score_transformation of its own: MSELoss and Identity are known")
    own = getattr(loss, "compute_loss_from_embeddings", None)
    if own is None:
        raise Refused("of this version of sentence-transformers is no function of vectors: take 6.1 or later")
    return TextLoss(name=type(loss).__name__, contrast=Contrast(loss="contrastive", num_texts=num_texts), own=own)


KNOWN: dict[str, Callable[[Any, int, bool], TextLoss]] = {
    "MultipleNegativesRankingLoss": _in_batch,
    "MultipleNegativesSymmetricRankingLoss": _in_batch,
    "CachedMultipleNegativesRankingLoss": _in_batch,
    "CachedMultipleNegativesSymmetricRankingLoss": _in_batch,
    "TripletLoss": _triplet,
    "ContrastiveLoss": _contrastive,
    "CoSENTLoss": _in_order("cosent", "pairwise_cos_sim"),
    "AnglELoss": _in_order("angle", "pairwise_angle_sim"),
    "MarginMSELoss": _margin_mse,
    "CosineSimilarityLoss": _cosine,
}
"""Class → what it computes, or why not."""


def settings_of(contrast: Contrast) -> Iterator[tuple[str, Any]]:
    """What a plan is to know of a loss, as keywords of a workload."""
    yield "texts", contrast.num_texts
    yield "loss", contrast.loss
    if contrast.margin is not None:
        yield "loss_margin", contrast.margin
    if contrast.dims:
        yield "matryoshka", contrast.dims
