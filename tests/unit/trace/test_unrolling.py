"""A trace of few layers, unrolled, is the trace of all of them: the same requests, places and work."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.trace.families import tiny
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from vramfit.errors import WorkloadError
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.traced import TracedWorkload, collection_paused
from vramfit.models.anatomy import layer_list
from vramfit.records.stream import Stream
from vramfit.trace import run, unrolling
from vramfit.trace.run import prepare
from vramfit.trace.template import StreamTemplate
from vramfit.trace.unrolling import Unlike, Unrolling
from vramfit.trace.zones import Zone, find_zones

FAMILIES = (
    *("bert-base-uncased", "roberta-base", "xlm-roberta-base", "camembert-base", "electra-base-discriminator"),
    *("minilm-l12-h384-uncased", "mpnet-base", "deberta-v3-base", "modernbert-base", "nomic-embed-text-v1.5"),
    *("albert-base-v2", "distilbert-base-uncased"),
)
WITHOUT_ALIKE = ("albert-base-v2", "distilbert-base-uncased")
"""One applies one layer many times, the other has six, of which some jobs leave too few alike."""
DIFFERENT = {("modernbert-base", "some checkpointed"), ("modernbert-base", "some frozen")}
"""Kinds of layers take turns, and the job treats some of each differently."""
STEPPER = {"loop": "stepper", "accumulate": 2, "optimizer": "adamw-fused"}
JOBS: dict[str, dict[str, Any]] = {
    "inference": {"mode": "infer"},
    "inference in 16 bits": {"mode": "infer", "precision": "amp-fp16", "attention": "eager"},
    "forward with gradients": {"mode": "forward", "mask": "padded"},
    "training": {"optimizer": "adamw", "max_grad_norm": 1.0},
    "casts together": {**STEPPER, "precision": "amp-fp16", "casts": "together"},
    "packed and fused": {**STEPPER, "precision": "amp-bf16", "attention": "packed", "fused": True},
    "packed and captured": {**STEPPER, "precision": "amp-bf16", "attention": "packed", "graphs": True},
    "checkpointed": {"precision": "amp-bf16", "checkpointing": "full"},
    "some checkpointed": {**STEPPER, "checkpointing": 6, "accumulate": 3},
    "some frozen": {"freeze": 6, "optimizer": "sgd"},
    "adapters": {"lora": 8},
    "texts compared": {**STEPPER, "task": "embedding", "precision": "amp-bf16", "attention": "packed"},
}


def traced_of(model: Any, keywords: dict[str, Any]) -> TracedWorkload:
    return resolve_workload(model, {"batch": 12, "seq": 64, "task": "sequence-classification", **keywords})[0]


def shown(stream: Stream) -> tuple[Any, ...]:
    """All of a stream; how origins are numbered is of no account."""
    origins = [stream.origins[index] for index in stream.request_origins]
    return stream.events, origins, stream.marks, stream.parts, stream.request_streams


def counted_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each forward pass goes through, from now on."""
    seen: list[int] = []
    real = Unrolling._shorten

    def watched(self: Unrolling, model: torch.nn.Module, args: Any) -> None:
        real(self, model, args)
        seen.append(len(layer_list(model) or ()))

    monkeypatch.setattr(Unrolling, "_shorten", watched)
    return seen


def whole(traced: TracedWorkload, monkeypatch: pytest.MonkeyPatch) -> StreamTemplate:
    """The trace of every layer."""
    with monkeypatch.context() as patch:
        patch.setattr(unrolling, "find_zones", lambda model: ())
        return traced.trace(None)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("model", FAMILIES)
def test_few_layers_unrolled_are_all_of_them(model: str, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with collection_paused():
        try:
            traced = traced_of(model, JOBS[job])
            every = whole(traced, monkeypatch)
        except WorkloadError:
            pytest.skip("a technique that the family does not have")
        layers = counted_layers(monkeypatch)
        few = traced.trace(None)
        for batch in (2, 7):
            order = traced.order(2, batch)
            assert shown(few.instantiate(batch, order)) == shown(every.instantiate(batch, order))
        timed = [(name, 1) for name in every.work]
        assert few.work_at(7, timed) == every.work_at(7, timed)
        has_zones = bool(find_zones(prepare(traced.resolved, traced.workload)))
        assert bool(layers) == has_zones
        assert has_zones or model in WITHOUT_ALIKE or (model, job) in DIFFERENT


WITH_DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 8},
    "gemma3_text": {"num_hidden_layers": 36},
    "qwen2": {"num_hidden_layers": 16, "use_sliding_window": True, "max_window_layers": 8, "sliding_window": 4},
    "mixtral": {"num_hidden_layers": 8},
    "bart": {"encoder_layers": 8, "decoder_layers": 2},
}
"""Among them layers of two kinds that take turns, and a run of one kind after a run of the other."""


@pytest.mark.parametrize("job", ["forward with gradients", "checkpointed"])
@pytest.mark.parametrize("kind", WITH_DECODERS)
def test_few_layers_of_decoders_are_all_of_them(kind: str, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with collection_paused():
        traced = traced_of(tiny(kind, **WITH_DECODERS[kind]), {**JOBS[job], "seq": 8})
        every = whole(traced, monkeypatch)
        layers = counted_layers(monkeypatch)
        few = traced.trace(None)
        order = traced.order(2, 3)
        assert shown(few.instantiate(3, order)) == shown(every.instantiate(3, order))
        assert layers
        assert max(layers) < len(layer_list(prepare(traced.resolved, traced.workload)) or ())


def test_a_deeper_model_runs_no_more_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with collection_paused():
        layers = counted_layers(monkeypatch)
        for model in ("bert-base-uncased", "bert-large-uncased"):
            traced_of(model, {}).trace(None)
        assert layers == [4, 4, 4, 4]  # two steps of each


def test_passes_alone_do_what_they_do_in_whole_steps() -> None:
    with collection_paused():
        for keywords in (JOBS["casts together"], JOBS["packed and fused"], JOBS["some checkpointed"]):
            traced = traced_of("bert-base-uncased", keywords)
            order = [("steady.micro0", 1), ("steady.micro1", 3), ("steady.optimizer", 1)]
            shorter = traced_of("bert-base-uncased", {**keywords, "seq": 32})
            made = traced.work_by_length(32, 2, partial(traced.trace, None, passes_at=32))
            assert not made.segments
            assert made.work_at(5, order) == shorter.template(2).work_at(5, order)


def test_layers_that_turn_out_to_differ_are_traced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with collection_paused():
        traced = traced_of("bert-base-uncased", {})
        every = whole(traced, monkeypatch)
        asked = []

        def unlike(self: Unrolling, entries: Any, ledger: Any) -> None:
            asked.append(len(entries))
            raise Unlike("for the test")

        monkeypatch.setattr(Unrolling, "unroll", unlike)
        order = traced.order(1, 3)
        assert shown(traced.trace(None).instantiate(3, order)) == shown(every.instantiate(3, order))
        assert len(asked) == 1


def test_a_model_that_needs_all_of_its_layers_is_traced_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds its layers by number, and not one after another."""
    with collection_paused():
        traced = traced_of("bert-base-uncased", {"mode": "infer"})
        encoder = type(prepare(traced.resolved, traced.workload).bert.encoder)

        def forward(self: Any, hidden_states: Any, attention_mask: Any = None, **_: Any) -> Any:
            for index in range(self.config.num_hidden_layers):
                hidden_states = self.layer[index](hidden_states, attention_mask)
            return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)

        monkeypatch.setattr(encoder, "forward", forward)
        origins = {origin.module for origin in traced.trace(None).origins}
        assert {f"bert.encoder.layer.{index}.intermediate.dense" for index in range(12)} <= origins


def test_a_layer_in_the_middle_that_asks_for_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that look alike and compute otherwise: the second of those in the middle makes one more copy."""
    refused: list[str] = []
    real = Unlike.__init__

    def watched(self: Unlike, reason: str) -> None:
        refused.append(reason)
        real(self, reason)

    def with_a_copy(model: torch.nn.Module) -> torch.nn.Module:
        layers = layer_list(model)
        assert layers is not None
        layers[len(layers) - 2].register_forward_hook(lambda module, args, output: torch.clone(output))
        return model

    with collection_paused():
        traced = traced_of("bert-base-uncased", {})
        prepared = run.prepare
        monkeypatch.setattr(run, "prepare", lambda *args: with_a_copy(prepared(*args)))
        monkeypatch.setattr(unrolling, "find_zones", lambda model: (Zone(0, 1, 1, 12),))
        monkeypatch.setattr(Unlike, "__init__", watched)
        made = traced.trace(None)
        assert len(refused) == 1
        clones = [o.module for o in made.origins if o.operator == "clone" and o.part == "forward"]
        assert any("layer.10" in module or module.endswith("encoder") for module in clones)


@pytest.mark.parametrize(
    ("model", "keywords", "zones"),
    [
        ("bert-base-uncased", {}, (Zone(0, 1, 1, 12),)),
        ("bert-base-uncased", {"checkpointing": 6}, (Zone(0, 1, 1, 6), Zone(6, 1, 1, 6))),
        ("bert-base-uncased", {"freeze": 3}, (Zone(3, 1, 1, 9),)),
        ("modernbert-base", {}, (Zone(0, 4, 3, 7),)),
        ("bert-mini", {}, ()),
        ("albert-base-v2", {}, ()),
    ],
)
def test_zones_are_runs_of_like_layers(model: str, keywords: dict[str, Any], zones: tuple[Zone, ...]) -> None:
    traced = traced_of(model, keywords)
    assert find_zones(prepare(traced.resolved, traced.workload)) == zones


def test_every_layer_is_in_one_group() -> None:
    for zone in (Zone(0, 1, 1, 12), Zone(2, 4, 3, 7)):
        indices = [index for group in range(zone.num_groups) for index in zone.layers(group)]
        assert indices == list(range(zone.start, zone.start + len(indices)))
        assert zone.index(1, 0) == zone.layers(1)[0]
        assert zone.index(0, zone.period - 1) == zone.layers(0)[-1]
