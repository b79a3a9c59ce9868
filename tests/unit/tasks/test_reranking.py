"""Rerankers: what is read, a group's gradient whatever the split, runs, and folders that a CrossEncoder opens."""

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import COMMON, LENGTH, VOCABULARY
from tests.unit.runtime.training.small_runs import BAD, GOOD, write_model
from transformers import AutoConfig, AutoModelForSequenceClassification

import vramfit
from vramfit.errors import CheckpointError, DataError, WorkloadError
from vramfit.models.resolve import SavedHead, saved_head
from vramfit.runtime.data.examples import read_examples
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.stepper import Stepper
from vramfit.runtime.trained import open_model
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.train import train
from vramfit.step.plain import Batch
from vramfit.step.splitting import Alone, Rows, passes_of
from vramfit.tasks.parts import head_metrics
from vramfit.tasks.parts.losses import head_loss, logits_of, model_inputs
from vramfit.techniques import packing
from vramfit.techniques.application import prepare
from vramfit.workload import Workload

NUM_QUERIES = 10
LOSSES = {"listwise": 3, "bce": 3, "margin-mse": 4}
"""Loss → candidates of a query."""


def make_model() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = COMMON | {"num_labels": 1, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.for_model("bert", **sizes)
    ).train()


def make_batch(loss: str) -> Batch:
    draw, num = torch.Generator().manual_seed(3), LOSSES[loss]
    rows = NUM_QUERIES * num
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (rows, 1), generator=draw)).long()
    ids = torch.randint(5, VOCABULARY, (rows, LENGTH), generator=draw) * mask
    labels = (torch.arange(rows) % num == 0).float()
    if loss == "margin-mse":
        labels = torch.rand(NUM_QUERIES, num - 1, generator=draw).repeat_interleave(num, 0)
    return {"input_ids": ids, "attention_mask": mask, "text_rows": torch.arange(rows), "labels": labels}


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_a_group_is_the_same_however_it_is_split(loss: str, attention: str) -> None:
    model, batch, packs = make_model(), make_batch(loss), attention == "packed"
    for micro_batch in (NUM_QUERIES, 4, 1):
        w = Workload(
            model="bert", task="reranking", loss=loss, texts=LOSSES[loss], batch=NUM_QUERIES,
            micro_batch=micro_batch, seq=LENGTH, loop="stepper", attention=attention,
        )  # fmt: skip
        prepare(model, w)
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), w)
        stepper.task = "reranking"
        torch.manual_seed(1)
        found = float(stepper.gradients(batch))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        how = head_loss(model, batch, "reranking")
        tokens = micro_batch * LOSSES[loss] * LENGTH
        parts, _ = passes_of(batch, how, tokens, Alone(), Rows(max_texts=micro_batch * w.row_texts) if packs else None)
        torch.manual_seed(1)
        model.zero_grad()
        value = undivided(model, loss, batch, parts, packs)
        value.backward()
        assert found == pytest.approx(float(value), rel=1e-5)
        scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
        for name, p in model.named_parameters():
            assert float((gradients[name] - p.grad).abs().max()) <= 1e-5 * scale, (micro_batch, name)


def undivided(model: Any, loss: str, batch: Batch, parts: Sequence[Batch], packs: bool) -> torch.Tensor:
    """All graphs alive at once, one loss by its definition, and the same random numbers."""
    made = [logits_of(model(**model_inputs(packing.pack(p, model) if packs else p)))[:, 0] for p in parts]
    order = torch.cat([p["text_rows"] for p in parts]).argsort()
    scores = torch.cat(made)[order]
    if loss == "bce":
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, batch["labels"])
    by_query = scores.view(NUM_QUERIES, -1)
    if loss == "listwise":
        return torch.nn.functional.cross_entropy(by_query, torch.zeros(NUM_QUERIES, dtype=torch.long))
    margins = batch["labels"].view(NUM_QUERIES, LOSSES[loss], -1)[:, 0]
    return ((by_query[:, :1] - by_query[:, 1:]) - margins).square().mean()


def test_a_loss_of_groups_needs_groups() -> None:
    with pytest.raises(WorkloadError, match="compares the candidates of a query, which has 1 candidate"):
        Workload(model="m", task="reranking", loss="listwise", texts=1)
    with pytest.raises(WorkloadError, match="loss cosent is not for reranking; it has listwise, bce, margin-mse"):
        Workload(model="m", task="reranking", loss="cosent")
    with pytest.raises(WorkloadError, match="loss bce is not for embedding"):
        Workload(model="m", task="embedding", loss="bce")


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("header", "row", "problem"),
    [
        (("query", "positive"), ("a", "b"), "learns from pairs with negatives or scored pairs, and these are pairs"),
        (("query", "document", "score"), ("a", "b", "3"), "row 2: score is 3, and scores are from 0 to 1"),
        (("query", "document", "score"), ("a", "", "1"), "row 2: document is empty"),
        (("query", "positive", "negative"), ("a", "b", ""), "row 2: negative is empty"),
    ],
)
def test_data_that_cannot_be_learned_from_is_named(
    tmp_path: Path, header: Sequence[str], row: Sequence[str], problem: str
) -> None:
    file = write(tmp_path / "data.csv", header, [row, row])
    with pytest.raises(DataError, match=problem):
        read_examples(DataSource(path=str(file), task="reranking"))


def write_groups(path: Path, num_rows: int = 40) -> Path:
    """Whoever asks wants a good word."""
    draw = random.Random(1)
    asked = ("who saw the film", "where was tom", "anna and tom in paris")
    rows = [(draw.choice(asked), draw.choice(GOOD), draw.choice(BAD), draw.choice(BAD)) for _ in range(num_rows)]
    return write(path, ("query", "positive", "negative_1", "negative_2"), rows)


def make_request(tmp_path: Path, **given: Any) -> TrainRequest:
    data = str(write_groups(tmp_path / "groups.csv"))
    settings = {"epochs": 6, "batch": 8, "lr": 2e-3, "device": "cpu", "max_grad_norm": 1.0, "eval_data": data} | given
    return TrainRequest(
        model=str(write_model(tmp_path / "source")),
        data=data,
        output=str(tmp_path / "out"),
        task="reranking",
        **settings,
    )


@pytest.mark.parametrize("loss", ["listwise", "bce"])
def test_a_reranker_learns_and_a_cross_encoder_opens_it(tmp_path: Path, loss: str) -> None:
    record = train(make_request(tmp_path, loss=loss))
    assert record.best_metric == "mrr_at_10"
    assert record.best_value is not None
    assert record.best_value > 0.9
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from vramfit.runtime.device import RunDevice

    trained = open_model(str(tmp_path / "out"))
    assert trained.task == "reranking"
    source = DataSource(path=str(tmp_path / "groups.csv"), task="reranking", needs_labels=False)
    samples = trained.read(source)
    inference = trained.load(RunDevice("cpu"), samples)
    found: dict[int, float] = {}

    def take(output: Any, batch: Any, rows: list[int]) -> None:
        made = trained.kind.predictions(output, batch, [samples.references[i] for i in rows], trained.tokenizing)
        found.update(zip(rows, [row["score"] for row in made], strict=True))

    inference.run(samples, take)
    pairs = [samples.references[i]["texts"] for i in range(len(samples))]
    peer = sentence_transformers.CrossEncoder(str(tmp_path / "out"), device="cpu")
    expected = peer.predict(pairs)
    assert [found[i] for i in range(len(samples))] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_reranker_is_known_from_its_folder_and_gives_no_vectors(tmp_path: Path) -> None:
    """Whoever saved it: transformers, which says nothing but its class, or a CrossEncoder, which says so beside it."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    plain = write_model(tmp_path / "plain")
    config = AutoConfig.from_pretrained(plain, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(plain)
    sentence_transformers.CrossEncoder(str(plain), device="cpu").save(str(tmp_path / "saved"))
    assert saved_head(tmp_path / "saved") == SavedHead(task="reranking", label_names=())
    assert open_model(str(tmp_path / "saved")).task == "reranking"
    for folder in (plain, tmp_path / "saved"):
        with pytest.raises(CheckpointError, match=r"is a reranker \(.*it scores pairs of texts, and gives no vectors"):
            vramfit.encode(str(folder), ["a text"], device="cpu")
    assert vramfit.encode(str(plain), ["a text"], device="cpu", task="features").shape[0] == 1


def test_metrics_are_those_of_the_order_of_the_scores() -> None:
    metrics = head_metrics.RankedCandidates()
    scores = [[0.1, 0.9, 0.5], [2.0, 1.0, 0.0]]  # the positive is third, and first
    for query, of_one in enumerate(scores):
        references = [{"index": query, "place": place, "num_texts": 3} for place in range(3)]
        output = type("Output", (), {"logits": torch.tensor(of_one)[:, None]})()
        metrics.update(output, {}, references)
    result = metrics.result()
    assert result["mrr_at_10"] == pytest.approx((1 / 3 + 1) / 2)
    assert result["ndcg_at_10"] == pytest.approx((0.5 + 1) / 2)
    assert result["map"] == pytest.approx((1 / 3 + 1) / 2)
    assert result["recall_at_1"] == 0.5


@pytest.mark.parametrize("score", [0.0, torch.nan])
def test_scores_that_tell_nothing_apart_find_no_positive(score: float) -> None:
    metrics = head_metrics.RankedCandidates()
    references = [{"index": 0, "place": place, "num_texts": 4} for place in range(4)]
    metrics.update(type("Output", (), {"logits": torch.full((4, 1), score)})(), {}, references)
    assert metrics.result()["mrr_at_10"] == 0.25
