"""Recorded passes, with calls kept in place of CUDA graphs: gradients, sizes, and who is given the memory."""

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import FAMILIES, flat_gradient, flat_weights, make_batch, make_model
from tests.unit.techniques.test_packing import with_pads

from vramfit.runtime import graphs, stepper
from vramfit.runtime.graphs import MAX_GIVEN_AWAY, CannotCapture, PassGraphs, RowSizes
from vramfit.runtime.stepper import Stepper
from vramfit.step.splitting import Rows, lengths_of, split
from vramfit.step.step import Step
from vramfit.tasks.parts.losses import head_loss
from vramfit.techniques import packing
from vramfit.techniques.packing import ROW_SEQUENCES, fill_up, row_sequences, row_size, row_tokens

TASK = "sequence-classification"
TASKS = ("sequence-classification", "token-classification", "masked-lm")
PACKED = [name for name in FAMILIES if name != "deberta-v2"]


class Call:
    """A call that is made when it is replayed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.replay = call


class Nothing:
    """What keeps no call."""

    def replay(self) -> None:
        """Do nothing."""


class Calls:
    """Records calls; the next one fails with `error`, where there is one."""

    def __init__(self, device: Any = None) -> None:
        self.error: BaseException | None = None
        self.num_forgotten = 0

    def __call__(self, call: Callable[[], None]) -> Call:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return Call(call)

    def forget(self) -> None:
        self.num_forgotten += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: made)
    return made


def make_stepper(model: torch.nn.Module, micro_batch: int = 4, **keywords: Any) -> Stepper:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    made = Stepper(model, optimizer, micro_batch=micro_batch, **keywords)
    made._graph_use.is_on = True  # as on a GPU
    return made


def packed_model(family: str = "bert", task: Any = TASK) -> torch.nn.Module:
    model = make_model(family, task)
    packing.apply(model, task)
    return model


def test_a_row_is_filled_up_with_sequences_that_nothing_counts() -> None:
    model = packed_model(task="token-classification")
    packed = packing.pack(with_pads("bert", make_batch("token-classification")), model)
    num_real, num_sequences = packed["input_ids"].shape[1], len(packed["cu_seq_lens_q"]) - 1
    filled = fill_up(packed, model, num_real + 100, 32)
    ends = filled["cu_seq_lens_q"]
    assert int(ends[-1]) == num_real + 100 == filled["input_ids"].shape[1]
    assert len(ends) - 1 == row_sequences(num_sequences, 100, 32)
    assert int(ends.diff().min()) >= 1
    assert int(ends.diff()[num_sequences:].max()) <= 32
    assert (filled["labels"][0, num_real:] == -100).all()
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(filled[name][:, :num_real], packed[name])
    starts = ends[num_sequences:-1].long()
    assert (filled["position_ids"][0, starts] == packed["position_ids"][0, 0]).all()


def test_a_full_row_needs_nothing() -> None:
    model = packed_model()
    packed = packing.pack(make_batch(TASK), model)
    filled = fill_up(packed, model, packed["input_ids"].shape[1], 32)
    assert all(torch.equal(filled[n], v) for n, v in packed.items() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("num_more", range(1, 40))
def test_every_sequence_that_fills_has_a_token_and_no_more_than_the_longest(num_more: int) -> None:
    num = row_sequences(5, num_more, 8) - 5
    assert num <= num_more <= 8 * num


def test_rows_come_in_few_sizes() -> None:
    sizes = {row_tokens(n, 5000) for n in range(1, 5001)}
    assert len(sizes) == 10
    assert max(sizes) == 5000


def test_rows_have_few_numbers_of_sequences() -> None:
    sizes = {tokens: row_size(tokens, 60 + tokens % 9, 20_480, 512) for tokens in range(2_000, 20_481 - 64)}
    kinds = {(n, row_sequences(60 + tokens % 9, n - tokens, 512)) for tokens, n in sizes.items()}
    assert len(kinds) < 3 * len({tokens for tokens, _ in kinds})
    assert all(number % ROW_SEQUENCES == 0 for _, number in kinds)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", PACKED)
def test_gradients_and_loss_are_those_of_passes_that_run_as_they_are(family: str, task: Any, calls: Calls) -> None:
    model = make_model(family, task)
    packing.apply(model, task)
    batch = with_pads(family, make_batch(task))
    stepper = make_stepper(model)
    before = float(stepper.gradients(batch))
    assert stepper._graph_use.passes is None  # the first shows what learns
    right = flat_gradient(model)
    for _ in range(2):
        assert float(stepper.gradients(batch)) == pytest.approx(before, rel=1e-5)
        assert (flat_gradient(model) - right).norm() / right.norm() < 1e-5
    assert stepper._graph_use.passes is not None
    assert stepper._graph_use.passes.num_captured >= 1


def test_training_goes_the_same_way(calls: Calls) -> None:
    made = []
    for records in (False, True):
        model = packed_model()
        stepper = make_stepper(model, max_grad_norm=1.0)
        stepper._graph_use.is_on = records
        stepper.rehearse(make_batch(TASK))
        for seed in range(4):
            stepper.step(with_pads("bert", make_batch(TASK, seed=seed)))
        made.append(flat_weights(model))
    assert (made[0] - made[1]).norm() / made[0].norm() < 1e-5


def test_parameters_that_do_not_learn_get_no_gradient(calls: Calls) -> None:
    model = packed_model()
    frozen = list(model.parameters())[:3]
    for parameter in frozen:
        parameter.requires_grad_(False)
    stepper = make_stepper(model)
    for _ in range(3):
        stepper.gradients(make_batch(TASK))
    assert all(parameter.grad is None for parameter in frozen)


def test_a_size_is_recorded_once(calls: Calls) -> None:
    stepper = make_stepper(packed_model(), micro_batch=12)
    for _ in range(5):
        stepper.step(make_batch(TASK))
    assert stepper._graph_use.passes is not None
    assert stepper._graph_use.passes.num_captured == 1


def test_the_largest_size_is_recorded_first(calls: Calls) -> None:
    model = packed_model()
    made = make_stepper(model, micro_batch=100)  # of which 12 are seen
    for _ in range(2):
        for _ in range(2):
            made.step(make_batch(TASK))
        assert made._graph_use.passes is not None
        sizes = [num_tokens for num_tokens, _ in made._graph_use.passes._graphs]
        assert sizes == [1600, 512]
        with torch.no_grad():
            model(**make_batch(TASK))


def test_whoever_calls_the_model_is_given_the_memory_first(calls: Calls) -> None:
    model = packed_model()
    stepper = make_stepper(model)
    for _ in range(3):
        stepper.step(make_batch(TASK))
    graphs_ = stepper._graph_use.passes
    assert graphs_ is not None
    assert graphs_._graphs
    copied = copy.deepcopy(model)
    copied(**make_batch(TASK))
    assert graphs_._graphs  # another model
    model.eval()
    with torch.no_grad():
        model(**make_batch(TASK))
    assert not graphs_._graphs
    assert not graphs_._gradients
    model.train()
    stepper.step(make_batch(TASK))
    assert graphs_._graphs


def test_a_loop_that_calls_the_model_at_every_step_is_not_recorded_for_long(calls: Calls) -> None:
    model = packed_model()
    stepper = make_stepper(model)
    for _ in range(MAX_GIVEN_AWAY + 3):
        stepper.step(make_batch(TASK))
        with torch.no_grad():
            model(**make_batch(TASK))
    assert stepper._graph_use.passes is None
    assert not stepper._graph_use.is_on


def test_what_cannot_be_recorded_runs_as_it_is(calls: Calls) -> None:
    model, batch = packed_model(), make_batch(TASK)
    twin = copy.deepcopy(model)
    stepper, plain = make_stepper(model), make_stepper(twin)
    plain._graph_use.is_on = False
    calls.error = RuntimeError("operation not permitted when stream is capturing")
    for number in range(3):
        if number == 1:
            with pytest.warns(UserWarning, match="not permitted when stream is capturing"):
                stepper.step(batch)
        else:
            stepper.step(batch)
        plain.step(batch)
    assert stepper.num_recoveries == 0
    assert torch.equal(flat_weights(model), flat_weights(twin))


def test_memory_that_runs_out_while_recording_costs_no_step(calls: Calls) -> None:
    model, batch = packed_model(), make_batch(TASK)
    stepper = make_stepper(model)
    calls.error = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(3):
        stepper.step(batch)
    assert (stepper.num_recoveries, stepper.num_steps) == (1, 3)
    assert stepper._graph_use.passes is None
    assert not stepper.state_dict()["graphs"]


def test_rows_of_samples_that_are_too_long_run_as_they_are(calls: Calls) -> None:
    model = packed_model()
    made = make_stepper(model, seq=4)
    batch = make_batch(TASK)
    made.step(batch)
    with pytest.warns(UserWarning, match="the longest sequence of"):
        made.step(batch)
    assert made.num_steps == 2


def test_labels_that_no_loss_leaves_out_are_not_filled_up() -> None:
    model = packed_model()
    graphs_ = PassGraphs(model, [], torch.no_grad, RowSizes(64, 16), capture=Calls())
    batch = make_batch(TASK)
    fractions = batch | {"labels": torch.rand(12, 2)}
    assert graphs_.takes(batch, head_loss(model, batch))
    assert not graphs_.takes(fractions, head_loss(model, fractions))
    assert not graphs_.takes(batch | {"bbox": batch["input_ids"]}, head_loss(model, batch))


def test_rows_are_levelled_where_they_are_recorded() -> None:
    batch = with_pads("bert", make_batch(TASK))
    most = sum(lengths_of(batch, packs=True)) // 2 + max(lengths_of(batch, packs=True))
    full, even = (
        [sum(lengths_of(part, packs=True)) for part in split(batch, most, rows=Rows(evenly))]
        for evenly in (False, True)
    )
    assert len(full) == len(even) == 2
    assert max(even) - min(even) < max(full) - min(full)
    assert sum(even) == sum(full)


def test_cannot_record_is_an_error_of_its_own() -> None:
    assert not isinstance(CannotCapture("x"), torch.OutOfMemoryError)
    assert stepper.CannotCapture is CannotCapture


def recorded(model: torch.nn.Module, **keywords: Any) -> tuple[Stepper, PassGraphs]:
    made = make_stepper(model, **keywords)
    for _ in range(3):
        made.step(make_batch(TASK))
    assert made._graph_use.passes is not None
    assert made._graph_use.passes._graphs
    return made, made._graph_use.passes


def drop_less(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.25


def put_elsewhere(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def freeze_embeddings(model: Any) -> None:
    model.bert.embeddings.requires_grad_(False)


def halve_gradients(model: Any) -> None:
    model.classifier.weight.register_hook(lambda gradient: gradient / 2)


def step_in_backward(model: Any) -> None:
    model.classifier.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def look_at_outputs(model: Any) -> None:
    model.classifier.register_forward_hook(lambda *given: None)


CHANGES = [torch.nn.Module.eval, drop_less, put_elsewhere, freeze_embeddings]
CHANGES += [halve_gradients, step_in_backward, look_at_outputs]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_recorded_of_a_model_as_it_is_no_more_is_let_go(change: Callable[[Any], Any], calls: Calls) -> None:
    model: Any = packed_model()
    made, graphs_ = recorded(model)
    before = graphs_.num_captured
    change(model)
    made.step(make_batch(TASK))  # as it is
    assert not graphs_._graphs
    assert graphs_.num_captured == before
    made.step(make_batch(TASK))
    assert graphs_.num_captured == 2 * before


def test_parameters_that_learn_later_have_gradients(calls: Calls) -> None:
    model: Any = packed_model()
    model.bert.embeddings.requires_grad_(False)
    made, graphs_ = recorded(model)
    late = list(model.bert.embeddings.parameters())
    model.bert.embeddings.requires_grad_(True)
    for _ in range(3):
        made.gradients(make_batch(TASK))
        assert all(p.grad is not None for p in late)
    assert {id(p) for p in late} <= {id(p) for p in graphs_.learned}


def test_a_model_that_changes_with_every_pass_is_not_recorded_for_long(calls: Calls) -> None:
    model: Any = packed_model()
    model.num_passes = 0
    model.register_forward_hook(lambda *given: setattr(model, "num_passes", model.num_passes + 1))
    made = make_stepper(model)
    for _ in range(4 * MAX_GIVEN_AWAY):
        made.step(make_batch(TASK))
    assert not made._graph_use.is_on


def test_weights_that_are_loaded_in_place_change_nothing(calls: Calls) -> None:
    model = packed_model()
    made, graphs_ = recorded(model)
    before = graphs_.num_captured
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    made.step(make_batch(TASK))
    assert graphs_._graphs
    assert graphs_.num_captured == before


def test_a_model_does_not_keep_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(Calls):
        def __call__(self, call: Callable[[], None]) -> Any:
            return Nothing()

    monkeypatch.setattr(graphs, "CudaCapture", Kept)
    model = packed_model()
    hooks = len(model._forward_pre_hooks)
    made, graphs_ = recorded(model)
    assert len(model._forward_pre_hooks) == hooks + 1
    seen = weakref.ref(graphs_)
    del made, graphs_
    assert seen() is None  # at once: nobody collects garbage for a GPU
    assert len(model._forward_pre_hooks) == hooks


def test_a_graph_casts_its_weights_itself(calls: Calls) -> None:
    model, batch = packed_model(), make_batch(TASK)
    twin = copy.deepcopy(model)
    made, plain = (make_stepper(m, precision="amp-bf16") for m in (model, twin))
    plain._graph_use.is_on = False
    made.step(batch)
    plain.step(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which keeps casts until it ends
        for _ in range(3):
            made.step(batch)
    for _ in range(3):
        plain.step(batch)
    assert made._graph_use.passes is not None
    assert (flat_weights(model) - flat_weights(twin)).norm() / flat_weights(twin).norm() < 1e-3


def test_a_gradient_that_is_new_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = packed_model(), make_batch(TASK)
    late = next(model.parameters())

    class MakesOne(Calls):
        def __call__(self, call: Callable[[], None]) -> Call:
            late.grad = torch.zeros_like(late)  # in the memory of graphs
            return Call(call)

    monkeypatch.setattr(graphs, "CudaCapture", MakesOne)
    made = make_stepper(model)
    made.step(batch)
    assert made._graph_use._learned is not None
    made._graph_use._learned = [p for p in made._graph_use._learned if p is not late]
    with pytest.warns(UserWarning, match="had no gradient in the passes before"):
        made.gradients(batch)
    assert late.grad is not None
    assert late.grad.any()
    assert not made._graph_use.is_on


def test_a_state_of_another_size_is_recorded_anew(calls: Calls) -> None:
    model = packed_model()
    made, graphs_ = recorded(model)
    larger = make_stepper(packed_model(), micro_batch=8)
    larger.step(make_batch(TASK))
    made.load_state_dict(larger.state_dict())
    for _ in range(2):
        made.step(make_batch(TASK))
    assert made._graph_use.is_on
    assert made._graph_use.passes is not graphs_
    assert made._graph_use.passes is not None


def test_a_run_without_graphs_says_nothing_against_them() -> None:
    model = packed_model()
    plain = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), micro_batch=4)
    plain.step(make_batch(TASK))
    made = make_stepper(packed_model())
    made.load_state_dict(plain.state_dict())
    assert made._graph_use.is_on


def test_a_rehearsal_that_fails_is_no_word_on_graphs(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    made, batch = make_stepper(packed_model()), make_batch(TASK)
    with monkeypatch.context() as patched:
        patched.setattr(Step, "passes", lambda *given, **keywords: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.rehearse(batch)
    made.rehearse(batch)
    assert made._graph_use.passes is not None


def test_batches_that_cannot_be_filled_up_make_no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: 1 / 0)
    made = make_stepper(packed_model())
    for _ in range(3):
        made.step(make_batch(TASK) | {"labels": torch.rand(12, 3)})
    assert made._graph_use.passes is None


def test_rows_are_filled_up_with_places_that_the_model_has(calls: Calls) -> None:
    model: Any = packed_model()
    most = model.config.max_position_embeddings
    made = make_stepper(model, micro_batch=1, seq=16 * most)
    for _ in range(2):
        made.step(make_batch(TASK, size=31))  # one more makes it 32
    assert made._graph_use.passes is not None
    assert all(int(inputs["position_ids"].max()) < most for _, inputs in made._graph_use.passes._graphs.values())


@pytest.mark.parametrize(
    ("precision", "capability", "is_recorded"),
    [("amp-bf16", (9, 0), True), ("bf16", (8, 0), True), ("fp32", (9, 0), False), ("amp-bf16", (7, 5), False)],
)
def test_only_passes_of_the_packed_kernel_are_recorded(
    precision: Any, capability: tuple[int, int], is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the host looks at the lengths in each pass."""
    model: Any = packed_model().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(stepper, "check", lambda *given: None)
    monkeypatch.setattr(stepper.offloading, "layer_slots_of", lambda m: SimpleNamespace(device=torch.device("cuda")))
    made = Stepper(
        model, torch.optim.AdamW(model.parameters(), fused=True), micro_batch=4, precision=precision, graphs=True
    )
    assert made.uses_graphs is is_recorded


@pytest.mark.filterwarnings("error")
def test_a_recorder_that_could_not_be_made_goes_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "CudaCapture", fail)
    made = make_stepper(packed_model())
    for _ in range(3):
        made.step(make_batch(TASK))
    assert (made.num_steps, made.num_recoveries) == (3, 1)
    assert not made.uses_graphs
