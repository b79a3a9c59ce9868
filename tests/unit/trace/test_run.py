"""A model and a workload → a stream: whole steps traced, and nothing of the user's touched."""

import copy
import logging
from typing import Any

import pytest
import torch
from tests.unit.trace.recording import H200, Applied, Asked, Small, asked
from torch.nn.modules import module as module_hooks
from transformers import BertConfig, BertForSequenceClassification

from vramfit.errors import TraceError, WorkloadError
from vramfit.models.resolve import resolve
from vramfit.records.stream import Stream
from vramfit.trace import run as traces
from vramfit.trace.run import prepare, trace
from vramfit.trace.template import StreamTemplate, order_of
from vramfit.workload import Workload

TINY = BertConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    vocab_size=50,
    max_position_embeddings=32,
)


def run(model: Any, batch: int = 4, **keywords: Any) -> Stream:
    keywords = {"seq": 16, "batch": batch} | keywords
    resolved = resolve(model, task=keywords.get("task", "sequence-classification"))
    workload = Workload(model="m", **keywords)
    return trace(resolved, workload, H200).instantiate(workload.micro_batch or 0, order_of(workload))


def run_module(between: torch.nn.Module, **keywords: Any) -> list[Asked]:
    return asked(run(Small(between), task="features", mask="none", **keywords))


def part_names(stream: Stream) -> list[str]:
    """Parts in order, repetitions left out."""
    names = [name for _, name in stream.parts]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


# -- streams -----------------------------------------------------------------------------------------


def test_a_training_run_loads_brings_inputs_and_takes_two_steps() -> None:
    stream = run(TINY)
    step = ["forward", "backward", "forward", "optimizer"]
    assert part_names(stream) == ["load", "inputs", *step, *step]
    assert [m.name for m in stream.marks if m.kind == "phase"] == ["load", "first_step", "steady_step"]


@pytest.mark.parametrize("loop", ["plain", "stepper"])
@pytest.mark.parametrize("precision", ["fp32", "amp-fp16"])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-8bit"])
def test_a_second_micro_batch_is_the_same_in_every_step(
    loop: str, precision: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords: dict[str, Any] = {"loop": loop, "precision": precision, "optimizer": optimizer}
    workload = Workload(model="m", seq=16, batch=12, accumulate=3, checkpointing=1, max_grad_norm=1.0, **keywords)
    short = trace(resolve(TINY), workload, H200)
    monkeypatch.setattr(traces, "_traced_steps", lambda workload: [("first", 2), ("steady", 2)])
    monkeypatch.setattr(StreamTemplate, "repeat_second_pass", lambda self: None)
    whole = trace(resolve(TINY), workload, H200)
    assert short.instantiate(4, order_of(workload, 2)) == whole.instantiate(4, order_of(workload, 2))
    steady = [("steady.micro0", 1), ("steady.micro1", 2), ("steady.optimizer", 1)]
    assert short.work_at(4, steady) == whole.work_at(4, steady)


@pytest.mark.parametrize("mode", ["forward", "infer"])
def test_without_training_there_is_only_a_forward_part(mode: str) -> None:
    stream = run(TINY, mode=mode)
    assert part_names(stream) == ["load", "inputs", "forward"]
    assert {a.freed for a in asked(stream) if a.part == "forward" and "workspace" not in a.operator} == {True}


def test_only_weights_state_gradients_and_workspaces_outlive_the_first_step() -> None:
    kept = [a for a in asked(run(TINY)) if not a.freed]
    assert {a.part for a in kept} == {"load", "inputs", "forward", "backward", "optimizer"}
    assert {a.operator for a in kept if a.part in ("forward", "backward")} == {
        "cublas_workspace",
        "cublaslt_workspace",
    }
    weights = sum(a.size for a in kept if a.operator == "parameter")
    buffers = 32 * 8 * 2  # position_ids and token_type_ids
    assert sum(a.size for a in kept if a.part == "optimizer") == 2 * (weights - buffers)


def test_micro_batches_repeat_the_second() -> None:
    workload = Workload(model="m", batch=12, accumulate=4)
    names = [name for name, _ in order_of(workload)]
    assert names[2:7] == ["first.micro0", "first.micro1", "first.micro1", "first.micro1", "first.optimizer"]
    assert names[7:] == ["steady.micro0", "steady.micro1", "steady.micro1", "steady.micro1", "steady.optimizer"]


def test_a_batch_that_does_not_divide_ends_in_a_smaller_micro_batch() -> None:
    uneven = Workload(model="m", batch=11, micro_batch=4, loop="stepper")
    assert order_of(uneven, 0, 4)[2:] == [
        ("first.micro0", "first_step"),
        ("first.micro1", None),
        ("first.micro1", None, 3),
        ("first.optimizer", None),
    ]
    assert all(len(turn) == 2 for turn in order_of(uneven, 0, 5))  # another micro-batch: nobody knows the batch
    assert order_of(Workload(model="m", batch=9, micro_batch=4, loop="stepper"), 0, 4)[4] == ("first.micro1", None, 2)
    assert all(len(turn) == 2 for turn in order_of(Workload(model="m", batch=12, accumulate=3), 0, 4))


def test_phases_are_named_once_and_further_steps_are_counted() -> None:
    phases = [phase for _, phase in order_of(Workload(model="m"), 3) if phase is not None]
    assert phases == ["load", "first_step", "steady_step", "steady_step_2", "steady_step_3"]
    assert [name for name, _ in order_of(Workload(model="m", mode="infer"), 2)] == [
        "load",
        "inputs",
        "first.micro0",
        "steady.micro0",
        "steady.micro0",
    ]


def test_inputs_are_the_tensors_of_the_task() -> None:
    sizes = [a.size for a in asked(run(TINY, batch=4)) if a.part == "inputs"]
    assert sizes == [4 * 16 * 8, 4 * 16 * 8, 4 * 8]


@pytest.mark.parametrize(
    ("optimizer", "states"), [("sgd", 0), ("adamw", 2), ("adamw-single", 2), ("adamw-fused", 2), ("adafactor", 0)]
)
def test_optimizers_keep_the_state_they_are_known_for(optimizer: str, states: int) -> None:
    found = asked(run(TINY, optimizer=optimizer))
    largest = 50 * 16 * 4
    assert len([a for a in found if a.part == "optimizer" and a.size == largest and not a.freed]) == states


def test_a_frozen_layer_has_no_gradient_and_no_state() -> None:
    learning, frozen = asked(run(TINY)), asked(run(TINY, freeze="encoder"))
    assert any("encoder" in a.module for a in learning if a.part == "backward")
    assert not any("encoder" in a.module for a in frozen if a.part == "backward")
    assert sum(a.size for a in frozen if a.part == "optimizer") < sum(a.size for a in learning if a.part == "optimizer")


def test_checkpointed_layers_are_computed_again_in_backward() -> None:
    def layers(**keywords: Any) -> set[str]:
        again = [a.module for a in asked(run(TINY, **keywords)) if a.part == "recompute"]
        return {name.split(".")[3] for name in again if ".layer." in name}

    assert layers() == set()
    assert layers(checkpointing=1) == {"0"}
    assert layers(checkpointing="full") == {"0", "1"}


@pytest.mark.parametrize(("dropout", "num_masks"), [(True, 8), (False, 0)])
def test_dropout_off_makes_no_masks(dropout: bool, num_masks: int) -> None:
    found = asked(run(TINY, mode="forward", attention="eager", dropout=dropout))
    # embeddings, three a layer, classifier; each a mask and an output, in two steps
    assert len([a for a in found if a.operator == "native_dropout"]) == 4 * num_masks


# -- data --------------------------------------------------------------------------------------------


def branch(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (branch, "_local_scalar_dense"),
        (lambda x: x * x.max().item(), "_local_scalar_dense"),
        (lambda x: torch.unique(x, dim=0), "unique_dim"),
        (lambda x: torch.masked_select(x, x > 0).view(-1, 32), "masked_select"),
        (lambda x: x * float(x.cpu().sum()), "_to_copy"),
    ],
)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_forward_that_depends_on_data_names_operator_and_module(function: Any, operator: str, mode: str) -> None:
    with pytest.raises(TraceError, match=r"^(\S+ in )?between\.1 ") as caught:
        run_module(torch.nn.Sequential(torch.nn.GELU(), Applied(function)), mode=mode)
    assert (caught.value.operator, caught.value.module_path) == (operator, "between.1")
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_the_model_itself_is_named_where_no_module_is() -> None:
    class Branching(Small):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return branch(super().forward(input_ids))

    with pytest.raises(TraceError, match=r"^the model branches on the value"):
        run(Branching(), task="features", mask="none")


def test_nonzero_is_followed_as_if_everything_were_found() -> None:
    def select(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 32)
        return rows[(rows[:, 0] > 0).nonzero()[:, 0]]

    found = run_module(Applied(select), batch=4)
    assert {a.size for a in found if a.operator == "index"} == {4 * 16 * 32 * 4}


def test_an_error_of_the_models_own_is_worded_as_one_line_and_kept_as_the_cause() -> None:
    with pytest.raises(TraceError, match="does not run on tensors without data: ZeroDivisionError") as caught:
        run_module(Applied(lambda x: x * (1 // 0)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_module_in_which_nothing_learns_cannot_be_trained_but_infers() -> None:
    model = Small().requires_grad_(False)
    with pytest.raises(WorkloadError, match="every parameter of the model is frozen"):
        run(model, task="features", mask="none")
    assert run(model, task="features", mask="none", mode="infer").num_requests


# -- what is left behind -----------------------------------------------------------------------------


def state_of_torch() -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_default_dtype(),
        torch.get_rng_state().tolist(),
        torch.autocast,
        torch.is_autocast_enabled,
        torch.utils.checkpoint._get_autocast_kwargs,
        len(module_hooks._global_forward_hooks),
        len(module_hooks._global_forward_pre_hooks),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        logging.getLogger("transformers").level,
    ]


@pytest.mark.parametrize("keywords", [{}, {"mode": "infer"}, {"precision": "amp-fp16", "checkpointing": "full"}])
def test_a_trace_leaves_torch_as_it_was(keywords: dict[str, Any]) -> None:
    before = state_of_torch()
    run(TINY, **keywords)
    assert state_of_torch() == before


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_trace_does_not_care_whether_gradients_are_on_outside(context: Any, mode: str) -> None:
    expected = run(TINY, mode=mode).events
    with context():
        assert run(TINY, mode=mode).events == expected
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("function", [branch, lambda x: x * (1 // 0)])
def test_a_trace_that_fails_leaves_torch_as_it_was_too(function: Any) -> None:
    model = Small(Applied(function))
    before = state_of_torch()
    with pytest.raises((TraceError, ZeroDivisionError)):
        run(model, task="features", mask="none", precision="amp-bf16")
    assert state_of_torch() == before
    run(TINY)


def test_a_module_that_is_given_is_followed_as_it_is_and_not_touched() -> None:
    torch.manual_seed(0)
    module = BertForSequenceClassification(TINY).eval()
    module.bert.embeddings.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    found = asked(run(module))
    assert not any("embeddings" in a.module for a in found if a.part == "backward")
    run(module, precision="bf16", checkpointing="full", freeze="encoder", attention="eager")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert not module.training
    assert not module.is_gradient_checkpointing
    assert module.config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in module.parameters())
    assert [p.requires_grad for p in module.bert.embeddings.parameters()] == [False] * 5
    assert all(p.requires_grad for p in module.bert.encoder.parameters())


def test_a_module_gives_the_stream_of_its_configuration() -> None:
    assert run(BertForSequenceClassification(TINY)).events == run(TINY).events


def test_a_model_is_prepared_in_the_mode_of_its_workload() -> None:
    def prepared(**keywords: Any) -> Any:
        return prepare(resolve(TINY), Workload(model="m", **keywords))

    assert prepared().training
    assert not prepared(dropout=False).training
    assert not prepared(mode="infer").training
    assert prepared(mode="forward").training
    assert prepared(checkpointing="full").is_gradient_checkpointing
    assert {p.dtype for p in prepared(precision="bf16").parameters()} == {torch.bfloat16}
