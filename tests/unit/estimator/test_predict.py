"""`estimate`: figures that add up, for whatever names a model, and no work done twice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.estimator.counting import count_work
from transformers import BertConfig, BertForSequenceClassification

from vramfit.devices.catalogue import find_gpu
from vramfit.errors import UnknownGPU, UnknownModel, VramfitError, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.models import resolve, supported_tasks
from vramfit.models.build import build_meta
from vramfit.records.codec import from_json, to_json
from vramfit.records.estimate import CATEGORIES, PHASES, Estimate
from vramfit.units import GIB, MIB

TINY: dict[str, Any] = {"batch": 8, "seq": 64, "gpu": "h200", "torch_version": "2.11.0"}
SHAPES: list[dict[str, Any]] = [
    {},
    {"batch": 1},
    {"mode": "infer", "precision": "fp16"},
    {"mode": "forward", "precision": "amp-bf16", "mask": "ones"},
    {"precision": "amp-fp16", "checkpointing": "full", "max_grad_norm": 1.0},
    {"precision": "bf16", "optimizer": "adafactor", "freeze": "embeddings"},
    {"batch": 24, "accumulate": 3, "optimizer": "adamw-fused", "attention": "eager"},
    {"allocator": "expandable", "gpu": "t4"},
    {"gpu": None, "memory": "2GiB", "task": "masked-lm", "optimizer": "sgd"},
    {"gpu": "k80", "mask": "none", "dropout": False, "task": "question-answering"},
]


def tiny(**keywords: Any) -> Estimate:
    return estimate("bert-tiny", **(TINY | keywords))


def figures(e: Estimate) -> tuple[Any, ...]:
    return (e.phases, e.peak_requested_bytes, e.peak_allocated_bytes, e.peak_reserved_bytes, e.breakdown, e.modules)


@pytest.fixture(params=SHAPES, ids=lambda k: " ".join(f"{a}={b}" for a, b in k.items()) or "default")
def shown(request: pytest.FixtureRequest) -> Estimate:
    return tiny(**request.param)


# -- figures that go together ------------------------------------------------------------------------


def test_categories_modules_and_groups_each_add_up_to_the_peak(shown: Estimate) -> None:
    assert set(shown.breakdown) == set(CATEGORIES)
    assert min(shown.breakdown.values()) >= 0
    assert sum(shown.breakdown.values()) == shown.peak_allocated_bytes
    assert sum(shown.modules.values()) == shown.peak_allocated_bytes
    assert sum(g.allocated_bytes for g in shown.groups) == shown.peak_allocated_bytes


def test_requested_is_inside_allocated_inside_reserved_inside_the_process(shown: Estimate) -> None:
    for phase in shown.phases.values():
        assert 0 < phase.peak_requested_bytes <= phase.peak_allocated_bytes <= phase.peak_reserved_bytes
    assert shown.peak_requested_bytes <= shown.peak_allocated_bytes <= shown.peak_reserved_bytes
    assert shown.peak_process_bytes == shown.peak_reserved_bytes + shown.context_bytes
    assert shown.safe_reserved_bytes >= shown.peak_reserved_bytes


def test_phases_come_in_order_and_the_peak_is_theirs(shown: Estimate) -> None:
    assert tuple(shown.phases) == PHASES
    load, first, steady = (shown.phases[name] for name in PHASES)
    assert load.peak_allocated_bytes < first.peak_allocated_bytes
    assert load.peak_reserved_bytes <= first.peak_reserved_bytes <= steady.peak_reserved_bytes
    assert shown.peak_allocated_bytes == max(p.peak_allocated_bytes for p in shown.phases.values())
    assert shown.peak_allocated_bytes == shown.phases[shown.peak.phase].peak_allocated_bytes
    assert shown.peak_reserved_bytes == steady.peak_reserved_bytes


def test_the_timeline_walks_the_parts_of_the_steady_step_up_to_its_peak(shown: Estimate) -> None:
    parts = list(dict.fromkeys(point.part for point in shown.timeline))
    assert parts == (["forward", "backward", "optimizer"] if shown.workload.trains else ["forward"])
    assert max(p.allocated_bytes for p in shown.timeline) <= shown.phases["steady_step"].peak_allocated_bytes
    assert min(p.allocated_bytes for p in shown.timeline) >= shown.breakdown["weights"]
    assert len(shown.timeline) <= 96


def test_what_is_in_memory_depends_on_what_is_done() -> None:
    training, inferring = tiny().breakdown, tiny(mode="infer").breakdown
    assert training["optimizer"] > training["weights"]
    assert training["gradients"] > 0
    assert inferring["gradients"] == inferring["optimizer"] == 0
    assert inferring["weights"] > 0 < inferring["activations"]


def test_weights_take_what_the_parameters_take_rounded_to_blocks() -> None:
    model = BertForSequenceClassification(resolve("bert-tiny").config)
    exact = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert 0 <= tiny(mode="infer").breakdown["weights"] - exact < 4 * MIB


def test_groups_are_largest_first_with_layers_as_stars() -> None:
    groups = tiny(mode="forward", attention="eager").groups
    assert [g.allocated_bytes for g in groups] == sorted((g.allocated_bytes for g in groups), reverse=True)
    layers = [g for g in groups if ".layer." in g.module]
    assert layers
    assert all(".layer.*" in g.module for g in layers)
    softmax = next(g for g in groups if g.operator == "_softmax")
    assert softmax.num_blocks == 2
    assert softmax.allocated_bytes == 2 * (8 * 2 * 64 * 64 * 4)


def test_the_peak_is_named_by_part_module_and_operator() -> None:
    peak = tiny(batch=512, mode="forward", attention="eager").peak
    assert peak.part == "forward"
    assert peak.module.startswith("bert.encoder.layer.")
    assert peak.operator
    assert tiny(batch=1).peak.part == "optimizer"
    assert tiny(batch=1).peak.module == ""


def test_a_larger_batch_or_length_takes_more() -> None:
    by_batch = [tiny(batch=n, mode="forward").peak_allocated_bytes for n in (1, 2, 8, 64, 500)]
    by_length = [tiny(seq=n, mode="forward").peak_allocated_bytes for n in (8, 77, 128, 512)]
    assert by_batch == sorted(set(by_batch))
    assert by_length == sorted(set(by_length))


def test_accumulation_takes_less_than_the_whole_batch_and_more_than_one_part() -> None:
    whole, part = tiny(batch=512, mode="train"), tiny(batch=128)
    split = tiny(batch=512, accumulate=4)
    assert part.peak_allocated_bytes <= split.peak_allocated_bytes < whole.peak_allocated_bytes
    assert split.workload.micro_batch == 128


# -- capacity ----------------------------------------------------------------------------------------


def test_a_gpu_offers_its_memory_less_the_context() -> None:
    e = tiny()
    assert e.total_memory_bytes == find_gpu("h200").total_memory_bytes
    assert e.capacity_bytes == e.total_memory_bytes - e.context_bytes
    assert e.fits is e.fits_cold is True
    assert e.free_bytes == e.capacity_bytes - e.safe_reserved_bytes > 0


def test_memory_overrides_what_the_gpu_offers() -> None:
    e = tiny(memory="3GiB")
    assert (e.capacity_bytes, e.gpu) == (3 * GIB, "h200")
    assert e.peak_reserved_bytes == tiny().peak_reserved_bytes


def test_without_a_capacity_nothing_is_said_about_fitting() -> None:
    e = tiny(gpu=None)
    assert (e.fits, e.fits_cold, e.capacity_bytes, e.total_memory_bytes, e.free_bytes, e.gpu) == (None,) * 6


def test_what_does_not_fit_is_still_predicted_in_full() -> None:
    e = tiny(memory="20MiB")
    assert e.fits is False
    assert e.free_bytes is not None
    assert e.free_bytes < 0
    assert figures(e) == figures(tiny())


def test_it_fits_exactly_where_the_safe_bound_fits() -> None:
    safe_bytes = tiny().safe_reserved_bytes
    assert tiny(memory=safe_bytes).fits is True
    assert tiny(memory=tiny().peak_requested_bytes - 1).fits is False


@pytest.mark.parametrize(("memory", "batch"), [("256MiB", 8), ("305MiB", 14), ("345MiB", 16), ("382MiB", 20)])
def test_what_fits_only_by_freeing_the_cache_stays_inside_the_capacity(memory: str, batch: int) -> None:
    e = estimate("bert-mini", seq=128, batch=batch, memory=memory)
    assert e.fits
    assert e.num_retries > 0
    assert e.peak_reserved_bytes <= e.safe_reserved_bytes <= e.capacity_bytes
    assert e.peak_reserved_bytes < estimate("bert-mini", seq=128, batch=batch).peak_reserved_bytes


def test_the_breakdown_adds_up_where_the_cache_was_freed_to_stay_inside_the_capacity() -> None:
    e = estimate("bert-mini", seq=128, batch=17, memory="345MiB")
    assert e.num_retries > 0
    assert sum(e.breakdown.values()) == e.peak_allocated_bytes


# -- notes -------------------------------------------------------------------------------------------


def notes(**keywords: Any) -> str:
    return "\n".join(tiny(**keywords).notes)


def test_a_measured_pair_is_verified_and_has_nothing_to_say() -> None:
    assert tiny().basis == "verified"
    assert tiny().notes == ()


@pytest.mark.parametrize("keywords", [{"gpu": "t4"}, {"torch_version": "2.13.0"}, {"gpu": "a100"}])
def test_carried_over_rules_are_told(keywords: dict[str, Any]) -> None:
    assert tiny(**keywords).basis == "derived"
    assert "derived" in notes(**keywords)


def test_a_gpu_that_torch_no_longer_runs_on_is_told_and_predicted() -> None:
    assert "torch 2.11 no longer runs on sm_37" in notes(gpu="k80")
    assert tiny(gpu="k80").fits is True
    assert "no longer runs" not in notes(gpu="t4")


@pytest.mark.parametrize("precision", ["amp-bf16", "bf16"])
def test_bf16_on_a_gpu_without_it_is_refused(precision: str) -> None:
    with pytest.raises(WorkloadError, match=r"t4 \(sm_75\) has no bfloat16.*take amp-fp16"):
        tiny(gpu="t4", precision=precision)
    assert "bfloat16" not in notes(gpu="a100", precision=precision)


def test_no_gpu_names_the_architecture_that_stands_for_it() -> None:
    assert "no gpu given: predicted for sm_80" in notes(gpu=None)
    assert tiny(gpu=None).compute_capability == (8, 0)


def test_skipped_steps_of_fp16_are_told_where_they_can_happen() -> None:
    assert "may skip its first steps" in notes(precision="amp-fp16")
    assert notes(precision="amp-fp16", mode="forward") == ""


# -- models ------------------------------------------------------------------------------------------


def test_a_name_a_folder_a_configuration_and_a_module_give_the_same_figures(tmp_path: Path) -> None:
    config = BertConfig(**resolve("bert-tiny").config.to_dict())
    config.save_pretrained(tmp_path)
    expected = figures(tiny())
    assert figures(estimate(str(tmp_path), **TINY)) == expected
    assert figures(estimate(tmp_path, **TINY)) == expected
    assert figures(estimate(config, **TINY)) == expected
    assert figures(estimate(BertForSequenceClassification(config), **TINY)) == expected


def test_a_module_brings_its_own_frozen_weights_and_attention() -> None:
    module = BertForSequenceClassification(resolve("bert-tiny").config)
    module.bert.embeddings.requires_grad_(False)
    assert figures(estimate(module, **TINY)) == figures(tiny(freeze="embeddings"))
    module.set_attn_implementation("eager")
    assert estimate(module, **TINY).workload.attention == "eager"


def test_a_module_is_looked_at_anew_every_time() -> None:
    module = BertForSequenceClassification(resolve("bert-tiny").config)
    before = estimate(module, **TINY).peak_allocated_bytes
    module.bert.requires_grad_(False)
    assert estimate(module, **TINY).peak_allocated_bytes < before


def test_a_plain_module_can_be_estimated_at_any_batch() -> None:
    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.EmbeddingBag(1000, 64)
            self.head = torch.nn.Linear(64, 2)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.words.weight[input_ids].mean(1))

    small, large = (estimate(Bag(), task="features", mask="none", seq=16, batch=n) for n in (2, 4096))
    assert small.peak_allocated_bytes < large.peak_allocated_bytes
    assert small.workload.model == "Bag"


def test_samples_compared_with_each_other_grow_with_the_square_of_the_batch() -> None:
    class Contrastive(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(100, 32)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.words(input_ids)[:, 0]
            return (x @ x.t()).softmax(-1)

    def scores(batch: int) -> int:
        e = estimate(Contrastive(), task="features", mask="none", mode="forward", seq=4, batch=batch)
        return next(g.allocated_bytes for g in e.groups if g.operator == "_softmax")

    assert scores(2048) == 4 * scores(1024) == 4 * 2048**2


FAMILIES = ("bert-tiny", "distilbert-base-uncased", "albert-base-v2", "electra-small-discriminator", "modernbert-base")
HEADS = [
    (name, task)
    for name in (*FAMILIES, "deberta-v3-xsmall", "mpnet-base")
    for task in supported_tasks(resolve(name, task="features").config)
]


def two_layers(name: str) -> Any:
    config = resolve(name, task="features").config
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


@pytest.mark.parametrize(("name", "task"), [h for h in HEADS if h != ("electra-small-discriminator", "pretraining")])
def test_every_head_of_every_family_trains_and_infers(name: str, task: str) -> None:
    config = build_meta(resolve(two_layers(name), task=task)) if task == "features" else two_layers(name)
    training = estimate(config, task=task, batch=4, seq=32, gpu="t4")
    inferring = estimate(config, task=task, batch=4, seq=32, gpu="t4", mode="infer")
    assert training.workload.task == task
    assert training.peak_allocated_bytes > 2 * inferring.peak_allocated_bytes > 0


@pytest.mark.parametrize("mask", ["ones", "padded"])
def test_electra_pretrains_with_a_mask(mask: str) -> None:
    e = estimate(two_layers("electra-small-discriminator"), task="pretraining", batch=4, seq=32, mask=mask)
    assert e.breakdown["gradients"] > 0 or e.breakdown["optimizer"] > 0


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "keywords", "error", "said"),
    [
        ("bert-tiny", {"seq": 513}, WorkloadError, "seq 513 is beyond the 512 positions of bert-tiny"),
        (
            "bert-tiny",
            {"batch": 2, "lengths": (5, 600), "attention": "packed", "precision": "amp-bf16", "loop": "stepper"},
            WorkloadError,
            "lengths: 600 tokens is beyond the 512 positions of bert-tiny",
        ),
        ("roberta-base", {"seq": 513}, WorkloadError, "beyond the 512 positions"),
        ("deberta-v3-xsmall", {"attention": "sdpa"}, WorkloadError, "has no attention sdpa"),
        ("mpnet-base", {"checkpointing": "full"}, WorkloadError, "does not support it"),
        ("bert-tiny", {"checkpointing": 3}, WorkloadError, "the model has 2 layers"),
        ("bert-tiny", {"freeze": 3}, WorkloadError, "the model has 2 layers"),
        ("bert-tiny", {"gpu": "t4", "precision": "tf32"}, WorkloadError, "precision tf32: t4 (sm_75) has no TF32"),
        ("bert-tiny", {"task": "features"}, WorkloadError, "task features gives vectors and has no loss to train on"),
        ("bert-tiny", {"torch_version": "new"}, WorkloadError, "'new' is not a version"),
        ("bert-tiny", {"gpu": "t5"}, UnknownGPU, "t4"),
        ("bert-tinny", {}, UnknownModel, "bert-tiny"),
        ("", {}, VramfitError, ""),
        (7, {}, WorkloadError, "not int"),
        ("bert-tiny", {"batchsize": 7}, WorkloadError, "unknown keyword 'batchsize'"),
        ("modernbert-base", {"task": "pretraining"}, WorkloadError, "no head for task 'pretraining'"),
    ],
)
def test_what_the_model_or_the_gpu_lacks_is_one_typed_line(
    model: Any, keywords: dict[str, Any], error: type[VramfitError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error) as caught:
        estimate(model, **keywords)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(WorkloadError) as caught:
        estimate("deberta-v3-xsmall", seq=10**6, attention="sdpa", compile=True, gpu="t4", precision="bf16")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("keywords", "fits"),
    [
        ({"memory": "10GiB"}, False),
        ({"memory": 2**20}, False),
        ({"memory": 2**63 - 1}, True),
        ({"seq": 512, "attention": "eager", "memory": "10GiB"}, False),
        ({"seq": 512, "task": "masked-lm", "mode": "infer", "gpu": "k80"}, False),
        ({"seq": 1, "mode": "infer"}, None),
    ],
    ids=str,
)
def test_the_largest_batch_that_can_be_written_gets_an_answer_at_once(
    keywords: dict[str, Any], fits: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = count_work(monkeypatch)
    estimate("bert-tiny", batch=64, **keywords)
    e = estimate("bert-tiny", batch=2**31 - 1, **keywords)
    assert len(work.depths) == 1
    small, large = work.events
    assert large < 1.2 * small
    assert e.fits is fits
    assert sum(e.breakdown.values()) == e.peak_allocated_bytes > 2**31


def test_blocks_are_used_again_however_large_the_batch() -> None:
    small, huge = (estimate("bert-base-uncased", batch=n, seq=512) for n in (1_000, 1_000_000))
    wasted = [e.peak_reserved_bytes / e.peak_allocated_bytes for e in (small, huge)]
    assert wasted[1] < 1.05 * wasted[0]


@pytest.mark.parametrize("keywords", [{"batch": 2**31}, {"memory": 2**63}, {"seq": 2**31 - 1}, {"num_labels": 10**9}])
def test_numbers_beyond_all_bounds_are_typed_errors_at_once(
    keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = count_work(monkeypatch)
    with pytest.raises(WorkloadError):
        estimate("bert-tiny", **keywords)
    assert work.depths == []


# -- again and again ---------------------------------------------------------------------------------


def test_another_batch_of_the_same_workload_is_not_traced_again_and_the_same_batch_identical(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = count_work(monkeypatch)
    first = tiny(seq=72)
    other, again = tiny(seq=72, batch=13), tiny(seq=72)
    assert len(work.depths) == 1
    assert len(work.events) == 3
    assert again == first
    assert other != first


def test_workloads_that_differ_in_anything_but_the_batch_are_not_mixed_up() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"seq": 65},
        {"mask": "none"},
        {"precision": "amp-bf16"},
        {"optimizer": "sgd"},
        {"freeze": "encoder"},
        {"mode": "forward"},
        {"num_labels": 3000},
        {"gpu": "t4"},
        {"attention": "eager"},
    ]
    once = [figures(tiny(batch=64, **c)) for c in changes]
    assert len({str(f) for f in once}) == len(changes)
    assert [figures(tiny(batch=64, **c)) for c in changes] == once


def test_expandable_segments_leave_the_requests_and_reserve_less_or_the_same() -> None:
    plain, expandable = tiny(batch=64), tiny(batch=64, allocator="expandable")
    assert expandable.peak_requested_bytes == plain.peak_requested_bytes
    assert expandable.peak_reserved_bytes <= plain.peak_reserved_bytes


def test_an_estimate_is_written_and_read_back_without_its_stream() -> None:
    e = tiny()
    read = from_json(Estimate, to_json(e))
    assert read == e
    assert e.snapshot is not None
    assert read.snapshot is None
    with pytest.raises(VramfitError, match="no stream to save"):
        read.save_snapshot("x.pickle")


def test_a_bert_that_was_never_published_is_as_good_as_any() -> None:
    config = BertConfig(
        hidden_size=60, num_hidden_layers=3, num_attention_heads=5, intermediate_size=77, vocab_size=1000
    )
    e = estimate(config, batch=3, seq=19, gpu="a100", precision="amp-bf16", attention="sdpa")
    assert e.fits
    assert sum(e.breakdown.values()) == e.peak_allocated_bytes


class Loops(torch.nn.Module):
    """A head that goes through its samples one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)
        self.out = torch.nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None) -> torch.Tensor:
        return torch.stack([self.out(self.table(row)).mean(0) for row in input_ids])


def test_a_model_that_loops_over_samples_is_traced_at_its_real_batch() -> None:
    e = estimate(Loops(), task="features", batch=5, seq=7, gpu="t4")
    assert e.workload.batch == 5
    assert e.peak_allocated_bytes > 0


class Rejects(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


def test_a_forward_that_takes_other_inputs_is_one_clear_error() -> None:
    with pytest.raises(
        WorkloadError, match=r"Rejects\.forward takes x; the batch of a prediction has input_ids"
    ) as caught:
        estimate(Rejects(), task="features", batch=2, seq=4)
    assert "takes token ids, as input_ids" in str(caught.value.hint)


def test_a_thousand_micro_batches_take_no_longer_than_a_few() -> None:
    few = estimate("bert-tiny", batch=40, accumulate=20, seq=16, gpu="t4")
    many = estimate("bert-tiny", batch=4000, accumulate=2000, seq=16, gpu="t4")
    assert many.peak_allocated_bytes == few.peak_allocated_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"gpu": 5},
            {"gpu": ["t4"]},
            {"torch_version": 2.11},
            {"torch_version": "9" * 5_000 + ".1"},
            {"graphs": None},
        ),
        *({"batch": "x"}, {"precision": 3}, {"memory": []}, {"trust_remote_code": "no"}),
    ],
)
def test_a_keyword_of_the_wrong_kind_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=f"^{next(iter(wrong))} "):
        tiny(**wrong)


@pytest.mark.parametrize("model", [5, None, [], b"bert-tiny", object()])
def test_a_model_that_is_none_is_said_to_be_so(model: Any) -> None:
    with pytest.raises(VramfitError):
        estimate(model, batch=1)


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    assert figures(tiny(batch=np.int64(8), seq=np.int32(64))) == figures(tiny())
