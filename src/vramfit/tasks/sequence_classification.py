"""Sequence classification: a class for a text or a pair of texts, several labels, or numbers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vramfit.errors import DataError
from vramfit.tasks.base import SINGLE_TEXTS, BatchRows, References, Rows, Task, zeros
from vramfit.tasks.parts import heads
from vramfit.tasks.parts.heads import MANY, MULTI_LABEL, OTHER_COLUMN, REGRESSION, SINGLE, is_decimal
from vramfit.tasks.parts.reading import BadValue, Columns, LabelNames, Reference, Row, Tokenizing, some_of, text_in
from vramfit.tasks.parts.results import ClassCounts, MeanLoss, best_labels, best_scores, class_losses, place_of, rounded
from vramfit.units import counted

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("question", "sentence"),
    ("question", "context"),
)


class SequenceClassification(Task):
    """See the module."""

    name = "sequence-classification"
    title = "Sequence classification"
    rank = 10
    auto_class = "AutoModelForSequenceClassification"
    is_trained = is_served = True
    has_classes = shares_head_names = True
    can_record = can_smooth = True
    pools_sequences = True
    has_problems = True
    max_scores = 1000
    answers = ("logits",)
    counts_samples = True
    num_texts = (1, 2)
    text_names = (*PAIRS, *((name,) for name in SINGLE_TEXTS))
    label_columns = (
        *("label", "labels", "intent", "category", "class", "target", "sentiment", "topic"),
        *("score", "scores", "rating", "stars", "similarity"),
    )
    truth = "label"
    takes_lists = False
    guesses_header = True
    request_forms = ('"a text"', '{"text": "…", "text_pair": "…"}')
    request_fields = (("text", "text_pair"), ("text",))

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        import torch

        config: Any = getattr(model, "config", None)
        if getattr(config, "problem_type", None) in (None, heads.PROBLEM_TYPES[SINGLE]):
            return {"labels": zeros(device, batch)}
        return {"labels": torch.zeros(batch, config.num_labels, device=device)}

    def loss(self, model: Any, batch: Any) -> Any:
        from vramfit.tasks.parts import losses

        labels = losses.only_labels(batch)
        if labels is None or losses.are_per_token(model, labels):
            return None
        problem = losses.problem_type(model, labels)
        kinds = {"regression": losses.regression_loss, "multi_label_classification": losses.multi_label_loss}
        return kinds.get(problem, losses.class_loss)()

    def numbers_per_sample(self, num_labels: int, seq: int, vocab_size: int) -> tuple[int, int]:
        return num_labels, 1

    def read_row(self, row: Row, columns: Columns, labels: LabelNames) -> Reference:
        """`texts`: one or two; `label`: what the row has for it, until `read_labels` knows what that means; or None."""
        return {"texts": tuple(text_in(row, c) for c in columns.texts), "label": heads.raw_label(row, columns)}

    def read_labels(self, references: References, columns: Columns, labels: LabelNames) -> Mapping[int, BadValue]:
        """`label`: a name, a tuple of names, or one of numbers."""
        return heads.read_labels(references, columns, labels)

    def class_names(self, labels: LabelNames, references: References) -> tuple[str, ...]:
        found = [r["label"] for r in references if r["label"] is not None]
        if labels.problem == REGRESSION:
            return labels.value_names
        if labels.problem == MULTI_LABEL:
            return labels.known or labels.marked or labels.names(name for names in found for name in names)
        return labels.names(found)

    def check_labels(self, file: str, labels: LabelNames, num_rows: int, *, has_others: bool) -> None:
        if not labels.are_given or labels.problem != SINGLE:
            return
        wrong = wrong_kind(labels.new, num_rows, labels.known)
        if wrong is not None:
            hint = f"give data with the labels that are known: {some_of(labels.known)}"
            hint = f"{hint}; or {OTHER_COLUMN}" if has_others else hint
            raise DataError(f"{file}: {wrong}", file=file, hint=hint)

    def data_settings(self, references: References, loss: str | None) -> dict[str, Any]:
        return {"problem": _problem(references[0])}

    def notes(self, labels: LabelNames, names: Sequence[str], num_rows: int) -> tuple[str, ...]:
        if labels.said:
            return (labels.said,)
        return labels.notes if labels.are_given or labels.problem != SINGLE else doubts(names, num_rows)

    def batch_labels(self, batch: Any, rows: BatchRows, hiding: Any) -> Any:
        if not rows.are_labelled:
            return {}
        num_labels, problem = len(rows.how.label_names), rows.how.problem
        if problem == MULTI_LABEL:
            return {"labels": rows.labels.marked(rows.indices, num_labels)}
        if problem == REGRESSION:
            return {"labels": rows.labels.columns(rows.indices, num_labels)}
        return {"labels": rows.labels.column(rows.indices, 0)}

    def metrics(self, how: Tokenizing, references: References) -> Any:
        problem = _problem(references[0])
        if problem == SINGLE:
            return ClassMetrics(len(how.label_names))
        from vramfit.tasks.parts import head_metrics

        if problem == REGRESSION:
            return head_metrics.NumberMetrics(how.label_names)
        return head_metrics.LabelMetrics(how.label_names, how.thresholds)

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`label` and `probability`; `labels` with theirs; `value`, or `values` by name."""
        if how.problem == REGRESSION:
            found = [_numbers(values, how.label_names) for values in output.logits.float().tolist()]
        elif how.problem == MULTI_LABEL:
            found = _labels(output.logits, references, how)
        else:
            found = _classes(output.logits, references, how.label_names)
        return [place_of(reference) | row for reference, row in zip(references, found, strict=True)]


def _problem(reference: Reference) -> str:
    """What a head learns from such a label."""
    label = reference["label"]
    if not isinstance(label, tuple):
        return SINGLE
    return REGRESSION if label and not isinstance(label[0], str) else MULTI_LABEL


def _classes(logits: Any, references: References, names: Sequence[str]) -> Rows:
    rows = []
    for reference, values, places in zip(references, *best_labels(logits, references), strict=True):
        row = {"label": names[places[0]], "probability": rounded(values[0])}
        top_k = reference.get("top_k")
        rows.append(row | {"scores": best_scores(values, places, names, top_k)} if top_k else row)
    return rows


def _labels(logits: Any, references: References, how: Tokenizing) -> Rows:
    """Labels from their thresholds on, the likeliest first."""
    rows, names = [], how.label_names
    least = how.thresholds or [0.5] * len(names)
    values, places = logits.float().sigmoid().sort(dim=-1, descending=True, stable=True)
    for reference, own, order in zip(references, values.tolist(), places.tolist(), strict=True):
        scores = best_scores(own, order, names, len(names))
        given = [s for s, value, place in zip(scores, own, order, strict=True) if value >= least[place]]
        top_k = reference.get("top_k")
        rows.append({"labels": given} | ({"scores": scores[:top_k]} if top_k else {}))
    return rows


def _numbers(values: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    if len(names) == 1:
        return {"value": rounded(values[0])}
    return {"values": {name: rounded(value) for name, value in zip(names, values, strict=True)}}


class ClassMetrics:
    """`accuracy`, `macro_f1`, `loss`; with two classes also `f1` of the second and `mcc`."""

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(self, num_labels: int) -> None:
        self._counts = ClassCounts(num_labels)
        self._loss = MeanLoss()

    def update(self, output: Any, batch: Any, references: References) -> None:
        labels = batch["labels"]
        self._loss.add(class_losses(output.logits, labels))
        self._counts.add(labels.tolist(), output.logits.argmax(-1).tolist())

    def merge(self, other: "ClassMetrics") -> None:
        self._counts.merge(other._counts)
        self._loss.merge(other._loss)

    def result(self) -> dict[str, float]:
        return self._counts.scores() | {"loss": self._loss.mean()}


def wrong_kind(rows: Mapping[str, int], num_rows: int, known: Collection[str] = ()) -> str | None:
    """What labels are that cannot be compared with a model's classes; None where they can.

    Args:
        rows: label → how many rows have it; of those that are not known.
        num_rows: of all labels.
        known: names of classes, whatever they look like.

    >>> wrong_kind({"toxic|insult": 2}, 7, ["toxic", "insult"])
    'the model gives each row one class, and 2 of 7 rows have several labels: toxic|insult'
    >>> wrong_kind({"1.0": 20, "1.5": 20, "2.0": 20, "Food, Drinks": 20}, 80)
    """
    several = heads.several_in(rows, known)
    if several:
        num_several = sum(rows[name] for name in several)
        what = f"{num_several:,} of {counted(num_rows, 'row')} {'has' if num_several == 1 else 'have'} several labels"
        return f"the model gives each row one class, and {what}: {some_of(several)}"
    if heads.are_decimals(rows):
        decimals = [name for name in rows if is_decimal(name)]
        what = f"{len(decimals):,} different decimals in {counted(num_rows, 'row')}: {some_of(decimals)}"
        return f"the model gives each row one class, and the labels are {what}"
    return None


def doubts(names: Sequence[str], num_rows: int) -> tuple[str, ...]:
    """What is strange about labels that were gathered from the data: decimals, or about as many as rows.

    >>> doubts(["0.5", "1.0", "2.5"], 300)[0].partition(":")[0]
    '3 labels in 300 rows, decimals among them (0.5, 2.5)'
    >>> doubts(["1.0", "2.0"], 300)
    ()
    """
    decimals = [name for name in names if is_decimal(name)]
    few_rows = len(names) >= MANY and num_rows < 2 * len(names)
    if not decimals and not few_rows:
        return ()
    counts = f"{counted(len(names), 'label')} in {counted(num_rows, 'row')}"
    if decimals:
        what = f"{counts}, decimals among them ({some_of(decimals)}): each becomes a class of its own"
        return (f"{what}; to predict numbers (regression): --problem regression; or {OTHER_COLUMN}",)
    return (f"{counts}: a class for nearly every row, of which little can be learned; take fewer, or {OTHER_COLUMN}",)


TASK = SequenceClassification()
