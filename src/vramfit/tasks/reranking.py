"""Reranking: a score for a query and a candidate, learned from the candidates of a query or from scored pairs."""

from collections.abc import Iterator, Sequence
from typing import Any

from vramfit.tasks.base import References, Rows, zeros
from vramfit.tasks.parts import texts
from vramfit.tasks.parts.reading import (
    Asked,
    BadValue,
    Columns,
    Encoded,
    LabelNames,
    Reference,
    Row,
    Tokenizing,
    encode_texts,
)
from vramfit.tasks.parts.results import place_of, rounded
from vramfit.units import counted

FORMS = {"listwise": (texts.NEGATIVES,), "bce": (texts.NEGATIVES, texts.SCORED), "margin-mse": (texts.MARGINS,)}
"""Loss → what it learns from."""
USUAL = {texts.NEGATIVES: "listwise", texts.SCORED: "bce"}
AS_CROSS_ENCODER = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}


class Reranking(texts.TaskOfTexts):
    """A sample is a query with its candidates; each candidate goes through the model beside the query."""

    name = "reranking"
    title = "Reranking"
    rank = 75
    auto_class = "AutoModelForSequenceClassification"
    shares_head_names = pools_sequences = ranks_candidates = True
    answers = ("logits",)
    losses = tuple(FORMS)
    joint_losses = ("listwise", "margin-mse")
    says = AS_CROSS_ENCODER
    num_texts = (2, texts.MOST_TEXTS)
    naming_texts = "name them: --text-column QUERY,POSITIVE,NEGATIVE"
    request_forms = ('{"text": "a query", "text_pair": "a candidate"}',)
    request_fields = (("text", "text_pair"), ("query", "text"))
    takes_bare_text = False

    def num_labels(self, names: Sequence[str] = ()) -> int | None:
        return 1

    def recognises(self, config: Any) -> bool:
        """As sentence-transformers saves a CrossEncoder, now and before version 4."""
        marks = ("sentence_transformers", "sbert_ce_default_activation_function")
        return getattr(config, "num_labels", 0) == 1 and any(getattr(config, mark, None) is not None for mark in marks)

    def finish_model(self, model: Any, parts: Any) -> None:
        """Saved with its configuration, so that a CrossEncoder gives scores from 0 to 1 too."""
        if getattr(model.config, "sentence_transformers", None) is None:
            vars(model.config).update(self.says)

    def fewest_texts(self, loss: str) -> int:
        return 1 if loss == "bce" else 2

    def texts_problems(self, loss: str, num_texts: int) -> Iterator[str]:
        if loss != "bce" and num_texts < 2:
            has = counted(num_texts, "candidate")
            yield f"loss {loss} compares the candidates of a query, which has {has}: take texts 2 or more"

    def learn_by(self, model: Any, how: Any) -> None:
        model._comparison = how

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        import torch

        from vramfit.tasks.parts import joint

        num = joint.num_scores(joint.comparison_of(model))
        labels = torch.zeros((batch, num) if num > 1 else (batch,), device=device)
        return {"text_rows": torch.arange(batch, device=device), "text_ids": zeros(device, batch), "labels": labels}

    def loss(self, model: Any, batch: Any) -> Any:
        from vramfit.tasks.parts import joint

        is_own = "text_rows" in batch and "labels" in batch and hasattr(model, "_comparison")
        return joint.loss_of_candidates(model, batch) if is_own else None

    def numbers_per_sample(self, num_labels: int, seq: int, vocab_size: int) -> tuple[int, int]:
        return 1, 1

    def columns_wanted(self, *, labels: bool) -> str:
        return "a query and its candidates, or a scored pair" if labels else "a query and its candidates"

    def choose_columns(self, asked: Asked) -> Columns | None:
        return texts.choose_columns(asked, (), texts.Forms(FORMS, USUAL))

    def read_row(self, row: Row, columns: Columns, labels: LabelNames) -> Reference:
        read = super().read_row(row, columns, labels)
        if columns.form == texts.SCORED and not 0 <= read["scores"][0] <= 1:
            score = f"{columns.label} is {read['scores'][0]:g}, and scores are from 0 to 1"
            raise BadValue(score, hint="divide the scores by the largest one")
        return read

    def data_settings(self, references: References, loss: str | None) -> dict[str, Any]:
        first = references[0]
        usual = texts.SCORED if first["num_texts"] == 1 else texts.NEGATIVES
        return {"texts": first["num_texts"], "loss": loss or USUAL[usual]}

    def encode(self, references: References, how: Tokenizing) -> Iterator[Encoded]:
        """Every candidate beside its query; its `place` is that among the `num_texts` candidates of its row."""
        for made in encode_texts(_apart(references), how):
            yield made._replace(labels=_truth(made.reference))

    def text_ids(self, references: References) -> Sequence[int]:
        return range(len(references))

    def metrics(self, how: Tokenizing, references: References) -> Any:
        from vramfit.tasks.parts import head_metrics

        is_scored = references[0]["num_texts"] == 1
        return head_metrics.ScoredPairs() if is_scored else head_metrics.RankedCandidates()

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`score`, from 0 to 1; `column`, where a row has several candidates."""
        scores = output.logits[:, 0].float().sigmoid().tolist()
        return [
            place_of(reference) | texts.column_of(reference) | {"score": rounded(score)}
            for score, reference in zip(scores, references, strict=True)
        ]


def _apart(references: References) -> list[Reference]:
    made = []
    for reference in references:
        query, *candidates = reference["texts"]
        for place, candidate in enumerate(candidates):
            made.append(reference | {"texts": (query, candidate), "place": place, "num_texts": len(candidates)})
    return made


def _truth(reference: Reference) -> Sequence[float]:
    """The score of a pair, the margins of all negatives, or whether a candidate is the positive."""
    scores: Sequence[float] | None = reference.get("scores")
    return scores if scores is not None else (float(reference["place"] == 0),)


TASK = Reranking()
