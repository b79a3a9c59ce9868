"""What a trace knows of the tensors that come from its inputs, and how it answers what a model asks of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.trace.recording import H200

from vramfit.errors import TraceError
from vramfit.trace.run import Session, tracing
from vramfit.trace.work import PROBE_BATCH
from vramfit.workload import Workload

B, SEQ = PROBE_BATCH, 8


def asking(ask: Callable[[torch.Tensor], Any], mask: str = "padded", probe: int | None = PROBE_BATCH) -> Any:
    """What a question about a mask gives, in a trace for any batch, or for one of 4."""
    with tracing(torch.nn.Identity(), Workload(model="m", mask=mask, seq=SEQ), H200, probe=probe) as session:
        session.tracer.begin("run", "forward")
        return ask(given_mask(session, mask, probe))


def given_mask(session: Session, mask: str, probe: int | None) -> torch.Tensor:
    tensor = torch.ones(probe or 4, SEQ, dtype=torch.long, device="meta")

    def rows(batch: int | None) -> torch.Tensor:
        made = torch.ones(batch or 4, SEQ, dtype=torch.long)
        if mask == "padded":
            made[len(made) // 2 :, SEQ // 2 :] = 0
        return made

    session.tracer.values.give(tensor, rows)
    return tensor


@pytest.mark.parametrize("probe", [PROBE_BATCH, None])
@pytest.mark.parametrize(("mask", "hides_nothing"), [("ones", True), ("padded", False)])
def test_the_ways_in_which_models_ask_for_padding_have_one_answer(
    mask: str, hides_nothing: bool, probe: int | None
) -> None:
    ways: list[Callable[[torch.Tensor], Any]] = [
        lambda m: bool(m.all()),
        lambda m: bool(m.to(torch.bool).sum() == m.numel()),
        lambda m: not bool((m == 0).any()),
        lambda m: 0.0 not in (m.to(torch.float32)[:1, -1].min().item(), m.min().item()),
        lambda m: torch.equal(m, torch.ones_like(m)),
        lambda m: m.sum(1).min().item() == SEQ,
        lambda m: not (m.new_zeros(m.shape) + m - 1).to(torch.bool).any(),
    ]
    assert [asking(way, mask, probe) for way in ways] == [hides_nothing] * len(ways)


def test_positions_in_a_row_are_of_one_text_unless_they_begin_again() -> None:
    def begins_again(position_ids: torch.Tensor) -> bool:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return not bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())

    def ask(mask: torch.Tensor) -> tuple[bool, bool]:
        in_order = torch.arange(SEQ, device="meta").unsqueeze(0).expand(mask.shape[0], -1)
        return begins_again(in_order), begins_again(in_order % 4)

    assert asking(ask) == (False, True)


def test_numbers_and_shapes_grow_with_the_batch() -> None:
    def ask(mask: torch.Tensor) -> tuple[Any, ...]:
        kept = mask.nonzero()
        return mask.sum().item(), tuple(kept.shape), mask.max().item(), tuple(mask[mask > 0].shape)

    kept = 6 * B  # of two rows, one is whole and one half
    assert asking(ask) == (kept, (kept, 2), 1, (kept,))


def test_what_is_written_into_a_view_is_seen_by_all_of_it() -> None:
    def ask(mask: torch.Tensor) -> tuple[Any, ...]:
        shifted = mask.new_zeros(mask.shape)
        shifted[:, 1:] = mask[:, :-1].clone()
        shifted[:, 0] = 7
        shifted.masked_fill_(shifted == 0, -1)
        return shifted[0].tolist(), shifted.max().item(), shifted.min().item(), shifted[:, 0].sum().item()

    assert asking(ask) == ([7] + [1] * (SEQ - 1), 7, -1, 7 * B)


@pytest.mark.parametrize(
    "make", [lambda: torch.tensor([3, 5], device="meta"), lambda: torch.full((2,), 5, device="meta")]
)
def test_numbers_that_a_model_writes_down_are_known(make: Callable[[], torch.Tensor]) -> None:
    assert asking(lambda mask: make().max().item()) == 5


def test_what_weights_or_chance_decide_is_never_known() -> None:
    weight = torch.empty(SEQ, device="meta")

    def mixed(mask: torch.Tensor) -> torch.Tensor:
        mask[:, 0] = weight.argmax()
        return mask

    questions: list[Callable[[torch.Tensor], Any]] = [
        lambda mask: (mask * weight).sum().item(),
        lambda mask: mixed(mask).max().item(),
        lambda mask: torch.rand_like(mask, dtype=torch.float32).max().item(),
        lambda mask: torch.randint(5, (3,), device="meta").max().item(),
        lambda mask: torch.empty(3, dtype=torch.long, device="meta").max().item(),
    ]
    for question in questions:
        with pytest.raises(TraceError, match="branches on the value of a tensor"):
            asking(question)


def test_an_answer_that_depends_on_the_batch_is_refused() -> None:
    with pytest.raises(TraceError, match="branches on the value of a tensor"):
        asking(lambda mask: bool(mask.sum() > 20))


def test_values_go_with_their_tensors() -> None:
    with tracing(torch.nn.Identity(), Workload(model="m", seq=SEQ), H200, probe=PROBE_BATCH) as session:
        session.tracer.begin("run", "forward")
        mask = given_mask(session, "ones", PROBE_BATCH)
        longer = mask.cumsum(-1)
        assert len(session.tracer.values._known) == 2
        del mask, longer
        assert not session.tracer.values._known


def test_what_nobody_asks_for_is_not_computed() -> None:
    """Such as gradients: zeros at first, to which a backward pass adds what nobody knows."""
    with tracing(torch.nn.Identity(), Workload(model="m", seq=SEQ), H200, probe=PROBE_BATCH) as session:
        session.tracer.begin("run", "forward")
        values, gradient = session.tracer.values, torch.zeros(SEQ, device="meta")
        before, zeros = gradient + 1, values._of(gradient)
        gradient.add_(torch.empty(SEQ, device="meta"))
        assert zeros is not None
        assert zeros._samples is None
        assert values._of(gradient) is None
        assert before.max().item() == 1  # as it was when the sum was taken
