"""Layers that cast together learn what plain autocast learns, to the bit, and leave nothing behind."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.unit.runtime.failures import DROPOUT, Kind, quick, train
from tests.unit.runtime.small_models import COMMON, FAMILIES, LENGTH, make_batch, make_model
from torch.nn.utils import prune

import vramfit
from vramfit.estimator.predict import estimate
from vramfit.models.anatomy import encoder_layers
from vramfit.runtime.stepper import Stepper
from vramfit.settings import SETTINGS, checkpointing
from vramfit.settings import freeze as freezing
from vramfit.techniques import application, casting, lora, packing
from vramfit.techniques.casting import CastLinear, cast_together
from vramfit.trace.work import work_in_place
from vramfit.workload import Workload

TASK = "sequence-classification"
CAST = [name for name in FAMILIES if name != "albert"]
Model = torch.nn.Module


def small_mpnet() -> Model:
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(  # type: ignore[no-any-return]
        transformers.AutoConfig.for_model("mpnet", **(COMMON | {"pad_token_id": 1}))
    ).train()


def autocast(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast("cpu", dtype=dtype)


def checkpointed(model: Any) -> Model:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def learn(model: Model, num_passes: int = 2, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[float]:
    """Losses of a few passes whose gradients add up."""
    losses = []
    for index in range(num_passes):
        torch.manual_seed(seed + index)
        with autocast(dtype):
            loss = model(**make_batch(TASK, seed=index)).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def assert_same_gradients(one: Model, other: Model) -> None:
    pairs = list(zip(one.named_parameters(), other.parameters(), strict=True))
    assert any(p.grad is not None for (_, p), _ in pairs)
    for (name, p), q in pairs:
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert p.grad.dtype == q.grad.dtype == torch.float32
            assert p.grad.stride() == q.grad.stride()
            assert torch.equal(p.grad, q.grad), name


def assert_learns_the_same(make: Callable[[], Model], **keywords: Any) -> Model:
    plain, model = make(), make()
    casting.apply(model)
    assert casting.is_applied(model)
    assert learn(model, **keywords) == learn(plain, **keywords)
    assert_same_gradients(model, plain)
    return model


def calls(action: Callable[[], Any]) -> list[str]:
    """Names of the operators that an action calls, above autograd's records and below them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name.partition("::")[2])
            return func(*args, **(kwargs or {}))

    with Listener():
        action()
    return seen


@pytest.mark.parametrize("computed_twice", [False, True])
@pytest.mark.parametrize("family", CAST)
def test_a_family_learns_the_same_to_the_bit(family: str, computed_twice: bool) -> None:
    change = checkpointed if computed_twice else lambda model: model
    assert_learns_the_same(lambda: change(make_model(family, TASK)))


def test_mpnet_learns_the_same() -> None:
    assert_learns_the_same(small_mpnet)


def test_fp16_and_dropout_are_no_other() -> None:
    dropping = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1}
    assert_learns_the_same(lambda: make_model("bert", TASK, **dropping))
    assert_learns_the_same(lambda: checkpointed(make_model("bert", TASK, **dropping)))
    assert_learns_the_same(lambda: make_model("bert", TASK), dtype=torch.float16)


def test_packed_rows_learn_the_same() -> None:
    models = [make_model("bert", TASK), make_model("bert", TASK)]
    casting.apply(models[0])
    for model in models:
        packing.apply(model, TASK)
    assert_same_steps(*models)


def assert_same_steps(*models: Model) -> None:
    losses = []
    for model in models:
        learned = [p for p in model.parameters() if p.requires_grad]
        stepper = Stepper(model, torch.optim.AdamW(learned, lr=0.1), micro_batch=5, seq=LENGTH, precision="amp-bf16")
        losses.append([stepper.step(make_batch(TASK, seed=seed)) for seed in range(3)])
    assert losses[0] == losses[1]
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("computed_twice", [False, True])
def test_windows_of_several_passes_end_in_the_same_weights(computed_twice: bool) -> None:
    models = [make_model("bert", TASK), make_model("bert", TASK)]
    casting.apply(models[0])
    assert_same_steps(*(checkpointed(m) if computed_twice else m for m in models))


@pytest.mark.parametrize("freeze", [1, "embeddings", "bert.encoder.layer.1.attention.*", "*.bias"])
def test_what_is_frozen_stays_without_gradient(freeze: Any) -> None:
    def make() -> Model:
        model = make_model("bert", TASK)
        freezing.apply(model, freeze if isinstance(freeze, int) or "*" not in freeze else (freeze,))
        return model

    model = assert_learns_the_same(make)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_frozen_encoder_is_left_to_autocast() -> None:
    model = make_model("bert", TASK)
    freezing.apply(model, "encoder")
    casting.apply(model)
    assert "_foreach_copy_" not in calls(lambda: learn(model))


@pytest.mark.parametrize("computed_twice", [False, True])
def test_adapters_learn_the_same(computed_twice: bool) -> None:
    pytest.importorskip("peft", reason='LoRA: pip install "vramfit[train]"')

    def make() -> Model:
        model = make_model("bert", TASK)
        torch.manual_seed(3)
        lora.apply(model, 4)
        for name, p in model.named_parameters():
            if "lora_B" in name:  # starts at zero, which hides the gradient of the other half
                torch.nn.init.normal_(p)
        return checkpointed(model) if computed_twice else model

    model = assert_learns_the_same(make)
    assert {n for n, p in model.named_parameters() if p.grad is not None and "layer" in n} == {
        n for n, p in model.named_parameters() if "lora_" in n
    }


def test_int8_layers_are_left_alone() -> None:
    workload = Workload(model="m", lora=4, quantize="int8", precision="amp-bf16", casts="together")
    model = make_model("bert", TASK)
    application.apply(model, workload)
    cast = [name for name, m in model.named_modules() if isinstance(m, CastLinear)]
    assert cast
    assert all("lora_" in name for name in cast)
    learn(model)
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)


def test_a_layer_that_is_applied_again_and_again_is_left_to_autocast() -> None:
    model = make_model("albert", TASK)
    casting.apply(model)
    assert not casting.is_applied(model)


def test_a_model_without_layers_is_left_as_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    casting.apply(model)
    assert not casting.is_applied(model)


def test_weights_that_another_module_has_too_are_left_to_autocast() -> None:
    model: Any = make_model("bert", TASK)
    first, second = (layer.output.dense for layer in encoder_layers(model))  # type: ignore[union-attr]
    second.weight = first.weight  # type: ignore[union-attr]
    casting.apply(model)
    assert not {id(first), id(second)} & {id(m) for m in model.modules() if isinstance(m, CastLinear)}
    plain: Any = make_model("bert", TASK)
    layers = plain.bert.encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight
    assert learn(model) == learn(plain)
    assert_same_gradients(model, plain)


def test_a_layer_is_cast_by_one_call_and_its_gradients_by_one() -> None:
    model = make_model("bert", TASK)
    num_layers = len(encoder_layers(model))
    before = calls(lambda: learn(model, num_passes=1))
    casting.apply(model)
    after = calls(lambda: learn(model, num_passes=1))
    assert after.count("_foreach_copy_") == 2 * num_layers
    assert before.count("_to_copy") - after.count("_to_copy") == 2 * 12 * num_layers


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_cast_in_their_own_graph(backend: str) -> None:
    torch._dynamo.reset()
    plain, model = make_model("bert", TASK), make_model("bert", TASK)
    casting.apply(model)
    for layer in encoder_layers(model):
        layer.compile(dynamic=True, backend=backend, fullgraph=True)
    losses = [learn(m, num_passes=1) for m in (model, plain)]
    torch._dynamo.reset()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-3)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=2e-2)


def test_it_is_for_autocast_in_training_where_weights_stay_where_they_are() -> None:
    together = Workload(model="m", precision="amp-bf16", casts="together", loop="stepper")
    assert SETTINGS["casts"].is_applied_for(together)
    for changes in (
        {"compile": True},
        {"casts": "each"},
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"offload": "optimizer"},
        {"offload": "activations", "checkpointing": "full"},
        {"mode": "infer", "loop": "plain"},
        {"mode": "forward", "loop": "plain"},
        {"num_gpus": 2, "parallel": "fsdp", "micro_batch": None},
    ):
        assert not SETTINGS["casts"].is_applied_for(replace(together, **changes)), changes  # type: ignore[arg-type]


def test_prediction_without_gradients_is_plain_autocast() -> None:
    plain, model = make_model("bert", TASK).eval(), make_model("bert", TASK).eval()
    casting.apply(model)
    batch = make_batch(TASK)
    with torch.no_grad(), autocast():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
    with torch.inference_mode(), autocast():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
        assert "_foreach_copy_" not in calls(lambda: model(**batch))


def test_without_autocast_a_model_computes_in_fp32_before_and_after_training() -> None:
    plain, model = make_model("bert", TASK), make_model("bert", TASK)
    casting.apply(model)
    batch = make_batch(TASK)
    for _ in range(2):
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
        learn(model)
        learn(plain)


def test_a_part_that_leaves_autocast_gets_its_weights_in_fp32() -> None:
    class Careful(torch.nn.Module):
        def __init__(self, linear: torch.nn.Module) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                found: torch.Tensor = self.linear(x.float())
                return found

    def make() -> Model:
        model: Any = make_model("bert", TASK)
        for layer in model.bert.encoder.layer:
            layer.intermediate.dense = Careful(layer.intermediate.dense)
        return model  # type: ignore[no-any-return]

    assert_learns_the_same(make)


def test_weights_in_16_bits_are_not_cast() -> None:
    model = make_model("bert", TASK)
    casting.apply(model)
    model.to(torch.bfloat16)
    assert "_foreach_copy_" not in calls(lambda: learn(model))


def held(model: Model) -> list[str]:
    return [name for name, m in model.named_modules() if m.__dict__.get("cast") is not None]


def test_nothing_is_held_between_passes_nor_after_a_failure() -> None:
    model: Any = make_model("bert", TASK)
    casting.apply(model)
    learn(model)
    assert held(model) == []
    seen: list[list[str]] = []

    def fail(*_: Any) -> None:
        seen.append(held(model))
        raise RuntimeError("CUDA out of memory")

    handle = model.bert.encoder.layer[1].output.dense.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        learn(model)
    handle.remove()
    assert len(seen[0]) == 6
    assert all(name.startswith("bert.encoder.layer.1.") for name in seen[0])
    assert held(model) == []
    gc.collect()
    plain = make_model("bert", TASK)
    model.zero_grad()
    learn(plain)
    plain.zero_grad()
    assert learn(model) == learn(plain)
    assert_same_gradients(model, plain)


def test_casts_of_a_forward_that_was_interrupted_are_not_used_again() -> None:
    model: Any = make_model("bert", TASK)
    casting.apply(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.bert.encoder.layer[1].output.dense.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        learn(model)
    handle.remove()
    assert held(model) != []
    plain = make_model("bert", TASK)
    batch = make_batch(TASK)
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.mul_(1.5)
            q.mul_(1.5)
        with autocast():
            assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert held(model) == []


def test_casts_of_a_checkpointed_layer_end_with_its_forward() -> None:
    alive: list[int] = []

    def watched(make_casts: Callable[..., Any]) -> Callable[..., Any]:
        refs: list[weakref.ref[torch.Tensor]] = []

        def cast(*given: Any) -> Any:
            alive.append(sum(ref() is not None for ref in refs))
            made = make_casts(*given)
            refs.extend(map(weakref.ref, made))
            return made

        return cast

    model = checkpointed(make_model("bert", TASK, num_hidden_layers=4))
    casting.apply(model)
    real = casting.cast_together
    try:
        casting.cast_together = watched(real)
        learn(model, num_passes=1)
    finally:
        casting.cast_together = real
    assert alive == [0] * 8


@pytest.mark.parametrize("computed_twice", [False, True])
def test_memory_that_runs_out_anywhere_leaves_no_trace(computed_twice: bool) -> None:
    """Also amid the casts of a layer, and those of its gradients."""

    def prepare(model: Model) -> None:
        casting.apply(model)
        if computed_twice:
            checkpointing.apply(model, "full")

    kind = Kind(DROPOUT, prepare=prepare, precision="amp-bf16")
    with quick():
        expected = train(kind)
        one_by_one = train(
            replace(kind, prepare=lambda model: checkpointing.apply(model, "full" if computed_twice else None))
        )
        assert one_by_one.losses == expected.losses
        step = (expected.last_allocations[0], expected.last_allocations[1])
        for n in range(*step, 41):
            assert train(kind, [n]).equals(expected), n


def test_what_is_saved_is_what_was_saved(tmp_path: Path) -> None:
    plain, model = make_model("bert", TASK), make_model("bert", TASK)
    casting.apply(model)
    learn(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(v.dtype == torch.float32 for v in model.state_dict().values() if v.is_floating_point())
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    for name, value in again.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    assert not casting.is_applied(again)


def copies_of(model: Model) -> Iterator[Model]:
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def test_copies_cast_for_themselves() -> None:
    plain, model = make_model("bert", TASK), make_model("bert", TASK)
    casting.apply(model)
    learn(model)
    model.zero_grad()
    learn(plain)
    plain.zero_grad()
    expected = learn(plain)
    for made in copies_of(model):
        assert casting.is_applied(made)
        model.zero_grad()
        assert learn(made) == expected
        assert_same_gradients(made, plain)
        assert all(p.grad is None for p in model.parameters())


def test_applied_twice_is_once_and_undone_is_as_before() -> None:
    model = make_model("bert", TASK)
    casting.apply(model)
    casting.apply(model)
    assert calls(lambda: learn(model, num_passes=1)).count("_foreach_copy_") == 2 * len(encoder_layers(model))
    casting.undo(model)
    assert not casting.is_applied(model)
    assert "_foreach_copy_" not in calls(lambda: learn(model))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in encoder_layers(model))


def test_a_stepper_with_a_plan_casts_as_the_plan_says() -> None:
    planned = vramfit.plan("bert-tiny", batch=8, seq=LENGTH, gpu="h200", precision="amp-bf16")
    assert planned.workload.casts == "together"
    one, other = make_model("bert", TASK), make_model("bert", TASK)
    Stepper(one, torch.optim.SGD(one.parameters()), plan=planned, memory=None)
    Stepper(other, torch.optim.SGD(other.parameters()), micro_batch=4, precision="amp-bf16")
    assert casting.is_applied(one)
    assert not casting.is_applied(other)


def test_gradients_that_nobody_sent_are_none() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    frozen = torch.ones(3)
    half = cast_together([used, unused, frozen], torch.bfloat16)
    assert [t.dtype for t in half] == [torch.bfloat16] * 3
    assert [t.requires_grad for t in half] == [True, True, False]
    half[0].sum().backward()
    assert used.grad is not None
    assert used.grad.dtype == torch.float32
    assert unused.grad is None


STEPS: dict[str, Any] = {"optimizer": "adamw-fused", "precision": "amp-bf16", "loop": "stepper", "gpu": "h200"}


@pytest.mark.parametrize(
    "keywords",
    [
        {"batch": 32, "seq": 128},
        {"batch": 2, "seq": 8},
        {"batch": 8, "seq": 128, "lora": 8},
        {"batch": 8, "seq": 128, "freeze": 6},
        {"batch": 8, "seq": 128, "freeze": "encoder"},
        {"batch": 16, "seq": 64, "precision": "amp-fp16", "max_grad_norm": 1.0},
        {"batch": 16, "seq": 128, "attention": "packed"},
        {"batch": 16, "seq": 128, "checkpointing": 4},
    ],
    ids=str,
)
def test_no_step_is_predicted_to_ask_for_more(keywords: dict[str, Any]) -> None:
    each, together = (estimate("bert-base-uncased", **(STEPS | keywords), casts=c) for c in ("each", "together"))
    assert together.peak_requested_bytes <= each.peak_requested_bytes
    assert together.step_time_s is not None
    assert each.step_time_s is not None
    assert together.step_time_s <= each.step_time_s


def test_gradients_that_are_added_to_others_wait_for_those_of_their_layer_at_most() -> None:
    keywords = STEPS | {"batch": 32, "accumulate": 4, "seq": 128}
    each, together = (estimate("bert-base-uncased", **keywords, casts=c) for c in ("each", "together"))
    num_weights = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768
    assert together.peak_requested_bytes - each.peak_requested_bytes <= 2 * num_weights


def test_a_checkpointed_step_is_predicted_to_keep_the_casts_of_no_layer() -> None:
    keywords = STEPS | {"batch": 32, "accumulate": 4, "seq": 512, "checkpointing": "full", "optimizer": "adamw-8bit"}
    each, together = (estimate("bert-large-uncased", **keywords, casts=c) for c in ("each", "together"))
    assert each.peak_allocated_bytes - together.peak_allocated_bytes > 350e6


def test_a_list_that_is_copied_counts_once() -> None:
    wide = [torch.empty(10, 10, device="meta") for _ in range(12)]
    half = [torch.empty(10, 10, dtype=torch.bfloat16, device="meta") for _ in range(12)]
    work = work_in_place("_foreach_copy_", (half, wide), [half], None)
    assert (work.kind, work.num_launches, work.num_tensors) == ("copy", 1, 12)
    assert work.num_bytes == (12 * 100 * (4 + 2),)


def test_estimates_are_of_plain_autocast_unless_asked() -> None:
    assert Workload(model="m").casts == "each"
    plain = estimate("bert-tiny", batch=4, seq=16, precision="amp-bf16", gpu="h200")
    asked = estimate("bert-tiny", batch=4, seq=16, precision="amp-bf16", gpu="h200", casts="each")
    assert plain == asked


@pytest.mark.parametrize(
    ("keywords", "casts"),
    [
        ({"precision": "amp-bf16"}, "together"),
        ({"precision": "amp-fp16", "checkpointing": "full", "lora": 8}, "together"),
        ({"precision": "fp32"}, "each"),
        ({"precision": "bf16"}, "each"),
        ({"precision": "amp-bf16", "casts": "each"}, "each"),
        ({"precision": "amp-bf16", "compile": True}, "each"),
        ({"precision": "amp-bf16", "offload": "optimizer"}, "each"),
        ({"precision": "amp-bf16", "num_gpus": 2, "parallel": "ddp"}, "together"),
        ({"precision": "amp-bf16", "num_gpus": 2, "parallel": "fsdp"}, "each"),
    ],
    ids=str,
)
def test_plans_cast_together_wherever_that_can_be(keywords: dict[str, Any], casts: str) -> None:
    given = {"batch": 8, "seq": 32, "gpu": "h200"} | keywords
    made = vramfit.plan("bert-tiny", **given)
    assert made.workload.casts == casts
    assert made.estimate.workload == made.workload


def test_a_plan_for_a_model_that_cannot_says_so() -> None:
    made = vramfit.plan("albert-base-v2", batch=4, seq=16, gpu="h200", precision="amp-bf16")
    assert made.workload.casts == "each"
    assert not any(reason.setting.startswith("casts") for reason in made.reasons)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.bert.encoder.layer[0].intermediate.dense, "weight", amount=0.3)


def clamped(model: Any) -> None:
    def clamp(linear: Any, _: Any) -> None:
        linear.weight.data.clamp_(-0.01, 0.01)

    model.bert.encoder.layer[0].output.dense.register_forward_pre_hook(clamp)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("change", [pruned, clamped])
def test_weights_that_are_made_when_they_are_used_are_left_to_autocast(change: Any, is_late: bool) -> None:
    plain, model = make_model("bert", TASK), make_model("bert", TASK)
    change(plain)
    if not is_late:
        change(model)
    casting.apply(model)
    if is_late:
        change(model)
    assert learn(model) == learn(plain)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, its.grad)


def test_gradients_can_be_derived_once_more() -> None:
    penalties = []
    for applies in (False, True):
        model = make_model("bert", TASK, attn_implementation="eager")
        if applies:
            casting.apply(model)
        weights = [p for name, p in model.named_parameters() if name.endswith("dense.weight")]
        torch.manual_seed(0)
        with autocast():
            loss = model(**make_batch(TASK)).loss
        found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        sum(g.square().sum() for g in found if g is not None).backward()  # type: ignore[union-attr]
        penalties.append([p.grad for p in weights])
    for mine, its in zip(*penalties, strict=True):
        assert (mine is None) == (its is None)
        assert mine is None or torch.equal(mine, its)


def test_a_model_runs_where_there_is_no_autocast() -> None:
    model = make_model("bert", TASK)
    casting.apply(model)
    assert model.to("meta")(make_batch(TASK)["input_ids"].to("meta")).logits.device.type == "meta"


def test_a_workload_without_it_takes_it_off() -> None:
    model = make_model("bert", TASK)
    application.apply(model, Workload(model="m", precision="amp-bf16", casts="together", loop="stepper"))
    assert casting.is_applied(model)
    application.apply(model, Workload(model="m", precision="amp-bf16"))
    assert not casting.is_applied(model)
