"""Losses of embeddings: those of sentence-transformers, in blocks that no batch makes larger."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer import losses as theirs
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import WorkloadError
from vramfit.models.build import build_for
from vramfit.models.resolve import resolve
from vramfit.tasks import find_task
from vramfit.tasks.embedding import LOSSES
from vramfit.tasks.parts import contrastive
from vramfit.tasks.parts.contrastive import check_contrast, contrast_loss
from vramfit.tasks.parts.losses import head_loss
from vramfit.tasks.parts.pooling import Contrast
from vramfit.techniques.application import apply
from vramfit.workload import Workload

WIDTH = 12
SCALE = 1 / 0.05
Loss = Callable[[torch.Tensor], torch.Tensor]
CASES = [
    ("in-batch", 2),
    ("in-batch", 4),
    ("in-batch-symmetric", 2),
    ("in-batch-symmetric", 4),
    ("triplet", 3),
    ("contrastive", 2),
    ("cosent", 2),
    ("angle", 2),
    ("margin-mse", 3),
    ("margin-mse", 5),
]


class Given(torch.nn.Module):
    """In place of a model: its vectors are the features."""

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(features)

    def get_embedding_dimension(self) -> int:
        return WIDTH


def their_loss(model: Any, name: str) -> Any:
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    return {
        "in-batch": lambda: theirs.MultipleNegativesRankingLoss(model, scale=SCALE),
        "in-batch-symmetric": lambda: theirs.MultipleNegativesRankingLoss(model, scale=SCALE, **both),
        "triplet": lambda: theirs.TripletLoss(model),
        "contrastive": lambda: theirs.ContrastiveLoss(model),
        "cosent": lambda: theirs.CoSENTLoss(model, scale=SCALE),
        "angle": lambda: theirs.AnglELoss(model, scale=SCALE),
        "margin-mse": lambda: theirs.MarginMSELoss(model),
    }[name]()


def given(num_samples: int, num_texts: int, *, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Texts of a sample are alike, so that losses have something to weigh; no vector has unit length."""
    random = torch.Generator().manual_seed(num_samples + num_texts)
    middles = torch.randn(num_samples, 1, width, generator=random, dtype=torch.float64)
    return (middles + torch.randn(num_samples, num_texts, width, generator=random, dtype=torch.float64)).to(dtype)


def scores_for(name: str, num_samples: int, num_texts: int) -> torch.Tensor:
    """As sentence-transformers takes them."""
    random = torch.Generator().manual_seed(num_samples)
    if name == "contrastive":
        return torch.randint(0, 2, (num_samples,), generator=random)
    if name == "margin-mse":
        return torch.randn(num_samples, num_texts - 2, generator=random)
    return torch.randint(0, 6, (num_samples,), generator=random) / 5  # with ties


def with_gradient(loss: Loss, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = vectors.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert torch.linalg.vector_norm(found - expected) <= tolerance * torch.linalg.vector_norm(expected)


def assert_same(ours: Loss, other: Loss, vectors: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Values and gradients."""
    for found, expected in zip(with_gradient(ours, vectors), with_gradient(other, vectors), strict=True):
        assert expected.abs().max() > 0
        assert_close(found, expected, tolerance)


def unique_ids(vectors: torch.Tensor) -> torch.Tensor:
    return torch.arange(vectors.shape[0] * vectors.shape[1]).view(vectors.shape[:2])


@pytest.mark.parametrize("dims", [(), (WIDTH,), (WIDTH, 7, 4)])
@pytest.mark.parametrize(("name", "num_texts"), CASES)
def test_losses_are_those_of_sentence_transformers(name: str, num_texts: int, dims: tuple[int, ...]) -> None:
    vectors = given(23, num_texts)
    scores = scores_for(name, 23, num_texts)
    model = Given()
    other = their_loss(model, name)
    if dims:
        other = theirs.MatryoshkaLoss(model, other, dims)
    how = Contrast(loss=name, num_texts=num_texts, dims=dims)
    labels = {"labels": scores, "text_ids": unique_ids(vectors)}
    assert_same(
        lambda x: contrast_loss(x, labels, how),
        lambda x: other([{"sentence_embedding": text} for text in x.unbind(1)], scores),
        vectors,
    )


@pytest.mark.parametrize("temperature", [0.02, 1.0])
@pytest.mark.parametrize("name", ["in-batch", "in-batch-symmetric", "cosent", "angle"])
def test_the_temperature_divides_similarities(name: str, temperature: float) -> None:
    scores = scores_for(name, 9, 2)
    other = their_loss(Given(), name)
    other.scale = 1 / temperature
    how = Contrast(loss=name, temperature=temperature)
    assert_same(
        lambda x: contrast_loss(x, {"labels": scores}, how),
        lambda x: other.compute_loss_from_embeddings(list(x.unbind(1)), scores),
        given(9, 2),
    )


@pytest.mark.parametrize("name", ["triplet", "contrastive"])
def test_margins_can_be_given(name: str) -> None:
    num_texts = 3 if name == "triplet" else 2
    vectors, scores = given(9, num_texts), scores_for(name, 9, num_texts)
    other = their_loss(Given(), name)
    other.triplet_margin = other.margin = 0.8
    how = Contrast(loss=name, num_texts=num_texts, margin=0.8)
    assert_same(
        lambda x: contrast_loss(x, {"labels": scores}, how),
        lambda x: other.compute_loss_from_embeddings(list(x.unbind(1)), scores),
        vectors,
    )


def test_a_triplet_of_several_negatives_is_the_mean_of_its_triplets() -> None:
    other = their_loss(Given(), "triplet")

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        each = [other.compute_loss_from_embeddings([x[:, 0], x[:, 1], x[:, k]], None) for k in (2, 3, 4)]
        return torch.stack(each).mean()

    how = Contrast(loss="triplet", num_texts=5)
    assert_same(lambda x: contrast_loss(x, {}, how), one_by_one, given(11, 5))


@pytest.mark.parametrize(("name", "num_texts"), [("cosent", 2), ("margin-mse", 3), ("margin-mse", 4)])
def test_each_text_may_repeat_the_scores_of_its_sample(name: str, num_texts: int) -> None:
    vectors, scores = given(9, num_texts), scores_for(name, 9, num_texts)
    repeated = torch.stack([scores] * num_texts, 1)
    how = Contrast(loss=name, num_texts=num_texts)
    assert torch.equal(
        contrast_loss(vectors, {"labels": repeated}, how), contrast_loss(vectors, {"labels": scores}, how)
    )


def dense(vectors: torch.Tensor, ids: torch.Tensor | None, how: Contrast) -> torch.Tensor:
    """In-batch losses with one matrix, and masks sample by sample."""
    units = F.normalize(vectors, dim=-1)
    num_samples, num_texts = units.shape[:2]

    def one_way(query: int, own: int, candidates: list[int]) -> torch.Tensor:
        losses = []
        for i in range(num_samples):
            kept = []
            for k in candidates:
                for j in range(num_samples):
                    cosine = units[i, query] @ units[j, k]
                    is_own = (j, k) == (i, own)
                    hidden = how.mask_above is not None and bool(cosine > how.mask_above)
                    if ids is not None:
                        hidden |= bool(ids[j, k] == ids[i, own]) or bool(ids[j, k] == ids[i, query])
                        hidden |= k == own and bool(ids[j, query] == ids[i, query])
                    if is_own or not hidden:
                        kept.append(cosine / how.temperature)
            losses.append(torch.stack(kept).logsumexp(0) - units[i, query] @ units[i, own] / how.temperature)
        return torch.stack(losses).mean()

    forward = one_way(0, 1, list(range(1, num_texts)))
    return forward if how.loss == "in-batch" else (forward + one_way(1, 0, [0])) / 2


def repeated_ids(num_samples: int, num_texts: int) -> torch.Tensor:
    """Few texts, so that anchors, positives and negatives meet each other's equals."""
    random = torch.Generator().manual_seed(5)
    return torch.randint(0, num_samples, (num_samples, num_texts), generator=random)


@pytest.mark.parametrize("block_numbers", [1, 3 * 13, 2**24])
@pytest.mark.parametrize("masks", ["above", "ids", "both"])
@pytest.mark.parametrize("name", ["in-batch", "in-batch-symmetric"])
@pytest.mark.parametrize("num_texts", [2, 4])
def test_false_negatives_are_left_out(
    name: str, num_texts: int, masks: str, block_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contrastive, "BLOCK_NUMBERS", block_numbers)
    vectors = given(13, num_texts, dtype=torch.float64)
    ids = None if masks == "above" else repeated_ids(13, num_texts)
    how = Contrast(
        loss=name, num_texts=num_texts, temperature=0.3, mask_above=None if masks == "ids" else 0.25, dims=()
    )
    unmasked = dense(vectors, None, Contrast(loss=name, num_texts=num_texts, temperature=0.3))
    assert abs(dense(vectors, ids, how) - unmasked) > 0.01 * unmasked  # or nothing was tested
    labels = {} if ids is None else {"text_ids": ids}
    assert_same(lambda x: contrast_loss(x, labels, how), lambda x: dense(x, ids, how), vectors, 1e-12)


def test_nothing_but_the_own_positive_is_left_where_all_texts_are_equal() -> None:
    how = Contrast(loss="in-batch-symmetric", num_texts=3, mask_above=-2.0)
    value, gradient = with_gradient(
        lambda x: contrast_loss(x, {"text_ids": torch.zeros(6, 3, dtype=torch.long)}, how), given(6, 3)
    )
    assert value.abs() < 1e-6
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["cosent", "angle"])
def test_pairs_of_one_score_have_no_order_to_learn(name: str) -> None:
    value, gradient = with_gradient(
        lambda x: contrast_loss(x, {"labels": torch.ones(7)}, Contrast(loss=name)), given(7, 2)
    )
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize(("name", "num_texts"), CASES)
def test_the_size_of_blocks_changes_nothing(name: str, num_texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, scores = given(50, num_texts), scores_for(name, 50, num_texts)
    how = Contrast(loss=name, num_texts=num_texts, mask_above=0.9, dims=(WIDTH, 5))
    labels = {"labels": scores, "text_ids": repeated_ids(50, num_texts)}
    whole = with_gradient(lambda x: contrast_loss(x, labels, how), vectors)
    for block_numbers in (1, 7 * 50, 49 * 50):
        monkeypatch.setattr(contrastive, "BLOCK_NUMBERS", block_numbers)
        for found, expected in zip(with_gradient(lambda x: contrast_loss(x, labels, how), vectors), whole, strict=True):
            assert_close(found, expected, 1e-6)


@pytest.mark.parametrize(("name", "num_texts"), CASES)
def test_gradients_are_what_differences_say(name: str, num_texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive, "BLOCK_NUMBERS", 2 * num_texts * 6)
    vectors = given(5, num_texts, width=6, dtype=torch.float64).requires_grad_()
    labels = {"labels": scores_for(name, 5, num_texts), "text_ids": repeated_ids(5, num_texts)}
    how = Contrast(loss=name, num_texts=num_texts, temperature=0.5, dims=(6, 3))
    assert torch.autograd.gradcheck(lambda x: contrast_loss(x, labels, how), vectors)


def test_a_vector_of_zeros_gives_no_nan() -> None:
    vectors = given(6, 2)
    vectors[2, 1] = 0
    for found in with_gradient(lambda x: contrast_loss(x, {}, Contrast()), vectors):
        assert torch.isfinite(found).all()


class Watch(TorchDispatchMode):
    """Operators that were called and the shapes they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.calls.append((str(func), [tuple(t.shape) for t in made if isinstance(t, torch.Tensor)]))
        return result


@pytest.mark.parametrize(("name", "num_texts"), CASES)
def test_a_trace_without_data_sees_what_a_run_calls(name: str, num_texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive, "BLOCK_NUMBERS", 500)
    how = Contrast(loss=name, num_texts=num_texts, mask_above=0.9, dims=(WIDTH, 5))
    vectors = given(40, num_texts)
    labels = {"labels": scores_for(name, 40, num_texts), "text_ids": unique_ids(vectors)}
    seen = []
    for device in ("cpu", "meta"):
        leaf = vectors.detach().to(device).requires_grad_()
        here = {key: value.to(device) for key, value in labels.items()}
        with Watch() as watch:
            contrast_loss(leaf, here, how).backward()
        seen.append(watch.calls)
    assert seen[0] == seen[1]
    assert not any("_local_scalar_dense" in call or "nonzero" in call for call, _ in seen[0])


@pytest.mark.parametrize(
    ("name", "num_texts"), [("in-batch", 3), ("in-batch-symmetric", 2), ("cosent", 2), ("angle", 2), ("triplet", 4)]
)
def test_memory_beside_vectors_and_gradients_is_a_few_blocks(
    name: str, num_texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_samples, block_numbers = 8192, 2**18
    monkeypatch.setattr(contrastive, "BLOCK_NUMBERS", block_numbers)
    vectors = given(num_samples, num_texts, width=32)
    labels = {"labels": torch.arange(num_samples) % 50, "text_ids": unique_ids(vectors)}
    how = Contrast(loss=name, num_texts=num_texts, mask_above=0.9)
    gc.collect()
    with EmulatedGPU(memory="1GiB") as gpu:
        leaf = vectors.clone().requires_grad_()
        for value in labels.values():
            value.sum()
        held_bytes = gpu.allocated_bytes
        with Watch() as watch:
            contrast_loss(leaf, labels, how).backward()
        assert leaf.grad is not None
        beside_bytes = gpu.max_allocated_bytes - held_bytes - leaf.grad.nbytes
    most = max(torch.Size(shape).numel() for _, shapes in watch.calls for shape in shapes)
    assert most == vectors.numel()  # the gradient; a matrix of all pairs has 67 million numbers
    small = 8 * num_samples * num_texts * 4  # a few numbers for each text
    assert beside_bytes <= 8 * block_numbers * 4 + small


def test_what_a_loss_cannot_work_with_is_said() -> None:
    def problems(loss: str, num_texts: int, num_given: int = 0, dims: tuple[int, ...] = ()) -> list[str]:
        return check_contrast(Contrast(loss=loss, num_texts=num_texts, dims=dims), num_given=num_given, width=768)

    assert problems("in-batch", 2) == problems("in-batch", 5) == problems("triplet", 3) == []
    assert problems("cosent", 2, 1) == problems("margin-mse", 5, 3) == []
    assert problems("in-batch", 2, 1) == []  # scores that nobody reads
    assert problems("in-batch", 1) == [
        "loss in-batch needs an anchor and a positive, and a sample has 1 text: take texts 2 or more"
    ]
    assert problems("triplet", 2) == [
        "loss triplet needs an anchor, a positive and a negative, and a sample has 2 texts: take texts 3 or more"
    ]
    assert problems("cosent", 2, 2) == ["loss cosent needs 1 score for each sample, which has 2 scores"]
    assert problems("angle", 2) == ["loss angle needs 1 score for each sample, which has none"]
    assert problems("margin-mse", 5, 2) == ["loss margin-mse needs 3 scores for each sample, which has 2 scores"]
    assert problems("contrastive", 3, dims=(1024, 64, 2048)) == [
        "loss contrastive compares the two texts of a pair, and a sample has 3: take texts 2",
        "loss contrastive needs 1 score for each sample, which has none",
        "matryoshka 1024,2048: vectors of this model have 768 numbers",
    ]


def model_for(**keywords: Any) -> Any:
    workload = Workload(model="bert-tiny", task="embedding", **keywords)
    model = build_for(resolve("bert-tiny", task="embedding"), workload)
    apply(model, workload)
    return model


def test_a_batch_without_what_its_loss_needs_is_refused_before_any_pass() -> None:
    texts = {"text_rows": torch.arange(6), "text_ids": torch.arange(6)}
    with pytest.raises(WorkloadError, match="loss cosent needs 1 score for each sample, which has none"):
        find_task("embedding").loss(model_for(loss="cosent"), texts)
    with pytest.raises(WorkloadError, match="matryoshka 4096: vectors of this model have 128 numbers") as error:
        find_task("embedding").loss(model_for(matryoshka=(4096, 64)), texts)
    assert error.value.hint == "take lengths from 1 to 128"
    with pytest.raises(WorkloadError, match="the batch has no text_rows, so there is nothing to learn"):
        head_loss(model_for(), {"input_ids": torch.ones(6, 4, dtype=torch.long)}, "embedding")


@pytest.mark.parametrize("name", LOSSES)
def test_labels_without_data_are_what_a_loss_needs(name: str) -> None:
    model, task = model_for(loss=name), find_task("embedding")
    labels = task.meta_labels(model, 12, 8, "meta")
    assert ("labels" in labels) == (name not in ("in-batch", "in-batch-symmetric", "triplet"))
    assert task.loss(model, labels) is not None


def test_blocks_are_few_whatever_the_number_of_samples() -> None:
    for num in (2**16, 10**6, 10**9):
        blocks = list(contrastive._blocks(num, num))
        assert len(blocks) <= contrastive.MOST_BLOCKS
        assert (blocks[0].start, blocks[-1].stop) == (0, num)
    assert blocks[0].stop - blocks[0].start > contrastive.BLOCK_NUMBERS // num
