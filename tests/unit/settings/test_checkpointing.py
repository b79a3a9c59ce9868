import logging
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import logging as transformers_logging

from vramfit.errors import WorkloadError
from vramfit.models.build import build_meta
from vramfit.models.resolve import resolve
from vramfit.settings import checkpointing
from vramfit.techniques.application import change
from vramfit.workload import Workload

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}


def mini() -> Any:
    return build_meta(resolve("bert-mini"))


def checkpointed(model: Any) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.bert.encoder.layer]


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        (None, [False] * 4),
        ("full", [True] * 4),
        (1, [True, False, False, False]),
        (3, [True, True, True, False]),
        (4, [True] * 4),
    ],
)
def test_all_layers_or_the_first_ones_are_recomputed(asked: Any, layers: list[bool]) -> None:
    model = mini()
    checkpointing.apply(model, asked)
    assert checkpointed(model) == layers


@pytest.mark.parametrize("before", [None, "full", 2])
@pytest.mark.parametrize("after", [None, "full", 3])
def test_a_model_in_a_run_is_as_if_the_other_value_had_been_its_first(before: Any, after: Any) -> None:
    changed, fresh = mini(), mini()
    checkpointing.apply(changed, before)
    change(changed, Workload(model="bert-mini", checkpointing=after))
    checkpointing.apply(fresh, after)
    assert checkpointed(changed) == checkpointed(fresh)
    assert num_hooks(changed) == num_hooks(fresh)


def num_hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_more_layers_than_there_are_is_an_error_with_the_number() -> None:
    with pytest.raises(WorkloadError, match="checkpointing 9: the model has 4 layers"):
        checkpointing.apply(mini(), 9)


@pytest.mark.parametrize("asked", ["full", 1])
def test_a_model_that_cannot_is_named(asked: Any) -> None:
    with pytest.raises(WorkloadError, match="MPNetForSequenceClassification does not support it"):
        checkpointing.apply(build_meta(resolve("mpnet-base")), asked)
    with pytest.raises(WorkloadError, match="Linear does not support it"):
        checkpointing.apply(torch.nn.Linear(2, 2), asked)


@pytest.mark.parametrize(("asked", "runs"), [(None, 4), (2, 6), ("full", 8)])
def test_on_a_real_model_layers_run_again_and_the_gradient_is_the_same(asked: Any, runs: int) -> None:
    torch.manual_seed(0)
    plain = BertForSequenceClassification(BertConfig(**SMALL, hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    changed = BertForSequenceClassification(plain.config)
    changed.load_state_dict(plain.state_dict())
    checkpointing.apply(changed, asked)
    calls: list[int] = []
    for layer in changed.bert.encoder.layer:
        layer.attention.register_forward_hook(lambda *_: calls.append(1))
    batch = {"input_ids": torch.randint(0, 50, (2, 8)), "labels": torch.tensor([0, 1])}
    for model in (plain, changed):
        model.train()
        model(**batch).loss.backward()
    assert len(calls) == runs
    for p, q in zip(plain.parameters(), changed.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)


def test_nothing_is_said_of_caches_that_an_encoder_does_not_have() -> None:
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    log = logging.getLogger("transformers.utils.generic")
    log.addHandler(handler)
    transformers_logging.warning_once.cache_clear()  # it says a thing once a process
    model = BertForSequenceClassification(BertConfig(**SMALL, use_cache=True)).train()
    checkpointing.apply(model, "full")
    try:
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    finally:
        log.removeHandler(handler)
    assert not heard
