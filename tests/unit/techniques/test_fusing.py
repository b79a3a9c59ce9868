"""Fused layers learn what plain ones learn, within rounding, and only where they can; on a CPU, by the reference."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import transformers
from tests.unit.runtime import failures
from tests.unit.runtime.failures import Kind, quick, train
from tests.unit.runtime.small_models import COMMON, HEADS, make_batch, make_model

import vramfit
from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.runtime.stepper import Stepper
from vramfit.settings import checkpointing
from vramfit.settings import freeze as freezing
from vramfit.tasks.parts.losses import model_inputs
from vramfit.techniques import application, casting, fusing, lora, packing
from vramfit.techniques.fusing import trial
from vramfit.techniques.fusing.layer import FusedLayer, compute
from vramfit.workload import Workload

TASK = "sequence-classification"
FUSED = ("bert", "roberta", "electra", "distilbert")
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
Model = torch.nn.Module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the fused function, but for those that try a layer out."""
    seen: list[Any] = []

    class Seen(FusedLayer):
        @classmethod
        def apply(cls, *args: Any) -> Any:
            seen.append(args)
            return FusedLayer.apply(*args)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(fusing, "FusedLayer", Seen)
    return seen


def packed(family: str, task: Any = TASK, **changes: Any) -> Model:
    model = make_model(family, task, **changes)
    packing.apply(model, task)
    return model


def fused(family: str = "bert", task: Any = TASK, **changes: Any) -> Model:
    model = packed(family, task, **changes)
    fusing.apply(model)
    assert fusing.is_applied(model)
    return model


def learn(model: Model, task: Any = TASK, *, seed: int = 0, dtype: torch.dtype | None = torch.bfloat16) -> float:
    """The loss of a pass, whose gradients are left in the model."""
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(**packing.pack(make_batch(task), model)).loss
    loss.backward()
    return loss.item()  # type: ignore[no-any-return]


def gradients(model: Model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(made: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, as a share."""
    assert made.keys() == exact.keys()
    apart = sum(float((made[name] - exact[name]).square().sum()) for name in exact)
    return (apart / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


@pytest.mark.parametrize("task", [t for t in HEADS if t != "question-answering"])
@pytest.mark.parametrize("family", FUSED)
def test_loss_and_gradients_are_those_of_plain_layers(family: str, task: Any, calls: list[Any]) -> None:
    exact, plain, model = packed(family, task), packed(family, task), fused(family, task)
    learn(exact, task, dtype=None)
    before = learn(plain, task)
    assert not calls
    assert learn(model, task) == pytest.approx(before, rel=1e-3)
    assert len(calls) == len(encoder_layers(model))
    rounding = error(gradients(plain), gradients(exact))
    assert error(gradients(model), gradients(exact)) <= 1.1 * rounding
    assert {g.dtype for g in gradients(model).values()} == {torch.float32}


def test_answers_are_those_of_plain_layers() -> None:
    task = "question-answering"
    found = []
    for model in (packed("bert", task), fused("bert", task)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(model(**model_inputs(packing.pack(make_batch(task), model))).start_logits.float())
    assert torch.equal(*found)


@pytest.mark.parametrize("family", FUSED)
def test_no_sample_sees_another(family: str, calls: list[Any]) -> None:
    task = "token-classification"
    model, batch = fused(family, task), make_batch(task)
    other = {name: value.clone() for name, value in batch.items()}
    other["input_ids"][4, :3] = 50
    rows = torch.arange(12).repeat_interleave(batch["attention_mask"].sum(1))
    seen = []
    for given in (batch, other):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(**model_inputs(packing.pack(given, model))).logits[0]
        logits[rows == 3].float().square().sum().backward()
        seen.append((logits.detach(), {n: g for n, g in gradients(model).items() if "emb" not in n}))
    (before, those), (after, these) = seen
    assert calls
    assert torch.equal(before[rows != 4], after[rows != 4])
    assert not torch.equal(before[rows == 4], after[rows == 4])
    assert all(torch.equal(those[name], these[name]) for name in those)


def test_dropout_is_drawn_anew_and_drawn_again_from_the_same_seed() -> None:
    model = fused(**DROPOUT)
    losses = [learn(model, seed=seed) for seed in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


def test_backward_drops_what_forward_dropped() -> None:
    """By differences: a step against the gradient lowers a loss whose dropout is drawn from the same seed."""
    model = fused(**DROPOUT)
    before = learn(model, seed=3)
    norm = sum(float(g.square().sum()) for g in gradients(model).values())
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.02 / norm**0.5 * p.grad
    model.zero_grad()
    assert learn(model, seed=3) - before == pytest.approx(-0.02 * norm**0.5, rel=0.1)


def test_a_layer_that_is_computed_again_draws_the_same() -> None:
    plain, again = fused(**DROPOUT), fused(**DROPOUT)
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    assert learn(plain) == learn(again)
    assert error(gradients(again), gradients(plain)) == 0


@pytest.mark.parametrize("freeze", ["embeddings", 1, "*.bias", "*.query.*", "encoder"])
def test_what_is_frozen_has_no_gradient_and_changes_no_other(freeze: Any) -> None:
    whole, model = fused(), fused()
    freezing.apply(model, freeze)
    learn(whole)
    learn(model)
    found = gradients(model)
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad and name in gradients(whole)}
    assert error(found, {name: g for name, g in gradients(whole).items() if name in found}) == 0


def test_gradients_of_passes_add_up() -> None:
    model = fused()
    learn(model)
    one = gradients(model)
    learn(model)
    assert error(gradients(model), {name: 2 * g for name, g in one.items()}) < 1e-6


def no_autocast(model: Model) -> None:
    model(**packing.pack(make_batch(TASK), model)).loss.backward()


def padded(model: Model) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**make_batch(TASK)).loss.backward()


def hooked(model: Any) -> None:
    model.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda *_: None)
    model.bert.encoder.layer[1].output.register_forward_pre_hook(lambda *_: None)
    learn(model)


def hooked_above(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        layer.attention.register_forward_hook(lambda *_: None)
    learn(model)


def hooked_beside(model: Any) -> None:
    model.bert.encoder.layer[0].output.dropout.register_forward_hook(lambda *_: None)
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn.register_forward_hook(lambda *_: None)
    learn(model)


def replaced(model: Any) -> None:
    model.bert.encoder.layer[0].output = copy.deepcopy(model.bert.encoder.layer[0].output)
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = torch.nn.ReLU()
    learn(model)
    assert all(p.grad is not None for p in model.bert.encoder.layer[0].output.parameters())


def without_dropout(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        layer.output.dropout = torch.nn.Identity()
    learn(model)


def patched(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        layer.output.forward = type(layer.output).forward.__get__(layer.output)
    learn(model)


def halved(model: Model) -> None:
    model.to(torch.bfloat16)
    learn(model)


def adapted(model: Any) -> None:
    lora.apply(model, 4)
    learn(model)


def seeing_less(model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**packing.pack(make_batch(TASK), model), is_causal=True)


CALLS = [
    seeing_less,
    *(no_autocast, padded, hooked, hooked_above, hooked_beside, replaced, without_dropout, patched),
    *(halved, adapted),
]


@pytest.mark.parametrize("call", CALLS)
def test_other_calls_run_as_before(call: Any, calls: list[Any]) -> None:
    model = fused()
    call(model)
    assert not calls


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"hidden_act": "gelu_new"}, {"is_decoder": True}], ids=str)
def test_layers_of_another_kind_stay(changes: dict[str, Any]) -> None:
    model = make_model("bert", TASK, **changes)
    fusing.apply(model)
    assert not fusing.can_be(model)
    assert not fusing.is_applied(model)


def test_heads_that_the_kernel_does_not_take_stay() -> None:
    model = make_model("bert", TASK, hidden_size=36, num_attention_heads=3)
    assert not fusing.can_be(model)
    with pytest.raises(WorkloadError, match=r"takes heads of 8, 16"):
        vramfit.estimate(model.config, attention="packed", precision="amp-bf16", loop="stepper", gpu="h200")
    made = vramfit.plan(model.config, batch=8, lengths=[3, 20, 64], gpu="h200", memory="4GiB", precision="amp-bf16")
    assert made.workload.attention == "sdpa"


def test_a_part_of_another_class_stays() -> None:
    model: Any = make_model("bert", TASK)

    class Mine(type(model.bert.encoder.layer[0].output)):  # type: ignore[misc]
        pass

    model.bert.encoder.layer[0].output.__class__ = Mine
    assert not fusing.can_be(model)


def test_hidden_states_that_were_once_asked_for_change_nothing(calls: list[Any]) -> None:
    model = fused()
    with torch.no_grad():
        model(**make_batch(TASK), output_hidden_states=True, output_attentions=True)
    learn(model)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["camembert", "xlm-roberta"])
def test_cousins_learn_the_same(name: str, calls: list[Any]) -> None:
    losses = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name, **(COMMON | {"pad_token_id": 1}))
        model = transformers.AutoModelForSequenceClassification.from_config(config).train()
        packing.apply(model, TASK)
        if is_fused:
            fusing.apply(model)
        losses.append(learn(model))
    assert calls
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_model_on_the_meta_device_runs_as_before() -> None:
    model = fused().to("meta")
    assert model(input_ids=make_batch(TASK)["input_ids"].to("meta")).logits.is_meta


def test_steppers_of_other_plans_change_the_layers_back() -> None:
    job: dict[str, Any] = {"batch": 12, "lengths": [5, 9, 128, 30], "gpu": "a100-40gb", "precision": "amp-bf16"}
    model = make_model("bert", TASK)
    for is_fused in (False, True, False):
        plan = vramfit.plan("bert-tiny", **job, fused=is_fused)
        Stepper(model, torch.optim.AdamW(model.parameters()), plan=plan)
        assert (fusing.is_applied(model), casting.is_applied(model)) == (is_fused, not is_fused)


@pytest.mark.parametrize("family", ["albert", "deberta-v2"])
def test_families_of_another_kind_stay(family: str) -> None:
    model = make_model(family, TASK)
    fusing.apply(model)
    assert not fusing.can_be(model)
    assert not fusing.is_applied(model)


def test_a_model_can_be_copied_saved_and_undone(calls: list[Any]) -> None:
    model = fused()
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    buffer.seek(0)
    for made in (copy.deepcopy(model), pickle.load(buffer)):
        assert fusing.is_applied(made)
        learn(made)
        assert all(p.grad is None for p in model.parameters())  # it is the copy's layers that learned
        assert all(p.grad is not None for p in encoder_layers(made)[0].parameters())
    assert model.state_dict().keys() == packed("bert").state_dict().keys()
    calls.clear()
    fusing.undo(model)
    assert not fusing.is_applied(model)
    learn(model)
    assert not calls


@pytest.mark.parametrize("computed_twice", [False, True])
def test_memory_that_runs_out_anywhere_leaves_no_trace(computed_twice: bool, calls: list[Any]) -> None:
    """Also amid a fused layer, forward or backward: the step is done again, and draws what it drew."""

    def prepare(model: Model) -> None:
        packing.apply(model, TASK)
        fusing.apply(model)
        if computed_twice:
            checkpointing.apply(model, "full")

    kind = Kind(failures.DROPOUT, prepare=prepare, precision="amp-bf16")
    with quick():
        expected = train(kind)
        assert calls
        for n in range(*expected.last_allocations[:2], 13):
            assert train(kind, [n]).equals(expected), n


def test_a_graph_that_is_kept_gives_the_same_gradient_twice() -> None:
    model = fused()
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**packing.pack(make_batch(TASK), model)).loss
    loss.backward(retain_graph=True)
    one = gradients(model)
    model.zero_grad()
    loss.backward()
    assert error(gradients(model), one) == 0


def test_techniques_fuse_or_cast_together() -> None:
    job = {"model": "bert", "attention": "packed", "precision": "amp-bf16", "loop": "stepper", "casts": "together"}
    model = make_model("bert", TASK)
    application.apply(model, Workload(**job, fused=True))
    assert fusing.is_applied(model)
    assert not casting.is_applied(model)
    application.apply(model, Workload(**job))
    assert not fusing.is_applied(model)
    assert casting.is_applied(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "sdpa"},
        {"mode": "forward"},
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"compile": True},
        {"lora": 8},
        {"quantize": "int8", "freeze": "backbone"},
        {"offload": "optimizer"},
        {"num_gpus": 2},
    ],
    ids=str,
)
def test_what_does_not_go_together_is_said(changes: dict[str, Any]) -> None:
    job = {"model": "bert", "attention": "packed", "precision": "amp-bf16", "loop": "stepper", "fused": True}
    with pytest.raises(WorkloadError, match="fused"):
        Workload(**(job | changes))


def test_a_stepper_learns_from_a_plan_with_fused_layers(calls: list[Any]) -> None:
    plan = vramfit.plan("bert-tiny", batch=12, lengths=[5, 9, 128, 30], gpu="a100-40gb", precision="amp-bf16")
    assert plan.workload.fused
    assert plan.workload.attention == "packed"
    model = make_model("bert", TASK)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters()), plan=plan)
    losses = [stepper.step(make_batch(TASK)) for _ in range(6)]
    assert calls
    assert losses[-1] < losses[0]


def test_fused_layers_take_less_than_plain_ones() -> None:
    job = {"batch": 16, "seq": 128, "gpu": "h200", "attention": "packed", "precision": "amp-bf16", "loop": "stepper"}
    plain, made = (vramfit.estimate("bert-base-uncased", **job, fused=is_fused) for is_fused in (False, True))
    assert made.peak_allocated_bytes < plain.peak_allocated_bytes
    assert made.step_time_s is not None
    assert plain.step_time_s is not None
    assert made.step_time_s < plain.step_time_s


@pytest.mark.parametrize("name", ["albert-base-v2"])
def test_a_job_that_asks_for_what_its_model_has_not_is_refused(name: str) -> None:
    job = {"batch": 4, "seq": 32, "gpu": "h200", "attention": "packed", "precision": "amp-bf16", "loop": "stepper"}
    with pytest.raises(WorkloadError, match="cannot be fused: they have"):
        vramfit.estimate(name, **job, fused=True)


ALONE = [("bert", "amp"), ("bert", "16 bits"), ("electra", "amp"), ("modernbert", "amp"), ("modernbert", "16 bits")]


def answers(model: Model, arithmetic: str) -> torch.Tensor:
    """Without learning."""
    model.eval()
    if arithmetic == "16 bits":
        model.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic == "amp"):
        logits: torch.Tensor = model(**model_inputs(packing.pack(make_batch(TASK), model))).logits
    return logits.float()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The calls that only go forward: whether they keep anything."""
    seen: list[bool] = []

    def run(*args: Any, keeps: bool) -> Any:
        seen.append(keeps)
        return compute(*args, keeps=keeps)

    monkeypatch.setattr(fusing, "compute", run)
    return seen


@pytest.mark.parametrize(("family", "arithmetic"), ALONE)
def test_forward_alone_gives_what_plain_layers_give_and_keeps_nothing(
    family: str, arithmetic: str, calls: list[Any], alone: list[bool]
) -> None:
    plain = answers(packed(family), arithmetic)
    assert not alone
    torch.testing.assert_close(answers(fused(family), arithmetic), plain, rtol=0.02, atol=0.02)
    assert alone == [False, False]
    assert not calls


def test_a_pass_without_a_graph_drops_what_the_pass_with_one_drops(alone: list[bool], calls: list[Any]) -> None:
    """As where all texts of a batch are compared: their vectors are made first, and then every pass again."""
    model = fused(**DROPOUT)
    made = []
    for learns in (False, True):
        torch.manual_seed(5)
        with torch.set_grad_enabled(learns), torch.autocast("cpu", dtype=torch.bfloat16):
            made.append(model(**packing.pack(make_batch(TASK), model)).logits)
    assert len(alone) == len(calls) == 2
    assert torch.equal(*made)


@pytest.mark.parametrize("precision", ["amp-bf16", "bf16"])
@pytest.mark.parametrize("name", ["bert-base-uncased", "modernbert-base"])
def test_forward_alone_is_predicted_to_take_no_more(name: str, precision: str) -> None:
    job = {"mode": "infer", "batch": 32, "seq": 128, "gpu": "h200", "attention": "packed", "precision": precision}
    plain, made = (vramfit.estimate(name, **job, fused=is_fused) for is_fused in (False, True))
    assert made.peak_requested_bytes <= plain.peak_requested_bytes
    assert made.step_time_s is not None
    assert plain.step_time_s is not None
    assert made.step_time_s < plain.step_time_s


@pytest.mark.parametrize("name", ["modernbert-base", "gte-multilingual-base"])
def test_layers_whose_speed_was_not_measured_are_fused_where_that_is_asked_for(name: str) -> None:
    job: dict[str, Any] = {"batch": 16, "lengths": [64, 200, 512], "gpu": "h200", "precision": "amp-bf16"}
    assert not vramfit.plan(name, **job).workload.fused
    made = vramfit.plan(name, **job, fused=True)
    assert made.workload.fused
    same = {"batch": 16, "seq": 512, "gpu": "h200", "precision": "amp-bf16", "attention": "packed", "loop": "stepper"}
    plain, estimate = (vramfit.estimate(name, **same, fused=is_fused) for is_fused in (False, True))
    assert estimate.peak_allocated_bytes < plain.peak_allocated_bytes


def test_a_layer_that_does_something_else_is_left_alone_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type(encoder_layers(make_model("bert", TASK))[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden, *args, **more: 1.5 * forward(self, hidden, *args, **more))
    monkeypatch.setattr(trial, "_found", {})
    model = packed("bert")
    with pytest.warns(UserWarning, match="BertLayer is not fused: its answers differ from its own code's by"):
        fusing.require(model)
    assert not fusing.is_applied(model)


def test_a_plan_does_not_count_on_kernels_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU where a layer's kernels fail; Triton's compiler is what fails most."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(fusing, "why_not", lambda device: None)
    monkeypatch.setattr(trial, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(trial, "_twin", lambda *_: (_ for _ in ()).throw(RuntimeError("ptxas failed")))
    model = make_model("bert", TASK).to("meta")
    with pytest.warns(UserWarning, match="BertLayer is not fused: RuntimeError: ptxas failed"):
        assert fusing.for_plan(model, gpu) == {"fused": False}
    assert fusing.for_plan(make_model("modernbert", TASK).to("meta"), gpu) == {}
    assert fusing.for_plan(model, torch.device("cpu")) == {}


def test_a_trial_takes_no_part_in_the_pass_that_it_is_made_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint counts the tensors that are saved in it, and there is no gradient in inference mode."""
    monkeypatch.setattr(trial, "_found", {})
    layer = encoder_layers(make_model("bert", TASK))[0]
    description = fusing.describe(layer)
    assert isinstance(description, fusing.Description)
    saved: list[torch.Tensor] = []
    with torch.inference_mode(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: saved[0]):
        assert trial.why_not(layer, description) is None
    assert trial._found
    assert not saved


def test_memory_that_runs_out_in_a_trial_says_nothing_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_found", {})
    monkeypatch.setattr(trial, "_twin", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        fusing.apply(make_model("bert", TASK))
    assert not trial._found
