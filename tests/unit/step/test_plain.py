"""The plain step on real tensors: it does what the usual PyTorch loop does."""

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vramfit.step.plain import forward_step, train_step

Batch = dict[str, torch.Tensor]


class Classifier(torch.nn.Module):
    """A head with a mean loss, as transformers' heads have it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = self.dense(x)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


def batch_of(num: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num, 6, generator=generator) * 5,
        "labels": torch.randint(0, 3, (num,), generator=generator),
    }


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def step_taken(model: Classifier, batches: list[Batch], **keywords: Any) -> list[torch.Tensor]:
    """What one step of plain SGD at rate 1 subtracts: the gradient."""
    before = [p.detach().clone() for p in model.parameters()]
    train_step(model, sgd(model), batches, **keywords)
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


def plain_gradient(model: Classifier, batches: list[Batch]) -> list[torch.Tensor]:
    twin = copy.deepcopy(model)
    for batch in batches:
        (twin(**batch).loss / len(batches)).backward()
    return [p.grad for p in twin.parameters() if p.grad is not None]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left, right, strict=True))


def test_one_batch_steps_along_the_gradient_of_the_mean_loss(model: Classifier) -> None:
    batch = batch_of(8)
    assert same(plain_gradient(model, [batch]), step_taken(model, [batch]))


def test_equal_micro_batches_give_the_gradient_of_the_whole_batch(model: Classifier) -> None:
    whole = batch_of(12)
    parts = [{name: t[i : i + 4] for name, t in whole.items()} for i in (0, 4, 8)]
    assert same(plain_gradient(model, [whole]), step_taken(model, parts))


def test_uneven_micro_batches_each_count_the_same_as_in_the_usual_loop(model: Classifier) -> None:
    batches = [batch_of(2), batch_of(9, seed=3)]
    assert same(plain_gradient(model, batches), step_taken(model, batches))


def test_clipping_bounds_the_norm_of_what_was_accumulated(model: Classifier) -> None:
    batches = [batch_of(4), batch_of(4, seed=3)]
    free = torch.nn.utils.get_total_norm(plain_gradient(model, batches))
    assert free > 0.5
    clipped = step_taken(model, batches, max_grad_norm=0.5)
    assert float(torch.nn.utils.get_total_norm(clipped)) == pytest.approx(0.5, rel=1e-3)


def test_a_norm_above_the_gradient_clips_nothing(model: Classifier) -> None:
    batch = batch_of(4)
    assert same(plain_gradient(model, [batch]), step_taken(model, [batch], max_grad_norm=1e6))


def test_only_what_the_optimizer_learns_is_clipped(model: Classifier) -> None:
    optimizer = torch.optim.SGD([model.dense.weight], lr=0.0)
    seen: list[float] = []
    model.dense.bias.register_hook(lambda g: seen.append(float(g.norm())))
    bias = model.dense.bias
    train_step(model, optimizer, [batch_of(4)], max_grad_norm=1e-9)
    assert bias.grad is not None
    assert float(bias.grad.norm()) == pytest.approx(seen[0])


def test_gradients_are_gone_after_the_step(model: Classifier) -> None:
    train_step(model, sgd(model), [batch_of(4)])
    assert all(p.grad is None for p in model.parameters())


def test_the_parts_are_told_in_order_with_the_micro_batch(model: Classifier) -> None:
    told: list[tuple[str, int]] = []
    train_step(model, sgd(model), [batch_of(2)] * 2, on_part=lambda part, index: told.append((part, index)))
    assert told == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 0),
        ("forward", 1),
        ("backward", 1),
        ("forward", 1),
        ("optimizer", 0),
    ]


def test_the_autocast_is_opened_for_the_forward_pass_alone(model: Classifier) -> None:
    told: list[str] = []

    class Context:
        def __enter__(self) -> None:
            told.append("in")

        def __exit__(self, *_: object) -> None:
            told.append("out")

    model.dense.register_forward_hook(lambda *_: told.append("run"))
    train_step(model, sgd(model), [batch_of(2)] * 2, autocast=Context, on_part=lambda part, _: told.append(part))
    one = ["forward", "in", "run", "out", "backward", "forward"]
    assert told == [*one, *one, "optimizer"]


class FakeScaler:
    """Doubles the loss and writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        self.calls.append("scale")
        return outputs * 2

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("unscale")
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad /= 2

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("step")
        optimizer.step()

    def update(self) -> None:
        self.calls.append("update")


def test_a_scaler_scales_every_loss_unscales_before_clipping_and_updates_last(model: Classifier) -> None:
    scaler = FakeScaler()
    batches = [batch_of(4), batch_of(4, seed=3)]
    clipped = step_taken(model, batches, scaler=scaler, max_grad_norm=0.5)
    assert scaler.calls == ["scale", "scale", "unscale", "step", "update"]
    assert float(torch.nn.utils.get_total_norm(clipped)) == pytest.approx(0.5, rel=1e-3)


def test_without_clipping_unscaling_is_the_scalers_own(model: Classifier) -> None:
    scaler, batch = FakeScaler(), batch_of(4)
    expected = [2 * g for g in plain_gradient(model, [batch])]
    assert same(expected, step_taken(model, [batch], scaler=scaler))
    assert scaler.calls == ["scale", "step", "update"]


def test_torchs_own_scaler_fits(model: Classifier) -> None:
    batch = batch_of(4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert same(plain_gradient(model, [batch]), step_taken(model, [batch], scaler=scaler, max_grad_norm=1e6))


def test_an_encoder_alone_learns_from_the_mean_of_what_it_gives() -> None:
    encoder = torch.nn.Linear(6, 3).to(torch.bfloat16)
    x = torch.ones(4, 6, dtype=torch.bfloat16)

    for wrap in (lambda y: y, lambda y: (y, None), lambda y: SimpleNamespace(loss=y.float().mean())):
        twin = copy.deepcopy(encoder)

        class Wrapped(torch.nn.Module):
            def __init__(self, inner: torch.nn.Module, wrap: Any) -> None:
                super().__init__()
                self.inner, self.wrap = inner, wrap

            def forward(self, x: torch.Tensor) -> Any:
                return self.wrap(self.inner(x))

        train_step(Wrapped(twin, wrap), sgd(twin), [{"x": x}])
        assert torch.allclose(encoder.bias - twin.bias, torch.full((3,), 1 / 3, dtype=torch.bfloat16), atol=1e-2)


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_pass_keeps_a_graph_only_with_grad_and_nothing_afterwards(model: Classifier, grad: bool) -> None:
    seen: list[Any] = []

    def look(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append((output.requires_grad, weakref.ref(output)))

    model.dense.register_forward_hook(look)
    told: list[tuple[str, int]] = []
    forward_step(model, {"x": torch.ones(2, 6)}, grad=grad, on_part=lambda *p: told.append(p))
    gc.collect()
    ((learns, output),) = seen
    assert learns is grad
    assert output() is None
    assert told == [("forward", 0)]
    assert torch.is_grad_enabled()
