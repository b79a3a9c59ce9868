"""One trace serves every batch: read off at a batch, it is the stream that a trace at that batch gives."""

import copy
import random
from typing import Any

import pytest
from tests.truth.cases import H200

from vramfit.models.resolve import resolve
from vramfit.trace.run import trace
from vramfit.trace.template import order_of
from vramfit.workload import Workload

WORKLOADS: list[dict[str, Any]] = [
    {"model": "bert-base-uncased", "seq": 77, "precision": "amp-bf16"},
    {"model": "distilbert-base-uncased", "seq": 200, "precision": "fp32", "attention": "eager", "max_grad_norm": 1.0},
    {"model": "modernbert-base", "seq": 64, "precision": "amp-fp16", "checkpointing": "full", "mask": "ones"},
    {"model": "deberta-v3-xsmall", "seq": 100, "attention": "eager", "task": "token-classification"},
    {"model": "albert-base-v2", "seq": 381, "task": "masked-lm", "optimizer": "adafactor", "accumulate": 3},
]


def shallow(name: str) -> Any:
    """The model with a few layers of every kind that it has: more of them are the same again."""
    config = copy.deepcopy(resolve(name).config)
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:4]
    return config


@pytest.mark.parametrize("keywords", WORKLOADS, ids=lambda k: k["model"])
def test_replay_and_retrace_are_identical_at_twenty_random_batches(keywords: dict[str, Any]) -> None:
    accumulate = keywords.get("accumulate", 1)
    workload = Workload(batch=2 * accumulate, **keywords)
    resolved = resolve(shallow(workload.model), task=workload.task)
    once = trace(resolved, workload, H200)
    for batch in random.Random(workload.model).sample(range(2, 300), 20):
        again = trace(resolved, workload, H200, batch=batch)
        order = order_of(workload, 2)
        assert once.instantiate(batch, order).events == again.instantiate(batch, order).events, batch


def test_repeated_micro_batches_are_those_of_a_longer_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(model="bert-tiny", batch=16, accumulate=4, seq=64, precision="amp-bf16")
    resolved = resolve(workload.model, task=workload.task)
    short = trace(resolved, workload, H200).instantiate(4, order_of(workload, 1))
    monkeypatch.setattr("vramfit.trace.run._traced_steps", lambda workload: [("first", 4), ("steady", 4)])
    monkeypatch.setattr("vramfit.trace.template.StreamTemplate.repeat_second_pass", lambda self: None)
    template = trace(resolved, workload, H200)
    order = [("load", "load"), ("inputs", None)]
    for step, phase in (("first", "first_step"), ("steady", "steady_step")):
        order += [(f"{step}.micro0", phase), *((f"{step}.micro{i}", None) for i in (1, 2, 3))]
        order.append((f"{step}.optimizer", None))
    assert template.instantiate(4, order).events == short.events


FAMILY_MODELS = (
    *("bert-tiny", "roberta-base", "distilbert-base-uncased", "albert-base-v2", "electra-small-discriminator"),
    *(
        "deberta-v3-xsmall",
        "mpnet-base",
        "camembert-base",
        "modernbert-base",
        "xlm-roberta-base",
        "nomic-embed-text-v1.5",
    ),
)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_every_family_is_traced_once_for_all_batches(name: str) -> None:
    resolved = resolve(name, task="features")
    template = trace(resolved, Workload(model=name, task="features", batch=2, seq=16), H200)
    assert template.probe is not None
    few, many = (template.instantiate(batch, order_of(Workload(model=name, batch=batch), 1)) for batch in (2, 200))
    assert few.num_requests <= many.num_requests
