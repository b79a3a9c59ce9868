"""Settings of embeddings: which loss takes which samples and options."""

from typing import Any

import pytest

from vramfit.errors import WorkloadError
from vramfit.tasks.embedding import LOSSES
from vramfit.workload import Workload


def problems(**keywords: Any) -> tuple[str, ...]:
    try:
        Workload(**({"model": "m", "task": "embedding"} | keywords))
    except WorkloadError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("loss", [None, *LOSSES])
def test_samples_have_by_themselves_what_a_loss_needs(loss: str | None) -> None:
    w = Workload(model="m", task="embedding", loss=loss)
    assert w.texts_per_sample == (3 if loss in ("triplet", "margin-mse") else 2)


@pytest.mark.parametrize("loss", [None, "in-batch", "in-batch-symmetric"])
def test_in_batch_losses_take_pairs_and_any_number_of_negatives(loss: str | None) -> None:
    assert problems(loss=loss, texts=2) == problems(loss=loss, texts=7) == ()
    (problem,) = problems(loss=loss, texts=1)
    assert problem.endswith("needs an anchor and a positive, and a sample has 1 text: take texts 2 or more")


@pytest.mark.parametrize("loss", ["contrastive", "cosent", "angle"])
def test_scored_losses_take_pairs_alone(loss: str) -> None:
    assert problems(loss=loss, texts=2) == ()
    for texts in (1, 3):
        assert problems(loss=loss, texts=texts) == (
            f"loss {loss} compares the two texts of a pair, and a sample has {texts}: take texts 2",
        )


@pytest.mark.parametrize("loss", ["triplet", "margin-mse"])
def test_losses_of_negatives_take_at_least_one(loss: str) -> None:
    assert problems(loss=loss, texts=3) == problems(loss=loss, texts=6) == ()
    assert problems(loss=loss, texts=2) == (
        f"loss {loss} needs an anchor, a positive and a negative, and a sample has 2 texts: take texts 3 or more",
    )


def test_nothing_is_compared_where_nothing_is_learned() -> None:
    assert problems(texts=1, mode="infer") == ()


@pytest.mark.parametrize(
    ("keyword", "losses"),
    [
        ("temperature", ("in-batch", "in-batch-symmetric", "cosent", "angle")),
        ("loss_margin", ("triplet", "contrastive")),
        ("mask_above", ("in-batch", "in-batch-symmetric")),
    ],
)
def test_an_option_that_a_loss_does_not_read_is_refused(keyword: str, losses: tuple[str, ...]) -> None:
    for loss in LOSSES:
        expected = f"{keyword} is for loss {', '.join(losses)}, not {loss}: leave it out"
        assert problems(loss=loss, **{keyword: 0.5}) == (() if loss in losses else (expected,))
    assert (problems(**{keyword: 0.5}) == ()) == ("in-batch" in losses)  # what it is by itself


@pytest.mark.parametrize("loss", [None, "margin-mse"])
def test_shorter_vectors_are_not_for_tasks_that_give_none(loss: str | None) -> None:
    assert problems(task="reranking", loss=loss, matryoshka=(64,)) == (
        "matryoshka is for tasks that give vectors of texts, not reranking",
    )
    assert problems(loss=loss, matryoshka=(64,)) == ()
