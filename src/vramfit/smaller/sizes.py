"""How large a model is: parameters, bytes on disk, and the memory that it is predicted to take."""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.models.anatomy import encoder_layers, vocab_size
from vramfit.smaller.folder import weights_bytes

if TYPE_CHECKING:
    from vramfit.runtime.trained import TrainedModel

BATCH, SEQ = 32, 128
"""Of the predictions: samples, and tokens of each where the model takes so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One model's."""

    vocabulary: int
    """Rows of its word embedding."""
    num_parameters: int
    encoder_parameters: int
    """Of the layers alone: neither embeddings nor head."""
    file_bytes: int
    """Of all files with weights; 0 where the model is no folder."""
    serving_bytes: int | None
    """Reserved on a GPU at most, as predicted, for a batch of `batch` × `seq` tokens in fp32."""
    training_bytes: int | None
    """The same for training with AdamW; None for an encoder that has nothing to learn by."""
    batch: int
    seq: int


def sizes_of(trained: "TrainedModel", model: Any) -> Sizes:
    """How large a loaded model is."""
    seq = min(SEQ, trained.max_length)
    layers = encoder_layers(model)
    return Sizes(
        vocabulary=vocab_size(model) or 0,
        num_parameters=sum(p.numel() for p in model.parameters()),
        encoder_parameters=sum(p.numel() for layer in layers for p in layer.parameters()),
        file_bytes=weights_bytes(trained.model),
        serving_bytes=_predicted(trained, seq, "infer"),
        training_bytes=_predicted(trained, seq, "train"),
        batch=BATCH,
        seq=seq,
    )


def _predicted(trained: "TrainedModel", seq: int, mode: str) -> int | None:
    if mode == "train" and trained.kind.why_no_loss is not None:
        return None
    job: dict[str, Any] = {"task": trained.task, "mode": mode, "batch": BATCH, "seq": seq}
    with suppress(VramfitError):  # a model that runs and cannot be traced has no prediction
        return estimate(trained.model, trust_remote_code=trained.trust_remote_code, **job).safe_reserved_bytes
    return None
