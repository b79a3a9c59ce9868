"""Sentence embedding: a vector for a text, learned from texts that belong together and texts that do not.

`HeadParts` is what a sentence-transformers folder says of the head: pooling, layers after it, and what is kept beside
them; plain data, read in `models/sentence_folder.py`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramfit.tasks.base import SINGLE_TEXTS, References, Rows, zeros
from vramfit.tasks.parts import texts
from vramfit.tasks.parts.reading import Asked, Columns, Encoded, LabelNames, Reference, Tokenizing, encode_texts
from vramfit.tasks.parts.results import place_of
from vramfit.units import counted, shown

LOSSES = ("in-batch", "in-batch-symmetric", "triplet", "contrastive", "cosent", "angle", "margin-mse")
"""In-batch negatives, one way and both; then by the names they are known by."""
OF_PAIRS = ("contrastive", "cosent", "angle")
"""Losses of two texts and the score of the two."""
OF_NEGATIVES = ("triplet", "margin-mse")
"""Losses that compare an anchor's positive with its negatives, and know no others."""
SCORED = (*OF_PAIRS, "margin-mse")
"""Losses that read scores beside texts."""
MODES = {"cls": "cls", "max": "max", "mean": "mean", "weightedmean": "weighted-mean", "lasttoken": "last"}
"""Pooling in sentence-transformers → here."""
JOINED = "+"
"""Between the names of poolings whose vectors are joined end to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPart:
    """A module after pooling."""

    kind: str
    """`Dense`, `LayerNorm` or `Normalize`, as sentence-transformers calls it."""
    folder: Path | None = None
    """Where its configuration and its weights lie."""
    in_features: int = 0
    out_features: int = 0
    bias: bool = True
    activation: str = "Identity"
    """A class of `torch.nn`."""

    @property
    def has_weights(self) -> bool:
        """Whether it has a file of weights."""
        return self.kind != "Normalize"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadParts:
    """All modules after the encoder, in order."""

    pooling: str = "mean"
    """One of `POOLINGS`, or several of them with `JOINED` between."""
    layers: tuple[LayerPart, ...] = (LayerPart(kind="Normalize"),)
    includes_prompt: bool = True
    """Whether the tokens of a prompt are pooled too."""
    max_length: int | None = None
    """Tokens at which texts are cut."""
    lowers_case: bool = False
    """Whether texts are lowered before they are tokenized."""
    settings: str = field(default="", repr=False)
    """What config_sentence_transformers.json holds, prompts and similarity: kept, and written back."""

    @property
    def dims(self) -> int | None:
        """Numbers that are kept of a vector, from its start; None for all. Training sees all of them."""
        found = json.loads(self.settings or "{}").get("truncate_dim")
        return found if type(found) is int and found > 0 else None


class Embedding(texts.TaskOfTexts):
    """See the module."""

    name = "embedding"
    title = "Sentence embedding"
    rank = 70
    auto_class = "AutoModel"
    has_head = False
    gives_vectors = True
    answers = ("embedding",)
    pools_itself = True
    losses = joint_losses = LOSSES
    num_texts = (1, texts.MOST_TEXTS)
    naming_texts = "name them: --text-column ANCHOR,POSITIVE"

    def fewest_texts(self, loss: str) -> int:
        return 3 if loss in OF_NEGATIVES else 2

    def texts_problems(self, loss: str, num_texts: int) -> Iterator[str]:
        if loss in OF_PAIRS and num_texts != 2:
            yield f"loss {loss} compares the two texts of a pair, and a sample has {num_texts}: take texts 2"
        if loss in LOSSES[:2] and num_texts < 2:
            yield f"loss {loss} needs an anchor and a positive, and a sample has 1 text: take texts 2 or more"
        if loss in OF_NEGATIVES and num_texts < 3:
            has = counted(num_texts, "text")
            needs = f"loss {loss} needs an anchor, a positive and a negative"
            yield f"{needs}, and a sample has {has}: take texts 3 or more"

    def learn_by(self, model: Any, how: Any) -> None:
        from vramfit.tasks.parts import pooling

        head = pooling.head_of(model)
        if head is not None:
            head.contrast = how

    def finish_model(self, model: Any, parts: HeadParts | None) -> None:
        from vramfit.tasks.parts import pooling

        usual = HeadParts(pooling="last" if _sees_only_before(model) else "mean")
        pooling.attach(model, pooling.make_head(parts or usual, getattr(model.config, "hidden_size", None)))

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        import torch

        from vramfit.tasks.parts import contrastive, pooling

        head = pooling.head_of(model)
        labels = {"text_rows": torch.arange(batch, device=device), "text_ids": zeros(device, batch)}
        num_scores = 0 if head is None else contrastive.num_scores(head.contrast)
        return labels | ({"labels": torch.zeros(batch, num_scores, device=device)} if num_scores else {})

    def loss(self, model: Any, batch: Any) -> Any:
        from vramfit.tasks.parts import joint, pooling

        head = pooling.head_of(model)
        return None if head is None or "text_rows" not in batch else joint.loss_of_texts(head, model, batch)

    def numbers_per_sample(self, num_labels: int, seq: int, vocab_size: int) -> tuple[int, int]:
        return 0, 0

    def columns_wanted(self, *, labels: bool) -> str:
        return "pairs of texts, or a text and its class" if labels else "the text"

    def choose_columns(self, asked: Asked) -> Columns | None:
        return texts.choose_columns(asked, SINGLE_TEXTS)

    def check_labels(self, file: str, labels: LabelNames, num_rows: int, *, has_others: bool) -> None:
        texts.check_classes(file, labels, num_rows)

    def unusable(self, references: References) -> dict[int, str]:
        return texts.alone_in_class(references)

    def nothing_to_learn(self, references: References) -> str | None:
        """Whether an anchor has but one text to be compared with: its own positive. Negatives never equal it."""
        if "group" in references[0]:
            return None  # of its class, which `check_labels` looks at
        is_scored = "scores" in references[0]
        compared = (text for text in _apart(references) if is_scored or text["place"] > 0)
        first = next(compared)
        if any(_identity(text) != _identity(first) for text in compared):
            return None
        what = (
            "all texts are the same" if is_scored else "every anchor has the same positive, so that no negatives remain"
        )
        return f"{what} ({shown(first['texts'][0])})"

    def data_settings(self, references: References, loss: str | None) -> dict[str, Any]:
        first = references[0]
        usual = texts.USUAL[texts.SCORED if "scores" in first else texts.PAIRS]
        return {"texts": 2 if "group" in first else first["num_texts"], "loss": loss or usual}

    def encode(self, references: References, how: Tokenizing) -> Iterator[Encoded]:
        """Every text by itself; its reference has its `place` among the `num_texts` of its row."""
        for made in encode_texts(_apart(references), how):
            yield made._replace(labels=made.reference.get("scores", ()))

    def text_ids(self, references: References) -> Sequence[int]:
        """Of its class, of its id, or else of the text."""
        return [_number(_identity(reference)) for reference in references]

    def metrics(self, how: Tokenizing, references: References) -> Any:
        from vramfit.tasks.parts import vector_metrics

        first = references[0]
        if "group" in first:
            return vector_metrics.ClassRetrieval()
        is_pair = first["num_texts"] == 2  # those with margins are searched for as all others
        return vector_metrics.PairScores() if "scores" in first and is_pair else vector_metrics.PairRetrieval()

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`embedding`: one vector a text; `column`, where a row has several."""
        vectors = output.embedding.float().tolist()
        return [
            place_of(reference) | texts.column_of(reference) | {"embedding": vector}
            for vector, reference in zip(vectors, references, strict=True)
        ]


def _sees_only_before(model: Any) -> bool:
    """Whether only a text's last token has seen all of it."""
    causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
    return causal and not getattr(model.config, "is_encoder_decoder", False)


def _apart(references: References) -> Iterator[Reference]:
    for reference in references:
        several: tuple[str, ...] = reference["texts"]
        for place, text in enumerate(several):
            yield reference | {"texts": (text,), "place": place, "num_texts": len(several)}


def _identity(reference: Reference) -> tuple[Any, ...]:
    if "group" in reference:
        return "class", reference["group"]
    place = reference["place"]
    own = reference["ids"][place] if "ids" in reference else None
    # queries and documents are counted by themselves
    return ("text", reference["texts"][0]) if own is None else ("id", place > 0, own)


def _number(identity: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(identity).encode(), digest_size=8).digest(), "big", signed=True)


TASK = Embedding()
