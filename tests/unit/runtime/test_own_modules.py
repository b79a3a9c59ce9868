"""Modules of the user's making, whatever they return: predicted, planned, stepped and watched, or refused in words."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

import vramfit
from vramfit.errors import VramfitError, WorkloadError
from vramfit.runtime.stepper import Stepper
from vramfit.runtime.watching import watch
from vramfit.step.plain import Batch

NUM_SAMPLES, LENGTH, NUM_CLASSES = 6, 8, 3
Give = Callable[[torch.Tensor | None, torch.Tensor], Any]
GIVEN: dict[str, Give] = {
    "an output of transformers": lambda loss, logits: SequenceClassifierOutput(loss=loss, logits=logits),  # type: ignore[arg-type]
    "a dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "a dict of the loss alone": lambda loss, logits: {"loss": loss},
    "a tuple": lambda loss, logits: (logits,) if loss is None else (loss, logits),
    "a tuple with None": lambda loss, logits: (loss, logits),
    "a loss": lambda loss, logits: needed(loss),
    "a loss or logits": lambda loss, logits: logits if loss is None else loss,
    "logits": lambda loss, logits: logits,
}


def needed(loss: torch.Tensor | None) -> torch.Tensor:
    if loss is None:
        raise TypeError("labels are needed")
    return loss


class Own(nn.Module):
    """A classifier whose forward gives what it is told to give."""

    def __init__(self, give: Give, loss: Callable[..., torch.Tensor] = F.cross_entropy) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.drop = nn.Embedding(50, 8), nn.Linear(8, NUM_CLASSES), nn.Dropout(0.0)
        self.give, self.loss = give, loss

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.drop(self.table(ids)).mean(1))
        return out

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.logits(input_ids)
        return self.give(None if labels is None else self.loss(logits, labels), logits)


class NoLabels(Own):
    def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return self.logits(input_ids)


class Tokens(Own):
    """A mean over the labels that count, of which samples have more or fewer."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.cross_entropy(self.head(self.table(input_ids)).transpose(1, 2), labels)


class Features(Own):
    """Neither token ids nor a thing that is called labels."""

    def __init__(self) -> None:
        super().__init__(GIVEN["a loss"])
        self.dense = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.mse_loss(self.dense(x).squeeze(1), y)


class Hidden(Own):
    """What an encoder gives, beside labels of samples."""

    def __init__(self) -> None:
        super().__init__(GIVEN["logits"])

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> torch.Tensor:
        out: torch.Tensor = self.table(input_ids)
        return out


def batch_of_ids() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (NUM_SAMPLES, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator)}


def token_batch() -> Batch:
    batch = batch_of_ids()
    batch["labels"] = batch["input_ids"] % NUM_CLASSES
    for i in range(NUM_SAMPLES):
        batch["labels"][i, i + 1 :] = -100  # 1, 2, 3, … labels
    return batch


def weights_after(model: nn.Module, batch: Batch, micro_batch: int) -> tuple[float, list[torch.Tensor]]:
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=micro_batch, seq=LENGTH)
    return stepper.step(batch), [p.detach() for p in model.parameters()]


def is_as_whole(model: nn.Module, batch: Batch, loss: Callable[[nn.Module], torch.Tensor]) -> bool:
    """Whether a step in passes of two samples is the step of the whole batch by a given loss."""
    twin = copy.deepcopy(model)
    found, weights = weights_after(model, batch, micro_batch=2)
    expected = loss(twin)
    expected.backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    return all(torch.allclose(p, q, atol=1e-6) for p, q in zip(weights, twin.parameters(), strict=True))


@pytest.mark.parametrize("given", GIVEN)
def test_whatever_forward_gives_a_step_is_that_of_the_whole_batch(given: str) -> None:
    batch = batch_of_ids()
    assert is_as_whole(
        Own(GIVEN[given]), batch, lambda m: F.cross_entropy(m.logits(batch["input_ids"]), batch["labels"])
    )


@pytest.mark.parametrize("given", GIVEN)
def test_whatever_forward_gives_is_predicted_and_planned(given: str) -> None:
    keywords = {"batch": 4, "seq": LENGTH, "memory": "1GiB"}
    plain = vramfit.estimate(Own(GIVEN[given]), **keywords)
    stepped = vramfit.plan(Own(GIVEN[given]), **keywords)
    assert plain.fits
    assert stepped.estimate.fits
    usual = vramfit.estimate(Own(GIVEN["an output of transformers"]), **keywords)
    assert plain.peak_allocated_bytes == pytest.approx(usual.peak_allocated_bytes, rel=0.01)


def test_a_forward_without_labels_gives_logits_and_the_labels_decide() -> None:
    batch = batch_of_ids()
    model = NoLabels(GIVEN["logits"])
    assert vramfit.estimate(model, batch=4, seq=LENGTH, memory="1GiB").fits
    assert is_as_whole(model, batch, lambda m: F.cross_entropy(m.logits(batch["input_ids"]), batch["labels"]))


def test_a_loss_of_the_modules_own_is_not_replaced_by_that_of_its_labels() -> None:
    def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=0.3)

    batch = batch_of_ids()
    assert is_as_whole(Own(GIVEN["a dict"], weighted), batch, lambda m: m(**batch)["loss"])


def test_a_mean_over_labels_is_weighted_by_labels() -> None:
    batch = token_batch()
    assert is_as_whole(Tokens(GIVEN["a loss"]), batch, lambda m: m(**batch))


@pytest.mark.parametrize("given", ["a loss", "a dict"])
def test_a_sum_over_samples_stays_a_sum(given: str) -> None:
    def total(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, reduction="sum")

    batch = batch_of_ids()
    assert is_as_whole(Own(GIVEN[given], total), batch, lambda m: total(m.logits(batch["input_ids"]), batch["labels"]))


def test_a_mean_over_samples_needs_no_token_ids_and_no_labels() -> None:
    generator = torch.Generator().manual_seed(2)
    batch = {"x": torch.randn(NUM_SAMPLES, 5, generator=generator), "y": torch.randn(NUM_SAMPLES, generator=generator)}
    passes: list[int] = []
    model = Features()
    model.dense.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))
    assert is_as_whole(model, batch, lambda m: m(**batch))
    assert passes[-4:] == [2, 2, 2, NUM_SAMPLES]  # the last one is the whole batch's


def test_a_loss_that_compares_samples_is_taken_whole_and_never_split() -> None:
    def spread(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits @ logits.T).softmax(-1).diagonal().log().mean().neg()

    batch = batch_of_ids()
    weights_after(Own(GIVEN["a loss"], spread), batch, micro_batch=NUM_SAMPLES)
    with pytest.raises(WorkloadError, match="no mean over samples or labels, so no split gives it") as caught:
        weights_after(Own(GIVEN["a loss"], spread), batch, micro_batch=2)
    assert "loss_fn" in str(caught.value.hint)


def test_reading_a_module_learns_nothing_and_leaves_it_as_it_was() -> None:
    model = Own(GIVEN["a loss"])
    model.drop.p = 0.5
    model.table.eval()
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch=2)
    stepper._loss_for(batch_of_ids())
    assert torch.equal(torch.get_rng_state(), expected)
    assert (model.training, model.table.training, model.drop.training) == (True, False, True)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("verb", ["estimate", "plan", "step"])
def test_what_cannot_be_read_is_refused_with_what_forward_must_give(verb: str) -> None:
    model = Own(lambda loss, logits: "logits")
    ask = {
        "estimate": lambda: vramfit.estimate(model, batch=4, seq=LENGTH),
        "plan": lambda: vramfit.plan(model, batch=4, seq=LENGTH, memory="1GiB"),
        "step": lambda: weights_after(model, batch_of_ids(), micro_batch=2),
    }[verb]
    with pytest.raises(VramfitError, match="forward gives a str, in which there are no logits") as caught:
        ask()
    assert "gives a loss (a tensor with one number" in str(caught.value.hint)


def test_logits_that_do_not_go_with_the_labels_are_refused_with_both_shapes() -> None:
    with pytest.raises(WorkloadError, match=r"a tensor of shape \[2, 8, 8\] and no loss.*labels of shape \[2\]"):
        weights_after(Hidden(), batch_of_ids(), micro_batch=2)


def test_inputs_that_forward_does_not_take_are_refused_with_those_it_takes() -> None:
    with pytest.raises(WorkloadError, match=r"Own\.forward takes input_ids, labels; the batch has .*, x"):
        weights_after(Own(GIVEN["a dict"]), {**batch_of_ids(), "x": torch.zeros(NUM_SAMPLES)}, micro_batch=2)


@pytest.mark.parametrize("given", ["a dict", "a tuple", "a loss"])
def test_whatever_forward_gives_is_watched(given: str) -> None:
    model = Own(GIVEN[given])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(), watch(detailed=True, show_findings=False) as watching:
        warnings.simplefilter("error")
        for _ in range(2):
            output = model(**batch_of_ids())
            loss = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {"forward", "backward", "optimizer"} <= set(watching.record.phases)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "the batch is empty"),
        ({"x": np.zeros((4, 2))}, r"x \(ndarray\) of the batch: not tensors with a row"),
        ({"x": torch.zeros(4, 2), "labels": torch.zeros(3)}, "differ in their rows: x 4, labels 3"),
        ([torch.zeros(4, 2)], "the batch is no dict, but of class list"),
        ({"input": torch.zeros(4, 2), "texts": ["a"] * 4}, r"texts \(list\) of the batch: not tensors"),
        ({"input": torch.zeros(0, 2)}, "input of the batch: not tensors with a row for each sample"),
        (
            {"input": torch.zeros(4, 2)},
            r"Linear gives a tensor of shape \[2, 2\]: no loss of one number, and the batch",
        ),
    ],
)
def test_a_batch_without_tensors_is_refused_in_words(batch: Any, words: str) -> None:
    model = torch.nn.Linear(2, 2)
    two: Any = np.int64(2)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=two)
    assert stepper.micro_batch == 2
    with pytest.raises(WorkloadError, match=words):
        stepper.step(batch)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_grad_norm": 0}, "max_grad_norm 0 is not a positive number"),
        ({"seq": "5"}, "seq '5' is not a whole number"),
        ({"graphs": "no"}, "graphs 'no' is not True or False"),
        (
            {"optimizer": torch.optim.SGD(torch.nn.Linear(2, 2).parameters())},
            "the optimizer has no parameter of the model",
        ),
    ],
    ids=str,
)
def test_what_would_learn_nothing_or_something_else_is_refused(given: dict[str, Any], words: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = given.pop("optimizer", torch.optim.SGD(model.parameters()))
    with pytest.raises(WorkloadError, match=words):
        Stepper(model, optimizer, micro_batch=2, **given)


def test_a_loss_that_no_weight_is_in_is_refused() -> None:
    model = Own(lambda loss, logits: {"loss": loss.detach()})
    with pytest.raises(WorkloadError, match="the loss depends on no parameter that learns"):
        weights_after(model, batch_of_ids(), micro_batch=2)
