"""Models on the meta device: the same tensors as the real ones, and no number drawn."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.counting import num_calls
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, BertConfig, BertForSequenceClassification, RobertaForMaskedLM

from vramfit.errors import CheckpointError, WorkloadError
from vramfit.models import build_meta, find_entry, model_names, resolve, supported_tasks
from vramfit.models.build import undrawn
from vramfit.models.configuration import default_attention
from vramfit.tasks import find_task

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def tensors(model: torch.nn.Module) -> list[tuple[str, torch.Size, torch.dtype, bool]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, t.shape, t.dtype, t.requires_grad) for name, t in named]


@pytest.mark.parametrize("name", model_names())
def test_every_model_builds_for_every_task_as_transformers_itself_would(name: str) -> None:
    entry = find_entry(name)
    assert entry is not None
    for task in supported_tasks(resolve(name, task="features").config):
        resolved = resolve(name, task=task)
        data = entry.config_data()
        for key in ("architectures", "_name_or_path", "transformers_version", "torch_dtype"):
            data.pop(key, None)
        config = AutoConfig.for_model(data.pop("model_type"), **data)
        config._attn_implementation = default_attention(resolved.model_class)
        config.num_labels = find_task(task).num_labels() or config.num_labels  # some heads have a size of their own
        with torch.device("meta"):
            expected = getattr(transformers, find_task(task).auto_class)._model_mapping[type(config)](config)
        model = build_meta(resolved)
        assert type(model) is type(expected)
        assert tensors(model) == tensors(expected)
        assert model.training == expected.training
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_a_meta_model_has_the_tensors_of_the_real_one() -> None:
    config = BertConfig(**SMALL)
    assert tensors(build_meta(resolve(config))) == tensors(BertForSequenceClassification(config))


class Operators(TorchDispatchMode):
    """The names of all that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_building_bert_large_makes_its_tensors_and_nothing_else() -> None:
    with Operators() as run:
        model = build_meta(resolve("bert-large-uncased"))
    num_tensors = len(tensors(model))
    assert num_tensors > 390
    assert len(run.names) < num_tensors + 20  # no parameter is drawn, filled or copied


def test_twice_the_layers_are_twice_the_work() -> None:
    few, many = (resolve(BertConfig(**SMALL | {"num_hidden_layers": n})) for n in (12, 24))
    build_meta(few)
    assert num_calls(lambda: build_meta(many)) < 2.2 * num_calls(lambda: build_meta(few))


def test_building_leaves_the_resolved_configuration_alone() -> None:
    resolved = resolve("bert-tiny")
    before = resolved.config.to_dict()
    build_meta(resolved, attention="eager")
    assert resolved.config.to_dict() == before
    assert resolved.config._attn_implementation is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_asked_for_is_set(attention: str) -> None:
    assert build_meta(resolve("bert-tiny"), attention=attention).config._attn_implementation == attention


@pytest.mark.parametrize("name", ["deberta-v3-small", "mpnet-base"])
def test_families_without_sdpa_default_to_eager_and_refuse_sdpa(name: str) -> None:
    resolved = resolve(name)
    assert build_meta(resolved).config._attn_implementation == "eager"
    with pytest.raises(WorkloadError, match="has no attention 'sdpa'") as caught:
        build_meta(resolved, attention="sdpa")
    assert caught.value.hint == "it has eager"


def test_an_attention_kernel_nobody_knows_is_a_workload_error() -> None:
    with pytest.raises(WorkloadError, match="attention 'sparkling' cannot be used"):
        build_meta(resolve("bert-tiny"), attention="sparkling")


def test_weights_are_fp32_whatever_dtype_the_checkpoint_was_saved_in() -> None:
    model = build_meta(resolve(BertConfig(**SMALL, dtype="float16")))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_module_is_copied_with_its_frozen_tied_and_half_weights_and_not_touched() -> None:
    config = AutoConfig.for_model("roberta", **SMALL, vocab_size=50, max_position_embeddings=20)
    module = RobertaForMaskedLM(config).to(torch.bfloat16).eval()
    for parameter in module.roberta.embeddings.parameters():
        parameter.requires_grad_(False)
    module(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    before = copy.deepcopy(module.state_dict())
    twin = build_meta(resolve(module), attention="eager")
    assert tensors(twin) == tensors(module)
    assert all(t.is_meta for t in (*twin.parameters(), *twin.buffers()))
    assert twin.lm_head.decoder.weight is twin.roberta.embeddings.word_embeddings.weight
    assert not twin.training
    assert twin.config._attn_implementation == "eager"
    assert module.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_a_plain_module_without_configuration_can_be_copied_too() -> None:
    resolved = resolve(torch.nn.Sequential(torch.nn.Linear(3, 4)))
    assert resolved.config is None
    assert build_meta(resolved)[0].weight.is_meta


def test_a_module_that_cannot_be_copied_is_reported_in_one_line() -> None:
    module = torch.nn.Linear(2, 2)
    module.stream = (i for i in range(3))
    with pytest.raises(WorkloadError, match=r"Linear cannot be copied: .*generator"):
        build_meta(resolve(module))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"num_attention_heads": 7}, "hidden size.*7"),
        ({"hidden_act": "sparkling"}, "hidden_act is 'sparkling', which is unknown"),
        ({"hidden_dropout_prob": 7.0}, "dropout probability"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_named(
    field: dict[str, object], message: str, tmp_path: Path
) -> None:
    BertConfig(**(SMALL | field)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"cannot be built: .*{message}") as caught:
        build_meta(resolve(tmp_path))
    assert caught.value.file == str(tmp_path / "config.json")
    assert "\n" not in str(caught.value)


def test_weights_that_another_thread_makes_meanwhile_are_drawn() -> None:
    with undrawn():
        linear, nothing = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64, device="meta")
    assert linear.weight.std() > 0.01
    assert linear.weight.abs().max() <= 1 / 8
    assert nothing.weight.is_meta
